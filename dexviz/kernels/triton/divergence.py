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
from dexviz.kernels.triton.launch import STAGES
from dexviz.kernels.triton.rows import row_sums
from dexviz.kernels.triton.source import LazyRows
from dexviz.kernels.triton.tile import column_range, score_tile, seen_columns


class JensenShannon(similarity.JensenShannon):
    """Twin of `dexviz.kernels.similarity.JensenShannon`."""

    def add(self, block: object) -> None:
        """Take in one row block."""
        assert isinstance(block, LazyRows)
        if "total" not in block.kept:
            row_sums(block, offset=0, sink=1, local=1, threshold=1.0, spans={})
        total_SR, rows = block.kept["total"], block.stop - block.start
        alive_SR = total_SR > 0
        total_SR = total_SR.where(alive_SR, 1.0).contiguous()
        plogp_SR = (block.kept["plogp"] / total_SR - total_SR.log()).where(alive_SR, 0.0)
        self.rows_SS += alive_SR.double() @ alive_SR.double().T
        pairs_2P = torch.triu_indices(block.scores, block.scores, offset=1, device=block.launch.device)
        if not pairs_2P.numel():
            return
        first_P, second_P = pairs_2P
        middle_PR = block.empty(len(first_P), rows)
        length = block.launch.side
        widths = (length, min(length, 32), block.launch.depth, block.rank)
        grid = (triton.cdiv(rows, length), len(first_P))
        _middle[grid](
            block.launch.source, pairs_2P.T.contiguous(), total_SR, middle_PR, *widths, *block.settings, num_stages=STAGES
        )
        divergence_PR = (plogp_SR[first_P] + plogp_SR[second_P]) / 2 - middle_PR
        both_PR = alive_SR[first_P] & alive_SR[second_P]
        sums_P = (divergence_PR.clamp(min=0) * both_PR).sum(dim=-1, dtype=torch.float64)
        self.sum_SS[first_P, second_P] += sums_P
        self.sum_SS[second_P, first_P] += sums_P


@no_type_check
@triton.jit
def _middle(
    x, heads, totals, out,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Σ m ln m of one block of rows of one pair of heads."""
    pair, r0 = tl.program_id(1), tl.program_id(0) * BM
    flat = r0 + tl.arange(0, BM)
    inside, row, d, k = flat < x.rows, flat[:, None], tl.arange(0, BD), tl.arange(0, BK)
    low, high = seen_columns(x, row)
    start, stop = column_range(x, low, high, BN)
    total = tl.zeros([BM], tl.float32)
    for c in range(start, stop, BN):
        col = (c + tl.arange(0, BN))[None, :]
        m = tl.zeros([BM, BN], tl.float32)
        for index in range(2):
            s = tl.load(heads + pair * 2 + index)
            mass = tl.load(totals + s * x.rows + flat, mask=inside, other=1.0)[:, None]
            tile = score_tile(x, s, row, col, low, high, d, k, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS)
            m += tl.abs(tile) / (2 * mass)
        total += tl.sum(m * tl.log(tl.maximum(m, 1.1754944e-38)), axis=1)
    tl.store(out + pair.to(tl.int64) * x.rows + flat, total, mask=inside)
