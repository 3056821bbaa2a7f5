"""First pass: log-sum-exp of each row, and the attention output where it is asked for, in one sweep over the keys.

    m' = max(m, max_j z_ij),   l' = l e^(m − m') + Σ_j e^(z_ij − m'),   O' = O e^(m − m') + Σ_j e^(z_ij − m') v_j

Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867); FlashAttention-2 (Dao, arXiv 2307.08691), section 3.1.
A sink starts the sum with its own logit. Rows that may see nothing have +∞ as log-sum-exp, so that their probabilities are 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs, row_blocks
from dexviz.kernels.terms import ScoreBlock, ScoreMap
from dexviz.kernels.triton.launch import STAGES, addressable, padded, side
from dexviz.kernels.triton.source import Launch, LazyRows, attention_launch, rows_per_block, with_terms
from dexviz.kernels.triton.tile import column_range, logits, query_tile, seen_columns


def score_rows(
    score: ScoreMap, start: int, stop: int, out_HNE: Tensor | None = None, scratch: object | None = None
) -> LazyRows:
    """Twin of `dexviz.kernels.terms.score_rows`: of the rows of all score heads, log-sum-exps are computed, and O where asked.

    Args:
        out_HNE: receives the attention output O of these rows where it is given.
        scratch: of no use here, since no map is held.
    """
    launch = attention_launch(score.inputs, start, stop)
    lse_HR = sweep(launch, score.inputs, None if out_HNE is None else out_HNE[:, start:stop])
    return with_terms(launch, score, lse_HR, out_HNE)


def head_rows(score: ScoreMap, head: int, start: int, stop: int) -> ScoreBlock:
    """Twin of `dexviz.kernels.terms.head_rows`: S of one score head, at one head's cost."""
    rows = score_rows(_one_head(score, head), start, stop)
    s_RC, a_TRC = rows.head(0)
    return ScoreBlock(s_RC[None], tuple(a_RC[None] for a_RC in a_TRC), start, stop, rows.c0, rows.c1)


def _one_head(score: ScoreMap, head: int) -> ScoreMap:
    """The same map of one score head, over the softmax heads that it reads."""
    x, picked = score.inputs, [term.heads_S[head] for term in score.terms]
    groups, block = [h // x.groups for h in picked], x.mask.block

    def of_heads(*edges: int) -> Tensor:
        assert block is not None
        mask = block(*edges)
        return mask[:, picked] if mask.dim() == 4 and mask.shape[1] > 1 else mask

    same = x.mask.ranges(x.q_BHND.device) is not None
    one = AttentionInputs(
        x.q_BHND[:, picked],
        x.k_BGMD[:, groups],
        x.v_BGME[:, groups],
        x.scale,
        x.mask if same else replace(x.mask, block=of_heads),
        x.softcap,
        None if x.sinks_H is None else x.sinks_H[picked],
        None if x.bias_BHNM is None else x.bias_BHNM[:, picked] if x.bias_BHNM.shape[1] > 1 else x.bias_BHNM,
    )
    return ScoreMap(one, tuple(replace(term.of(head), heads_S=(i,)) for i, term in enumerate(score.terms)))


def attention_output(x: AttentionInputs, dropout: float = 0.0) -> Tensor:
    """Twin of `dexviz.kernels.output.attention_output`, without dropout and without gradients."""
    assert dropout == 0.0, "dropout belongs to training, which has its own path"
    b, h, n, _ = x.q_BHND.shape
    out_BHNE = torch.empty((b, h, n, x.v_BGME.shape[-1]), dtype=x.v_BGME.dtype, device=x.q_BHND.device)
    for batch in range(b):
        for start, stop in row_blocks(n, rows_per_block(h, x.mask.keys)):
            sweep(attention_launch(x, start, stop, batch), x, out_BHNE[batch, :, start:stop], batch)
    return out_BHNE


def sweep(launch: Launch, x: AttentionInputs, out_HRE: Tensor | None, batch: int = 0) -> Tensor:
    """Log-sum-exp, float32 [H, R], of one prompt of the batch; writes its O to `out_HRE` where that is given."""
    source, rows = launch.source, launch.stop - launch.start
    lse_HR = torch.empty((x.heads, rows), dtype=torch.float32, device=launch.device)
    v_GCE, target = source.k, lse_HR[..., None]
    if out_HRE is not None:
        v_GCE = addressable(x.v_BGME[batch, :, launch.c0 : launch.c1].detach())
        target = out_HRE if out_HRE.stride(-1) == 1 else torch.empty_like(out_HRE, memory_format=torch.contiguous_format)
    sinks_H = source.q if x.sinks_H is None else x.sinks_H.detach().float()
    width = v_GCE.shape[-1]
    measures = (v_GCE.stride(0), v_GCE.stride(1), target.stride(0), target.stride(1), width)
    columns = side(max(launch.row_bytes, padded(width) * v_GCE.element_size()))
    widths = (launch.side, columns, launch.depth, padded(width), x.sinks_H is not None, out_HRE is not None)
    grid = (triton.cdiv(rows, launch.side), x.heads)
    _sweep[grid](source, v_GCE, sinks_H, lse_HR, target, *measures, *widths, *launch.logits, num_stages=STAGES)
    if out_HRE is not None and target is not out_HRE:
        out_HRE.copy_(target)
    return lse_HR


@no_type_check
@triton.jit
def _sweep(
    x, v, sinks, lse, out, v_g, v_n, out_h, out_n, width,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, SINKS: tl.constexpr, OUTPUT: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of rows of one query head."""
    h = tl.program_id(1).to(tl.int64)
    r0 = tl.program_id(0) * BM
    flat = r0 + tl.arange(0, BM)
    row, d, e = flat[:, None], tl.arange(0, BD), tl.arange(0, BE)[None, :]
    q = query_tile(x, h, row, d, UPCAST)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINKS:
        top = tl.zeros([BM], tl.float32) + tl.load(sinks + h)
        total += 1.0
    result = tl.zeros([BM, BE], tl.float32)
    low, high = seen_columns(x, row)
    start, stop = column_range(x, low, high, BN)
    for c in range(start, stop, BN):
        cols = c + tl.arange(0, BN)
        z = logits(x, h, q, row, cols[None, :], low, high, d, MASK, BIAS, CAP, PRECISION, UPCAST)
        higher = tl.maximum(top, tl.max(z, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(z - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        if OUTPUT:
            here = (cols[:, None] < x.cols) & (e < width)
            values = tl.load(v + (h // x.groups) * v_g + cols[:, None] * v_n + e, mask=here, other=0.0)
            if UPCAST:
                values = values.to(tl.float32)
            result = result * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        top = higher
    alive = total > 0
    sums = tl.where(alive, top + tl.log(tl.where(alive, total, 1.0)), float("inf"))
    tl.store(lse + h * x.rows + flat, sums, mask=flat < x.rows)
    if OUTPUT:
        result = (result / tl.where(alive, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + h * out_h + row * out_n + e, result, mask=(row < x.rows) & (e < width))
