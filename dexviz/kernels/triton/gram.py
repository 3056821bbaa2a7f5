"""⟨S_g, S_h⟩ of all score heads: tiles of up to 16 heads stand side by side, a product of that matrix with itself is the rest.

With more than 16 score heads every pair of groups of 16 is programs of its own. A program owns a strip of rows and a chunk of
columns: its sums are float32, sums of programs float64. Each head's tile is made by itself, so that the shared memory holds the
operands of one head at a time; the product runs in one part a warp, since its 16 × 16 result is too small to be shared out.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from dexviz.kernels import similarity
from dexviz.kernels.triton.launch import STAGES
from dexviz.kernels.triton.source import LazyRows
from dexviz.kernels.triton.tile import column_range, score_tile, seen_columns

_GROUP, _ROWS, _COLUMNS, _CHUNK, _PARTS = 16, 16, 32, 1024, 4


class Gram(similarity.Gram):
    """Twin of `dexviz.kernels.similarity.Gram`."""

    def add(self, block: object) -> None:
        """Take in one row block."""
        assert isinstance(block, LazyRows)
        groups = range(0, block.scores, _GROUP)
        for one in groups:
            self._add_pair(block, one, one)
            for other in groups[one // _GROUP + 1 :]:
                self._add_pair(block, one, other)

    def _add_pair(self, block: LazyRows, one: int, other: int) -> None:
        """⟨S_g, S_h⟩ of the groups of heads that begin with these."""
        grid = (triton.cdiv(block.stop - block.start, _ROWS), triton.cdiv(block.c1 - block.c0, _CHUNK))
        parts = block.empty(*grid, _GROUP, _GROUP)
        g, h = (min(block.scores - first, _GROUP) for first in (one, other))
        columns = min(block.launch.side, _COLUMNS)
        widths = (_GROUP, _ROWS, columns, block.launch.depth, block.rank, _CHUNK, _PARTS, one == other)
        _gram[grid](block.launch.source, parts, one, other, g, h, *widths, *block.settings, num_warps=_PARTS, num_stages=STAGES)
        sums = parts.sum(dim=(0, 1), dtype=torch.float64)[:g, :h]
        self.gram_SS[one : one + g, other : other + h] += sums
        if one != other:
            self.gram_SS[other : other + h, one : one + g] += sums.T


@no_type_check
@triton.jit
def _side_by_side(
    x, first, count, row, col, low, high, d, k, G: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """S of G heads from the first on, [BM, BN, G]; those past the count are zero."""
    g = tl.arange(0, G)[None, None, :]
    stack = tl.zeros([row.shape[0], col.shape[1], G], tl.float32)
    for index in range(count):
        tile = score_tile(x, first + index, row, col, low, high, d, k, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS)
        stack = tl.where(g == index, tile[:, :, None], stack)
    return stack


@no_type_check
@triton.jit(do_not_specialize=["one", "other", "ones", "others"])
def _gram(
    x, parts, one, other, ones, others,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, SAME: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One strip of rows and chunk of columns of one pair of groups."""
    strip, chunk = tl.program_id(0), tl.program_id(1)
    row = (strip * BM + tl.arange(0, BM))[:, None]
    d, k, g = tl.arange(0, BD), tl.arange(0, BK), tl.arange(0, G)
    low, high = seen_columns(x, row)
    low, high = tl.maximum(low, chunk * CHUNK), tl.minimum(high, chunk * CHUNK + CHUNK)
    start, stop = column_range(x, low, high, BN)
    total = tl.zeros([PARTS, G, G], tl.float32)
    for c in range(start, stop, BN):
        col = (c + tl.arange(0, BN))[None, :]
        left = _side_by_side(
            x, one, ones, row, col, low, high, d, k, G, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS
        )  # fmt: skip
        left = tl.reshape(left, [PARTS, BM * BN // PARTS, G])
        right = left
        if not SAME:
            right = _side_by_side(
                x, other, others, row, col, low, high, d, k, G, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS
            )  # fmt: skip
            right = tl.reshape(right, [PARTS, BM * BN // PARTS, G])
        total += tl.dot(tl.permute(left, [0, 2, 1]), right, input_precision=PRECISION)
    at = parts + (strip * tl.num_programs(1) + chunk).to(tl.int64) * G * G
    tl.store(at + g[:, None] * G + g[None, :], tl.sum(total, axis=0))
