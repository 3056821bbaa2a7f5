"""Statistics of each query row of a score map, over its shares |S| / Σ|S|  (README, "Statistics").

Axes: S score heads, R rows and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dexviz.kernels.terms import ScoreBlock

_CHUNK = 64
"""Columns that are searched at once for the largest entry."""


def row_sums(
    block: ScoreBlock, *, offset: int, sink: int, local: int, threshold: float, spans: Mapping[str, tuple[int, int]]
) -> RowSums:
    """What the statistics of a block's rows are made of.

    Args:
        offset: absolute position of query row 0 of the map; row i stands at position i + offset.
        sink: how many first tokens count as the sink.
        local: how many last tokens, the query itself among them, count as local.
        threshold: τ; entries with |S| < τ count as sparse, out of all causal entries (keys up to the query).
        spans: named half-open key spans.
    """
    s_SRC, c0 = block.s_SRC, block.c0
    mass_SRC = s_SRC.abs()
    masses = _Masses(mass_SRC, c0)
    positions_R = torch.arange(block.start, block.stop, device=s_SRC.device) + offset
    total_SR = mass_SRC.sum(dim=-1)
    net_SR = s_SRC.sum(dim=-1)
    max_SR, argmax_SR = first_max(mass_SRC)
    return RowSums(
        first=block.start + offset,
        total_SR=total_SR,
        plogp_SR=plogp(mass_SRC),
        net_SR=net_SR,
        max_SR=max_SR,
        argmax_SR=argmax_SR + c0,
        above_SR=(mass_SRC >= threshold).view(torch.uint8).sum(dim=-1, dtype=torch.int32),
        sink_SR=masses.over(0, sink),
        local_SR=masses.local(positions_R, min(local, block.stop + offset)),
        spans={name: masses.over(start, stop) for name, (start, stop) in spans.items()},
    )


@dataclass(frozen=True)
class RowSums:
    """What a row's statistics are made of: sums over its |S|, each [S, R]."""

    first: int
    """Absolute position of the first row; the others follow it."""
    total_SR: Tensor
    plogp_SR: Tensor
    net_SR: Tensor
    """Sum of S itself."""
    max_SR: Tensor
    argmax_SR: Tensor
    """Absolute position of the first key of largest |S|."""
    above_SR: Tensor
    """How many |S| are at least the threshold."""
    sink_SR: Tensor
    local_SR: Tensor
    spans: Mapping[str, Tensor]

    @classmethod
    def joined(cls, parts: Sequence[RowSums]) -> RowSums:
        """The rows of all parts, which follow each other."""
        names = [f.name for f in fields(cls) if f.name.endswith("_SR")]
        sums = {name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names}
        spans = {name: torch.cat([part.spans[name] for part in parts], dim=-1) for name in parts[0].spans}
        return cls(parts[0].first, **sums, spans=spans)

    def statistics(self) -> dict[str, Tensor]:
        """Name → [S, R]; NaN where a row has no mass."""
        total_SR = self.total_SR
        causal_R = torch.arange(self.first + 1, self.first + 1 + total_SR.shape[-1], device=total_SR.device)
        stats = {
            "entropy": (torch.log(total_SR) - self.plogp_SR / total_SR).clamp(min=0),
            "sink": self._share(self.sink_SR),
            "local": self._share(self.local_SR),
            "sparsity": (causal_R - self.above_SR) / causal_R,
            "negative": self._share((total_SR - self.net_SR).clamp(min=0) / 2),
            "net": self.net_SR,
            "max": self.max_SR,
            "argmax": torch.where(total_SR > 0, self.argmax_SR.to(total_SR.dtype), torch.nan),
        }
        stats.update({f"span:{name}": self._share(mass_SR) for name, mass_SR in self.spans.items()})
        return {name: values.to(total_SR.dtype) for name, values in stats.items()}

    def _share(self, part_SR: Tensor) -> Tensor:
        return torch.where(self.total_SR > 0, part_SR / self.total_SR, torch.nan)


def plogp(p_SRC: Tensor) -> Tensor:
    """Σ p log p over the last axis, with 0 log 0 = 0: vectorised, which `torch.special.xlogy` is not on the CPU."""
    tiny = torch.finfo(p_SRC.dtype).tiny
    return p_SRC.clamp_min(tiny).log_().mul_(p_SRC).sum(dim=-1)


def first_max(mass_SRC: Tensor) -> tuple[Tensor, Tensor]:
    """Largest entry of each row and where it first stands: ([S, R], int64 [S, R]).

    By chunks of columns, since `amax` is vectorised on the CPU and `max` with its indices is not.
    """
    width = mass_SRC.shape[-1]
    cut = width // _CHUNK * _CHUNK
    chunks = [mass_SRC[..., :cut].unflatten(-1, (-1, _CHUNK)).amax(dim=-1)] if cut else []
    rest = [mass_SRC[..., cut:].amax(dim=-1, keepdim=True)] if cut < width else []
    max_SR, chunk_SR = torch.cat([*chunks, *rest], dim=-1).max(dim=-1)
    start_SR = (chunk_SR * _CHUNK)[..., None]
    columns = start_SR + torch.arange(min(_CHUNK, width), device=mass_SRC.device)
    found_SRK = mass_SRC.gather(-1, columns.clamp_(max=width - 1)) == max_SR[..., None]
    return max_SR, start_SR[..., 0] + found_SRK.to(torch.uint8).argmax(dim=-1)


class _Masses:
    """Sums of a row's mass on ranges of absolute key positions."""

    def __init__(self, mass_SRC: Tensor, c0: int) -> None:
        self.mass_SRC, self.c0 = mass_SRC, c0

    def over(self, start: int, stop: int) -> Tensor:
        width = self.mass_SRC.shape[-1]
        first, last = (min(max(edge - self.c0, 0), width) for edge in (start, stop))
        return self.mass_SRC[..., first:last].sum(dim=-1)

    def local(self, positions_R: Tensor, local: int) -> Tensor:
        """Mass on keys p − local + 1 … p of the row at position p."""
        columns = positions_R[:, None] - torch.arange(local, device=positions_R.device)[None, :] - self.c0
        width = self.mass_SRC.shape[-1]
        inside = (columns >= 0) & (columns < width)
        index = columns.clamp(0, width - 1).expand(self.mass_SRC.shape[0], -1, -1)
        return (self.mass_SRC.gather(-1, index) * inside).sum(dim=-1)
