"""⟨S_g, S_h⟩ of all score heads: tiles of 16 heads at once, flattened, times their transpose.

With more than 16 score heads every pair of groups of 16 is a program of its own. Sums over a strip of rows are float32, sums of
strips float64.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from dexviz.kernels import similarity
from dexviz.kernels.triton.source import LazyRows
from dexviz.kernels.triton.tile import column_stop, score_tile

_GROUP, _ROWS, _COLUMNS = 16, 16, 16


class Gram(similarity.Gram):
    """Twin of `dexviz.kernels.similarity.Gram`."""

    def add(self, block: object) -> None:
        """Take in one row block."""
        assert isinstance(block, LazyRows)
        groups = range(triton.cdiv(block.scores, _GROUP))
        for pairs in ([(g, g) for g in groups], [(g, h) for g in groups for h in groups if g < h]):
            if pairs:
                self._add_pairs(block, pairs)

    def _add_pairs(self, block: LazyRows, pairs: list[tuple[int, int]]) -> None:
        strips, same = triton.cdiv(block.stop - block.start, _ROWS), pairs[0][0] == pairs[0][1]
        parts = block.empty(len(pairs), strips, _GROUP, _GROUP)
        table = torch.tensor(pairs, dtype=torch.int32, device=block.launch.device)
        widths = (_GROUP, _ROWS, _COLUMNS, block.launch.depth, block.rank, same)
        _gram[(strips, len(pairs))](block.launch.source, table, parts, *widths, *block.settings, num_warps=8, num_stages=1)
        for (g, h), part in zip(pairs, parts.sum(dim=1, dtype=torch.float64), strict=True):
            rows, cols = (slice(_GROUP * i, min(_GROUP * (i + 1), block.scores)) for i in (g, h))
            part = part[: rows.stop - rows.start, : cols.stop - cols.start]
            self.gram_SS[rows, cols] += part
            if not same:
                self.gram_SS[cols, rows] += part.T


@no_type_check
@triton.jit
def _gram(
    x, pairs, parts,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, SAME: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One strip of rows of one pair of groups."""
    strip, pair, g = tl.program_id(0), tl.program_id(1), tl.arange(0, G)
    one = (tl.load(pairs + 2 * pair) * G + g).to(tl.int64)[:, None, None]
    other = (tl.load(pairs + 2 * pair + 1) * G + g).to(tl.int64)[:, None, None]
    row = (strip * BM + tl.arange(0, BM))[None, :, None]
    d, k = tl.arange(0, BD), tl.arange(0, BK)
    across, down, kacross, kdown = d[None, None, :], d[None, :, None], k[None, None, :], k[None, :, None]
    total = tl.zeros([G, G], tl.float32)
    for c in range(0, column_stop(x, (strip + 1) * BM, CAUSAL), BN):
        col = (c + tl.arange(0, BN))[None, None, :]
        left = score_tile(
            x, one, row, col, across, down, kacross, kdown,
            CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS,
        )  # fmt: skip
        left = tl.reshape(left, [G, BM * BN])
        right = left
        if not SAME:
            right = score_tile(
                x, other, row, col, across, down, kacross, kdown,
                CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS,
            )  # fmt: skip
            right = tl.reshape(right, [G, BM * BN])
        total += tl.dot(left, tl.trans(right), input_precision=PRECISION)
    start = parts + (pair * tl.num_programs(0) + strip).to(tl.int64) * G * G
    tl.store(start + g[:, None] * G + g[None, :], total)
