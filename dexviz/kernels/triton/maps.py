"""One head's map, or the columns of it that are asked for, written out: S and the softmax map of each term."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dexviz.kernels.triton.launch import STAGES, padded, rank_step, side
from dexviz.kernels.triton.tile import Source, probabilities, seen_columns, weights


def write_map(source: Source, settings: tuple[Any, ...], head: int, columns: tuple[int, int] | None = None) -> Tensor:
    """S and the term's softmax maps of one score head over a block's rows: float32 [1 + T, R, C].

    Args:
        settings: constants of `score_tile`, after the indices; the last is T.
        columns: half-open, counted within the block; None for all.
    """
    start, stop = columns or (0, source.cols)
    out_TRC = torch.empty((1 + settings[-1], source.rows, stop - start), dtype=torch.float32, device=source.q.device)
    length = side(padded(source.depth) * source.q.element_size())
    grid = (triton.cdiv(source.rows, length), triton.cdiv(stop - start, length))
    widths = (length, length, padded(source.depth), rank_step(source.rank))
    _map[grid](source, out_TRC, head, start, stop, *widths, *settings, num_stages=STAGES)
    return out_TRC


@no_type_check
@triton.jit
def _map(
    x, out, s, start, stop,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One block of rows and columns."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    col = (start + tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    d, k = tl.arange(0, BD), tl.arange(0, BK)
    low, high = seen_columns(x, row)
    inside, plane = (row < x.rows) & (col < stop), (stop - start).to(tl.int64) * x.rows
    at = out + row.to(tl.int64) * (stop - start) + col - start
    total = tl.zeros([BM, BN], tl.float32)
    for t in tl.static_range(TERMS):
        a = probabilities(x, t, s, row, col, low, high, d, MASK, BIAS, CAP, PRECISION, UPCAST)
        tl.store(at + (1 + t) * plane, a, mask=inside)
        if GAIN > 0:
            a *= weights(x, t, s, row, col, k, GAIN, PRECISION)
        total += a
    tl.store(at, total, mask=inside)
