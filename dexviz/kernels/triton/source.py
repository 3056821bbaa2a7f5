"""Rows of a layer's score maps that are never written out: what kernels need to make tiles of them, and what they share.

Axes: S score heads, H query heads, T terms, R rows and C columns of the block, K rank of a term.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs
from dexviz.kernels.terms import ScoreMap, ScoreTerm, resolved
from dexviz.kernels.triton.launch import addressable, dot_settings, padded, rank_step, side
from dexviz.kernels.triton.maps import write_map
from dexviz.kernels.triton.tile import Source

_MASK_BYTES = 1 << 30


@dataclass(frozen=True)
class Launch:
    """Operands of a block of rows: the pointers and measures, and what kernels are compiled for."""

    source: Source
    logits: tuple[Any, ...]
    """MASK, BIAS, CAP, PRECISION, UPCAST."""
    start: int
    stop: int
    c0: int
    c1: int

    @property
    def depth(self) -> int:
        """Padded key width."""
        return padded(self.source.depth)

    @property
    def row_bytes(self) -> int:
        """What a row of queries or keys takes in a tile."""
        return self.depth * self.source.q.element_size()

    @property
    def side(self) -> int:
        """Rows or columns of a tile that holds queries or keys."""
        return side(self.row_bytes)

    @property
    def device(self) -> torch.device:
        return self.source.q.device


@dataclass(frozen=True)
class LazyRows:
    """Twin of `ScoreBlock` that holds no map: its consumers recompute the tiles they need."""

    launch: Launch
    scores: int
    terms: tuple[Any, ...]
    """GAIN and TERMS."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """What one consumer computed and another can use."""

    @property
    def start(self) -> int:
        return self.launch.start

    @property
    def stop(self) -> int:
        return self.launch.stop

    @property
    def c0(self) -> int:
        return self.launch.c0

    @property
    def c1(self) -> int:
        return self.launch.c1

    @property
    def rank(self) -> int:
        """What tiles take of the terms' rank at a time."""
        return rank_step(self.launch.source.rank)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Constants of `score_tile`, after the indices."""
        return (*self.launch.logits, *self.terms)

    def head(self, index: int, columns: tuple[int, int] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One head's part, written out: (S [R, C], the softmax map of each term)."""
        scores, *maps = write_map(self.launch.source, self.settings, index, columns)
        return scores, tuple(maps)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.launch.device)


def rows_per_block(heads: int, n: int) -> int:
    """Query rows a block: no map is held, so only what a dense mask of them would take limits their number."""
    return int(min(max(_MASK_BYTES // max(n, 1) // 64 * 64, 64), 1 << 16))


def attention_launch(x: AttentionInputs, start: int, stop: int, batch: int = 0) -> Launch:
    """Operands of the softmax maps of the rows [start, stop) of one prompt of the batch."""
    mask, low_R, high_R, c0, c1 = _seen(x, start, stop, batch)
    bias = None if x.bias_BHNM is None else x.bias_BHNM[min(batch, len(x.bias_BHNM) - 1), :, start:stop, c0:c1].float()
    if mask is not None and mask.dtype != torch.bool:
        bias, mask = mask.float() if bias is None else bias + mask.float(), None
    q, k = addressable(x.q_BHND[batch, :, start:stop].detach()), addressable(x.k_BGMD[batch, :, c0:c1].detach())
    shape = (x.heads, stop - start, c1 - c0)
    dense_mask, dense_bias = (q if t is None else addressable(t.expand(shape)) for t in (mask, bias))
    source = Source(
        q, k, q, low_R, high_R, dense_mask, dense_bias, q, q, q,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        dense_mask.stride(0), dense_mask.stride(1), dense_bias.stride(0), dense_bias.stride(1),
        0, 0, 0, 0, 0, 0,
        stop - start, c1 - c0, x.heads, x.groups, q.shape[-1], 1, x.scale, x.softcap or 0.0,
    )  # fmt: skip
    constants = (mask is not None, bias is not None, x.softcap is not None, *dot_settings(q))
    return Launch(source, constants, start, stop, c0, c1)


def _seen(x: AttentionInputs, start: int, stop: int, batch: int) -> tuple[Tensor | None, Tensor, Tensor, int, int]:
    """What rows may see: (mask [H | 1, R, C] or None, low [R], high [R] columns, c0, c1); a range of columns needs no mask."""
    device = x.q_BHND.device
    columns, ranges = x.mask.columns(start, stop, device), x.mask.ranges(device)
    if columns is not None and ranges is not None:
        low_R, high_R = (edge[start:stop] - columns[0] for edge in ranges)
        return None, low_R, high_R, *columns
    mask, c0, c1 = x.mask.rows(start, stop, device)
    assert mask is not None, "what is not described by ranges is described by a mask"
    mask = mask[min(batch, len(mask) - 1)] if mask.dim() == 4 else mask
    low_R = torch.zeros(stop - start, dtype=torch.int32, device=device)
    return mask, low_R, torch.full_like(low_R, c1 - c0), c0, c1


def with_terms(launch: Launch, score: ScoreMap, lse_HR: Tensor, out_HNE: Tensor | None = None) -> LazyRows:
    """The rows of the score maps, once each row's log-sum-exp is known, and O where a term needs it."""
    device, terms = launch.device, [resolved(term, launch.start, launch.stop, out_HNE) for term in score.terms]
    heads_TS = torch.tensor([term.heads_S for term in terms], dtype=torch.int64, device=device)
    plain = all(term.u_SNK is None and term.w_SMK is None for term in terms)
    sides = [_sides(term, launch) for term in terms]
    rank = max(t.shape[-1] for side in sides for t in side)
    u = w = lse_HR[None, :, :, None]
    if not plain:
        u, w = (torch.stack([_widened(t, score.heads, rank) for t in side]) for side in zip(*sides, strict=True))
    source = launch.source._replace(
        lse=lse_HR, heads=heads_TS, u=u, w=w, scores=score.heads, rank=rank,
        u_t=u.stride(0), u_s=u.stride(1), u_n=u.stride(2), w_t=w.stride(0), w_s=w.stride(1), w_n=w.stride(2),
    )  # fmt: skip
    changed = Launch(source, launch.logits, launch.start, launch.stop, launch.c0, launch.c1)
    return LazyRows(changed, score.heads, (0 if plain else 1 if rank == 1 else 2, len(terms)))


def _sides(term: ScoreTerm, launch: Launch) -> tuple[Tensor, Tensor]:
    """U [S | 1, R, K] of the block's rows and W [S | 1, C, K] of its columns; a missing side is ones, and the other its sum."""
    u, w = term.u_SNK, None if term.w_SMK is None else term.w_SMK[:, launch.c0 : launch.c1]
    assert not callable(u)
    if u is not None and w is not None:
        return u, w
    u, w = (None if t is None else t.sum(dim=-1, keepdim=True) for t in (u, w))
    u = torch.ones(1, launch.stop - launch.start, 1, device=launch.device) if u is None else u
    return u, torch.ones(1, launch.c1 - launch.c0, 1, device=launch.device) if w is None else w


def _widened(x_SNK: Tensor, heads: int, rank: int) -> Tensor:
    """float32 [S, N, K] of the common rank."""
    x_SNK = torch.nn.functional.pad(x_SNK.float(), (0, rank - x_SNK.shape[-1]))
    return x_SNK.expand(heads, -1, -1)
