"""Rows of a layer's score maps that are never written out: what kernels need to make tiles of them, and what they share.

Axes: S score heads, H query heads, T terms, R rows and C columns of the block, K rank of a term.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs
from dexviz.kernels.terms import ScoreMap, ScoreTerm
from dexviz.kernels.triton.launch import dot_settings, padded, rank_step
from dexviz.kernels.triton.maps import write_map
from dexviz.kernels.triton.tile import Source

_MASK_BYTES = 1 << 26


@dataclass(frozen=True)
class Launch:
    """Operands of a block of rows: the pointers and measures, and what kernels are compiled for."""

    source: Source
    logits: tuple[Any, ...]
    """CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST."""
    start: int
    stop: int
    c0: int
    c1: int

    @property
    def depth(self) -> int:
        """Padded key width."""
        return padded(self.source.depth)

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
    """Query rows a block: no map is held, so only what a dense mask of them takes limits their number."""
    return int(min(max(_MASK_BYTES // max(n, 1) // 64 * 64, 64), 1 << 16))


def attention_launch(x: AttentionInputs, start: int, stop: int, batch: int = 0) -> Launch:
    """Operands of the softmax maps of the rows [start, stop) of one prompt of the batch."""
    mask, bias, c0, c1 = _visible(x, start, stop, batch)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (x.q_BHND[batch], x.k_BGMD[batch]))
    q, k = q[:, start:stop].detach(), k[:, c0:c1].detach()
    dense_mask, dense_bias = (t if t is not None else q for t in (mask, bias))
    causal = x.mask.block is None and x.mask.causal
    source = Source(
        q, k, q, dense_mask, dense_bias, q, q, q,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        dense_mask.stride(0), dense_mask.stride(1), dense_bias.stride(0), dense_bias.stride(1),
        0, 0, 0, 0, 0, 0,
        stop - start, c1 - c0, start + x.mask.offset - c0, x.heads, x.groups, q.shape[-1], 1, x.scale, x.softcap or 0.0,
    )  # fmt: skip
    constants = (causal, mask is not None, bias is not None, x.softcap is not None, *dot_settings(q))
    return Launch(source, constants, start, stop, c0, c1)


def _visible(x: AttentionInputs, start: int, stop: int, batch: int) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(bool mask [H, R, C] or None, what is added to logits [H, R, C] or None, first column, end of columns)."""
    spec, device = x.mask, x.q_BHND.device
    mask, c0, c1 = None, 0, min(spec.keys, stop + spec.offset) if spec.causal else spec.keys
    if spec.block is not None:
        dense, c0, c1 = spec.rows(start, stop, device)
        assert dense is not None
        dense = dense[min(batch, len(dense) - 1)] if dense.dim() == 4 else dense
        mask = dense.expand(x.heads, stop - start, c1 - c0)
    bias = None if x.bias_BHNM is None else x.bias_BHNM[min(batch, len(x.bias_BHNM) - 1), :, start:stop, c0:c1].float()
    if mask is not None and mask.dtype != torch.bool:
        bias, mask = mask.float() if bias is None else bias + mask.float(), None
    if bias is not None:
        bias = bias.expand(x.heads, stop - start, c1 - c0)
    return (None if mask is None else _rows_contiguous(mask)), (None if bias is None else _rows_contiguous(bias)), c0, c1


def _rows_contiguous(x_HRC: Tensor) -> Tensor:
    return x_HRC if x_HRC.stride(-1) == 1 or x_HRC.shape[-1] == 1 else x_HRC.contiguous()


def with_terms(launch: Launch, score: ScoreMap, lse_HR: Tensor) -> LazyRows:
    """The rows of the score maps, once each row's log-sum-exp is known."""
    device, terms = launch.device, score.terms
    heads_TS = torch.tensor([term.heads_S for term in terms], dtype=torch.int64, device=device)
    plain = all(term.u_SNK is None and term.w_SMK is None for term in terms)
    rank = max(t.shape[-1] if t is not None else 1 for term in terms for t in (term.u_SNK, term.w_SMK))
    rank = rank if any(term.u_SNK is not None and term.w_SMK is not None for term in terms) else 1
    u = w = lse_HR[None, :, :, None]
    if not plain:
        sides = [_sides(term, launch, score.heads, rank) for term in terms]
        u, w = (torch.stack(side) if len(side) > 1 else side[0][None] for side in zip(*sides, strict=True))
    source = launch.source._replace(
        lse=lse_HR, heads=heads_TS, u=u, w=w, scores=score.heads, rank=rank,
        u_t=u.stride(0), u_s=u.stride(1), u_n=u.stride(2), w_t=w.stride(0), w_s=w.stride(1), w_n=w.stride(2),
    )  # fmt: skip
    changed = Launch(source, launch.logits, launch.start, launch.stop, launch.c0, launch.c1)
    return LazyRows(changed, score.heads, (0 if plain else 1 if rank == 1 else 2, len(terms)))


def _sides(term: ScoreTerm, launch: Launch, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    """U [S, R, K] and W [S, C, K] in float32; a missing side is ones, against which the other counts by its sum."""
    u = None if term.u_SNK is None else term.u_SNK[:, launch.start : launch.stop].float()
    w = None if term.w_SMK is None else term.w_SMK[:, launch.c0 : launch.c1].float()
    if u is None or w is None or u.shape[-1] < rank:
        u, w = (None if t is None else t.sum(dim=-1, keepdim=True) if None in (u, w) else t for t in (u, w))
        u = _ones(heads, launch.stop - launch.start, launch) if u is None else u
        w = _ones(heads, launch.c1 - launch.c0, launch) if w is None else w
        u, w = (torch.nn.functional.pad(t, (0, rank - t.shape[-1])) for t in (u, w))
    return tuple(t if t.stride(-1) == 1 or rank == 1 else t.contiguous() for t in (u, w))  # type: ignore[return-value]


def _ones(heads: int, length: int, launch: Launch) -> Tensor:
    return torch.ones(heads, length, 1, dtype=torch.float32, device=launch.device)
