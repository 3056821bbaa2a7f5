"""Jensen-Shannon divergence between the rows of two heads: Σ_j m ln m of the middle m = (p + q) / 2 from recomputed tiles.

Each pair of heads recomputes the tiles of both, so that no tile is ever stored; Σ p ln p and the totals of a row come from the
row statistics.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from dexviz.kernels import similarity
from dexviz.kernels.triton.rows import row_sums
from dexviz.kernels.triton.source import LazyRows
from dexviz.kernels.triton.tile import column_stop, score_tile

_ROWS, _COLUMNS = 64, 32


class JensenShannon(similarity.JensenShannon):
    """Twin of `dexviz.kernels.similarity.JensenShannon`."""

    def add(self, block: object) -> None:
        """Take in one row block."""
        assert isinstance(block, LazyRows)
        if "total" not in block.kept:
            sums = row_sums(block, 0, 1, 1, 1.0, {})
            block.kept.update(total=sums.total_SR, plogp=sums.plogp_SR)
        total_SR, rows = block.kept["total"], block.stop - block.start
        alive_SR = total_SR > 0
        total_SR = total_SR.where(alive_SR, 1.0).contiguous()
        plogp_SR = (block.kept["plogp"] / total_SR - total_SR.log()).where(alive_SR, 0.0)
        self.rows_SS += alive_SR.double() @ alive_SR.double().T
        first_P, second_P = torch.triu_indices(block.scores, block.scores, offset=1, device=block.launch.device)
        if not len(first_P):
            return
        middle_PR = block.empty(len(first_P), rows)
        widths = (_ROWS, _COLUMNS, block.launch.depth, block.rank)
        grid = (triton.cdiv(rows, _ROWS), len(first_P))
        _middle[grid](block.launch.source, first_P, second_P, total_SR, middle_PR, *widths, *block.settings)
        divergence_PR = (plogp_SR[first_P] + plogp_SR[second_P]) / 2 - middle_PR
        both_PR = alive_SR[first_P] & alive_SR[second_P]
        sums_P = (divergence_PR.clamp(min=0) * both_PR).sum(dim=-1, dtype=torch.float64)
        self.sum_SS[first_P, second_P] += sums_P
        self.sum_SS[second_P, first_P] += sums_P


@no_type_check
@triton.jit
def _middle(
    x, firsts, seconds, totals, out,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Σ m ln m of one block of rows of one pair of heads."""
    pair, r0 = tl.program_id(1), tl.program_id(0) * BM
    one, other = tl.load(firsts + pair), tl.load(seconds + pair)
    flat = r0 + tl.arange(0, BM)
    inside, row, d, k = flat < x.rows, flat[:, None], tl.arange(0, BD), tl.arange(0, BK)
    one_total = tl.load(totals + one * x.rows + flat, mask=inside, other=1.0)[:, None]
    other_total = tl.load(totals + other * x.rows + flat, mask=inside, other=1.0)[:, None]
    total = tl.zeros([BM], tl.float32)
    for c in range(0, column_stop(x, r0 + BM, CAUSAL), BN):
        col = (c + tl.arange(0, BN))[None, :]
        p = score_tile(
            x, one, row, col, d[None, :], d[:, None], k[None, :], k[:, None],
            CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS,
        )  # fmt: skip
        q = score_tile(
            x, other, row, col, d[None, :], d[:, None], k[None, :], k[:, None],
            CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS,
        )  # fmt: skip
        m = (tl.abs(p) / one_total + tl.abs(q) / other_total) / 2
        total += tl.sum(m * tl.log(tl.maximum(m, 1.1754944e-38)), axis=1)
    tl.store(out + pair.to(tl.int64) * x.rows + flat, total, mask=inside)
