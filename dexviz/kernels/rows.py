"""Statistics of each query row of a score map, over its shares |S| / Σ|S|  (README, "Statistics").

Axes: S score heads, R rows and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dexviz.kernels.terms import ScoreBlock


def row_statistics(
    block: ScoreBlock, *, offset: int, sink: int, local: int, threshold: float, spans: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Statistics of a block's rows: name → [S, R]; NaN where a row has no mass.

    Args:
        offset: absolute position of query row 0 of the map; row i stands at position i + offset.
        sink: how many first tokens count as the sink.
        local: how many last tokens, the query itself among them, count as local.
        threshold: τ; entries with |S| < τ count as sparse, out of all causal entries (keys up to the query).
        spans: named half-open key spans.
    """
    s_SRC, c0, c1 = block.s_SRC, block.c0, block.c1
    mass_SRC = s_SRC.abs()
    masses = _Masses(mass_SRC, c0)
    positions_R = torch.arange(block.start, block.stop, device=s_SRC.device) + offset
    causal_R = positions_R + 1
    total_SR = mass_SRC.sum(dim=-1)
    net_SR = s_SRC.sum(dim=-1)
    below_SR = (mass_SRC < threshold).view(torch.uint8).sum(dim=-1, dtype=torch.int32)
    return RowSums(
        total_SR=total_SR,
        plogp_SR=plogp(mass_SRC),
        net_SR=net_SR,
        max_SR=mass_SRC.amax(dim=-1),
        sparsity_SR=(below_SR - (c1 - c0) + causal_R) / causal_R,
        sink_SR=masses.over(0, sink),
        local_SR=masses.local(positions_R, min(local, block.stop + offset)),
        spans={name: masses.over(start, stop) for name, (start, stop) in spans.items()},
    ).statistics()


@dataclass(frozen=True)
class RowSums:
    """What a row's statistics are made of: sums over its |S|, each [S, R]."""

    total_SR: Tensor
    plogp_SR: Tensor
    net_SR: Tensor
    """Sum of S itself."""
    max_SR: Tensor
    sparsity_SR: Tensor
    """Already a share: of the causal entries."""
    sink_SR: Tensor
    local_SR: Tensor
    spans: Mapping[str, Tensor]

    def statistics(self) -> dict[str, Tensor]:
        """Name → [S, R]; NaN where a row has no mass."""
        total_SR = self.total_SR
        stats = {
            "entropy": (torch.log(total_SR) - self.plogp_SR / total_SR).clamp(min=0),
            "sink": self._share(self.sink_SR),
            "local": self._share(self.local_SR),
            "sparsity": self.sparsity_SR,
            "negative": self._share((total_SR - self.net_SR).clamp(min=0) / 2),
            "net": self.net_SR,
            "max": self.max_SR,
        }
        stats.update({f"span:{name}": self._share(mass_SR) for name, mass_SR in self.spans.items()})
        return {name: values.to(total_SR.dtype) for name, values in stats.items()}

    def _share(self, part_SR: Tensor) -> Tensor:
        return torch.where(self.total_SR > 0, part_SR / self.total_SR, torch.nan)


def plogp(p_SRC: Tensor) -> Tensor:
    """Σ p log p over the last axis, with 0 log 0 = 0: vectorised, which `torch.special.xlogy` is not on the CPU."""
    tiny = torch.finfo(p_SRC.dtype).tiny
    return p_SRC.clamp_min(tiny).log_().mul_(p_SRC).sum(dim=-1)


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
