"""Tile sums and extremes of S: one program for each screen tile and score head, which owns its tile and so needs no atomics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dexviz.kernels import tiles
from dexviz.kernels.triton.launch import NARROWEST, STAGES
from dexviz.kernels.triton.source import LazyRows
from dexviz.kernels.triton.tile import column_range, score_tile, seen_columns


class Tiles(tiles.Tiles):
    """Twin of `dexviz.kernels.tiles.Tiles`."""

    def add(self, block: object) -> None:
        """Take in one row block; rows outside the edges are passed over."""
        assert isinstance(block, LazyRows)
        edges, device = self.row_edges.tolist(), block.launch.device
        start, stop = max(block.start + self.offset, edges[0]), min(block.stop + self.offset, edges[-1])
        if start >= stop:
            return
        first, last = bisect_right(edges, start) - 1, bisect_left(edges, stop)
        row_edges = (self.row_edges - self.offset - block.start).to(device, torch.int32)
        col_edges = (self.col_edges - block.c0).to(device, torch.int32)
        grid = (last - first, len(col_edges) - 1, block.scores)
        widths = (*(_side(e, block.launch.side) for e in (self.row_edges, self.col_edges)), block.launch.depth, block.rank)
        outs = (self.sum_SPP, self.high_SPP, self.low_SPP)
        measures = (first, len(row_edges) - 1, len(col_edges) - 1)
        _tiles[grid](block.launch.source, row_edges, col_edges, *outs, *measures, *widths, *block.settings, num_stages=STAGES)


def _side(edges: Tensor, most: int) -> int:
    """Rows or columns that a program takes at a time: enough for the largest tile, within bounds."""
    largest = int(torch.diff(edges).max())
    return max(NARROWEST, min(most, 1 << (largest - 1).bit_length()))


@no_type_check
@triton.jit
def _tiles(
    x, row_edges, col_edges, sums, highs, lows, first, tile_rows, tile_cols,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One screen tile of one score head; entries that no row of the block sees are zero."""
    s, p, q = tl.program_id(2).to(tl.int64), first + tl.program_id(0), tl.program_id(1)
    r0, r1 = tl.maximum(tl.load(row_edges + p), 0), tl.minimum(tl.load(row_edges + p + 1), x.rows)
    c0, c1 = tl.maximum(tl.load(col_edges + q), 0), tl.minimum(tl.load(col_edges + q + 1), x.cols)
    d, k = tl.arange(0, BD), tl.arange(0, BK)
    total, high, low = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for r in range(r0, r1, BM):
        row = (r + tl.arange(0, BM))[:, None]
        left, right = seen_columns(x, row)
        left, right = tl.maximum(left, c0), tl.where(row < r1, tl.minimum(right, c1), 0)
        start, stop = column_range(x, left, right, BN)
        for c in range(start, stop, BN):
            col = (c + tl.arange(0, BN))[None, :]
            tile = score_tile(x, s, row, col, left, right, d, k, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS)
            total += tl.sum(tile, axis=1)
            high = tl.maximum(high, tl.max(tile, axis=1))
            low = tl.minimum(low, tl.min(tile, axis=1))
    at = (s * tile_rows + p) * tile_cols + q
    tl.store(sums + at, tl.load(sums + at) + tl.sum(total, axis=0))
    tl.store(highs + at, tl.maximum(tl.load(highs + at), tl.max(high, axis=0)))
    tl.store(lows + at, tl.minimum(tl.load(lows + at), tl.min(low, axis=0)))
