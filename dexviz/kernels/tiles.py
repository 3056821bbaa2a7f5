"""Tile means and extremes of a score map at screen resolution.

Tile t of P covers the tokens ⌊t·N/P⌋ to ⌊(t+1)·N/P⌋ − 1. Means are over a tile's causal entries (key ≤ query).

Axes: S score heads, N tokens, P tiles a side, R rows and C columns of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dexviz.kernels.terms import ScoreBlock


def tile_edges(start: int, stop: int, tiles: int) -> Tensor:
    """Positions at which `tiles` tiles of [start, stop) begin, and the end: int64 [tiles + 1]."""
    return start + torch.arange(tiles + 1) * (stop - start) // tiles


class Tiles:
    """Streams row blocks into tile sums and extremes of S.

    Args:
        heads: score heads S.
        row_edges, col_edges: absolute positions of the tiles' borders, int64 [rows + 1] and [cols + 1].
        offset: absolute position of query row 0 of the map.
    """

    def __init__(self, heads: int, row_edges: Tensor, col_edges: Tensor, offset: int, like: Tensor) -> None:
        self.row_edges, self.col_edges, self.offset = row_edges, col_edges, offset
        shape = (heads, len(row_edges) - 1, len(col_edges) - 1)
        self.sum_SPP = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.high_SPP = torch.full_like(self.sum_SPP, -torch.inf)
        self.low_SPP = torch.full_like(self.sum_SPP, torch.inf)

    def add(self, block: ScoreBlock) -> None:
        """Take in one row block; rows outside the edges are passed over."""
        first, last = int(self.row_edges[0]), int(self.row_edges[-1])
        positions_R = torch.arange(block.start, block.stop) + self.offset
        keep = (positions_R >= first) & (positions_R < last)
        if not bool(keep.any()):
            return
        s_SRC = block.s_SRC[:, keep.to(block.s_SRC.device)]
        causal_RC = torch.arange(block.c0, block.c1)[None, :] <= positions_R[keep][:, None]
        tiles_R = (torch.searchsorted(self.row_edges, positions_R[keep], right=True) - 1).to(s_SRC.device)
        self._reduce(s_SRC, causal_RC.to(s_SRC.device), tiles_R, block.c0)

    def _reduce(self, s_SRC: Tensor, causal_RC: Tensor, tiles_R: Tensor, c0: int) -> None:
        index_PW, inside_PW = self._columns(c0, s_SRC.shape[-1], s_SRC.device)
        gathered = s_SRC[..., index_PW]
        known = causal_RC[:, index_PW] & inside_PW
        self.sum_SPP.index_add_(1, tiles_R, (gathered * known).sum(dim=-1))
        rows = tiles_R[None, :, None].expand(s_SRC.shape[0], -1, index_PW.shape[0])
        self.high_SPP.scatter_reduce_(1, rows, gathered.masked_fill(~known, -torch.inf).amax(dim=-1), "amax")
        self.low_SPP.scatter_reduce_(1, rows, gathered.masked_fill(~known, torch.inf).amin(dim=-1), "amin")

    def _columns(self, c0: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block columns of each column tile, padded to the widest tile: index [P, W] and which of them are real."""
        starts, stops = self.col_edges[:-1, None], self.col_edges[1:, None]
        span = torch.arange(int((stops - starts).max()))[None, :] + starts
        local = span - c0
        inside = (span < stops) & (local >= 0) & (local < width)
        return local.clamp(0, width - 1).to(device), inside.to(device)

    def means(self) -> Tensor:
        """Mean over the causal entries of each tile, [S, P, P]; NaN where there are none."""
        count = causal_counts(self.row_edges, self.col_edges).to(self.sum_SPP)
        return torch.where(count > 0, self.sum_SPP / count, torch.nan)

    def extremes(self) -> Tensor:
        """Entry of largest magnitude of each tile, [S, P, P]; entries a window hides count as 0, no entry as NaN."""
        count = causal_counts(self.row_edges, self.col_edges).to(self.sum_SPP.device)
        high, low = (torch.where(t.isinf(), 0.0, t) for t in (self.high_SPP, self.low_SPP))
        return torch.where(count > 0, torch.where(low.abs() > high.abs(), low, high), torch.nan)


def causal_counts(row_edges: Tensor, col_edges: Tensor) -> Tensor:
    """How many entries with key ≤ query each tile has: int64 [rows, cols]."""
    rows = torch.arange(int(row_edges[0]), int(row_edges[-1]))
    below = (rows[:, None] + 1 - col_edges[None, :-1]).clamp(min=0)
    count_RC = torch.minimum(below, (col_edges[1:] - col_edges[:-1])[None, :])
    cumulative = torch.cat([torch.zeros_like(count_RC[:1]), count_RC.cumsum(dim=0)])
    index = row_edges - row_edges[0]
    return cumulative[index[1:]] - cumulative[index[:-1]]
