"""Tile means and extremes of a score map at screen resolution.

Tile t of P covers the tokens ⌊t·N/P⌋ to ⌊(t+1)·N/P⌋ − 1. Means are over a tile's causal entries (key ≤ query).

Axes: S score heads, N tokens, P tiles a side, R rows and C columns of a block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dexviz.kernels.terms import ScoreBlock


def tile_edges(start: int, stop: int, tiles: int) -> Int[Tensor, " edges"]:
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
        self.high_SPP = torch.zeros_like(self.sum_SPP)
        self.low_SPP = torch.zeros_like(self.sum_SPP)

    def add(self, block: ScoreBlock) -> None:
        """Take in one row block; rows outside the edges are passed over.

        Entries above the diagonal are zero, so they change no sum and are never the largest in magnitude.
        """
        edges = self.row_edges.tolist()
        start, stop = max(block.start + self.offset, edges[0]), min(block.stop + self.offset, edges[-1])
        if start >= stop:
            return
        first = bisect_right(edges, start) - 1
        last = bisect_left(edges, stop)
        cuts = [max(start, edges[t]) - self.offset - block.start for t in range(first, last)]
        sizes = torch.diff(torch.tensor([*cuts, stop - self.offset - block.start])).tolist()
        bands = block.s_SRC[:, cuts[0] : cuts[0] + sum(sizes)].split(sizes, dim=1)
        index_PW, inside_PW = self._columns(block.c0, block.s_SRC.shape[-1], block.s_SRC.device)
        rows = slice(first, last)

        def columns(name: str, empty: float) -> Tensor:
            """Reduce over a band's rows first, which leaves little to gather."""
            reduced_STC = torch.stack([getattr(band, name)(dim=1) for band in bands], dim=1)
            return getattr(reduced_STC[..., index_PW].masked_fill(~inside_PW, empty), name)(dim=-1)

        self.sum_SPP[:, rows] += columns("sum", 0.0)
        self.high_SPP[:, rows] = torch.maximum(self.high_SPP[:, rows], columns("amax", 0.0))
        self.low_SPP[:, rows] = torch.minimum(self.low_SPP[:, rows], columns("amin", 0.0))

    def merge(self, other: Tiles) -> None:
        """Take in what another instance of the same edges has seen of other rows."""
        self.sum_SPP += other.sum_SPP
        self.high_SPP = torch.maximum(self.high_SPP, other.high_SPP)
        self.low_SPP = torch.minimum(self.low_SPP, other.low_SPP)

    def _columns(self, c0: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block columns of each column tile, padded to the widest tile: index [P, W] and which of them are real."""
        starts, stops = self.col_edges[:-1, None], self.col_edges[1:, None]
        span = torch.arange(int((stops - starts).max()))[None, :] + starts
        local = span - c0
        inside = (span < stops) & (local >= 0) & (local < width)
        return local.clamp(0, width - 1).to(device), inside.to(device)

    def means(self) -> Float[Tensor, "S P Q"]:
        """Mean over the causal entries of each tile, [S, P, P]; NaN where there are none."""
        count = causal_counts(self.row_edges, self.col_edges).to(self.sum_SPP)
        return torch.where(count > 0, self.sum_SPP / count, torch.nan)

    def extremes(self) -> Float[Tensor, "S P Q"]:
        """Entry of largest magnitude of each tile, [S, P, P]; entries a window hides count as 0, no entry as NaN."""
        count = causal_counts(self.row_edges, self.col_edges).to(self.sum_SPP.device)
        extreme = torch.where(self.low_SPP.abs() > self.high_SPP, self.low_SPP, self.high_SPP)
        return torch.where(count > 0, extreme, torch.nan)


def causal_counts(row_edges: Int[Tensor, " rows"], col_edges: Int[Tensor, " cols"]) -> Int[Tensor, "rows-1 cols-1"]:
    """How many entries with key ≤ query each tile has: int64 [rows, cols]."""
    return _causal_counts(tuple(row_edges.tolist()), tuple(col_edges.tolist()))


@lru_cache(maxsize=8)
def _causal_counts(row_edges: tuple[int, ...], col_edges: tuple[int, ...]) -> Tensor:
    """Column edge c has min(max(i + 1, 0), c) entries before it in row i: summed over rows in closed form.

    Σ_{i < r} min(i + 1, c) = r (r + 1) / 2 where r ≤ c, else c (c + 1) / 2 + (r − c) c.
    """
    r, c = torch.tensor(row_edges)[:, None], torch.tensor(col_edges)[None, :]
    before = torch.where(r <= c, r * (r + 1) // 2, c * (c + 1) // 2 + (r - c) * c)
    return before.diff(dim=0).diff(dim=1)
