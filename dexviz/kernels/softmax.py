"""Softmax attention in blocks of query rows: A_h = softmax(scale · Q_h K_hᵀ + mask), exactly as the model computes it.

Soft-capping (Gemma 2: cap · tanh(x / cap) before the mask), attention sinks (gpt-oss: one more logit in the softmax's
denominator, without a value) and additive position biases are honoured. With grouped-query attention, query head h
reads key/value head h // (H / G).

Axes: B batch, H query heads, G key/value heads, N queries, M keys, D key width, E value width, R rows of a block,
C columns of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

MaskBlock = Callable[[int, int, int, int], Tensor]
_MASK_ENTRIES = 1 << 24
"""Entries of a mask that are evaluated at once."""


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query may see, described rather than materialised."""

    queries: int
    keys: int
    block: MaskBlock | None = None
    """(row start, row stop, column start, column stop) → bool [B | 1, H | 1, R, C], True = visible; or an additive
    float mask of the same shape. None: plain causality, or everything where `causal` is False."""
    causal: bool = True
    _ranges: list[tuple[Tensor, Tensor] | None] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def offset(self) -> int:
        """Absolute position of query row 0 where no block says otherwise: the last query sees the last key."""
        return self.keys - self.queries

    def ranges(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Half-open range of the keys that each query row sees: (low, high), int32 [N] each; low = high where it sees none.

        None where the mask is additive, differs between heads or prompts, or shows a row keys with a gap between them.
        Computed once a mask, in blocks of rows: a window or padding costs every layer of a pass one evaluation.
        """
        if not self._ranges:
            self._ranges.append(self._plain_ranges(device) if self.block is None else self._evaluated_ranges())
        found = self._ranges[0]
        return None if found is None else (found[0].to(device), found[1].to(device))

    def _plain_ranges(self, device: torch.device) -> tuple[Tensor, Tensor]:
        low_N = torch.zeros(self.queries, dtype=torch.int32, device=device)
        if not self.causal:
            return low_N, torch.full_like(low_N, self.keys)
        return low_N, torch.arange(self.queries, dtype=torch.int32, device=device).add_(self.offset + 1).clamp_(max=self.keys)

    def _evaluated_ranges(self) -> tuple[Tensor, Tensor] | None:
        assert self.block is not None
        parts: list[tuple[Tensor, Tensor]] = []
        for start, stop in row_blocks(self.queries, max(1, _MASK_ENTRIES // max(self.keys, 1))):
            mask = self.block(start, stop, 0, self.keys)
            if mask.dtype != torch.bool or mask.numel() != (stop - start) * self.keys:
                return None
            seen_RM = mask.reshape(stop - start, self.keys).view(torch.uint8)
            count_R = seen_RM.sum(dim=-1, dtype=torch.int32)
            low_R = seen_RM.argmax(dim=-1).to(torch.int32)
            high_R = self.keys - seen_RM.flip(-1).argmax(dim=-1).to(torch.int32)
            if not bool((count_R == torch.where(count_R > 0, high_R - low_R, 0)).all()):
                return None
            parts.append((low_R, torch.where(count_R > 0, high_R, low_R)))
        low, high = zip(*parts, strict=True)
        return torch.cat(low), torch.cat(high)

    def columns(self, start: int, stop: int, device: torch.device) -> tuple[int, int] | None:
        """Keys [c0, c1) that any of the rows sees, at least one column; None where `ranges` is None."""
        if self.block is None:
            return 0, max(min(self.keys, stop + self.offset), 1) if self.causal else self.keys
        if (ranges := self.ranges(device)) is None:
            return None
        low_R, high_R = (edge[start:stop] for edge in ranges)
        alive_R = high_R > low_R
        if not bool(alive_R.any()):
            return 0, 1
        return int(low_R[alive_R].min()), int(high_R.max())

    def rows(self, start: int, stop: int, device: torch.device) -> tuple[Tensor | None, int, int]:
        """Mask of the rows [start, stop), cropped to the columns that any of them sees: (mask or None, c0, c1)."""
        columns = self.columns(start, stop, device)
        if columns is None:
            return self._dense_rows(start, stop)
        c0, c1 = columns
        if self.block is None and (not self.causal or stop - start == 1):
            return None, c0, c1
        ranges = self.ranges(device)
        assert ranges is not None
        low_R, high_R = (edge[start:stop, None] for edge in ranges)
        keys_C = torch.arange(c0, c1, dtype=torch.int32, device=device)
        seen_RC = keys_C < high_R
        return (seen_RC if self.block is None else (seen_RC & (keys_C >= low_R))[None, None]), c0, c1

    def _dense_rows(self, start: int, stop: int) -> tuple[Tensor, int, int]:
        assert self.block is not None
        mask_BHRM = self.block(start, stop, 0, self.keys)
        visible = mask_BHRM if mask_BHRM.dtype == torch.bool else mask_BHRM > torch.finfo(mask_BHRM.dtype).min / 2
        columns = torch.nonzero(visible.flatten(0, -2).any(dim=0)).flatten()
        if not len(columns):
            return mask_BHRM[..., :1], 0, 1
        c0, c1 = int(columns[0]), int(columns[-1]) + 1
        return mask_BHRM[..., c0:c1], c0, c1


@dataclass(frozen=True)
class AttentionInputs:
    """What one layer's attention depends on, after position encoding."""

    q_BHND: Tensor
    k_BGMD: Tensor
    v_BGME: Tensor
    scale: float
    mask: MaskSpec
    softcap: float | None = None
    sinks_H: Tensor | None = None
    bias_BHNM: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.q_BHND.shape[1]

    @property
    def groups(self) -> int:
        """Query heads per key/value head, H / G."""
        return self.heads // self.k_BGMD.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type that probabilities are computed in: at least float32."""
        return torch.promote_types(self.q_BHND.dtype, torch.float32)

    def promoted(self) -> AttentionInputs:
        """The same logits from inputs in the type of probabilities, scaled, keys laid out for Q Kᵀ: cheap to read in blocks."""
        q_BHND, k_BGMD, v_BGME = (t.to(self.dtype) for t in (self.q_BHND, self.k_BGMD, self.v_BGME))
        k_BGMD = k_BGMD.transpose(-1, -2).contiguous().transpose(-1, -2)
        return replace(self, q_BHND=q_BHND * self.scale, k_BGMD=k_BGMD, v_BGME=v_BGME, scale=1.0)

    def nbytes(self) -> int:
        """Bytes that keeping these inputs takes: whole storages, of which a fused projection's K and V are but views."""
        held = [t for t in (self.q_BHND, self.k_BGMD, self.v_BGME, self.bias_BHNM) if t is not None]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}.values())


@dataclass(frozen=True)
class RowBlock:
    """Probabilities of some heads over query rows [start, stop) and the keys [c0, c1) that these rows can see."""

    a_BHRC: Tensor
    start: int
    stop: int
    c0: int
    c1: int


class Scratch:
    """Memory for one block of maps at a time, kept from block to block: fresh pages would cost as much as the work on them."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """float32 memory of that name and shape, with whatever it holds; what was taken under the name becomes invalid."""
        size = math.prod(shape)
        if name not in self._held or self._held[name].size < size:
            self._held[name] = np.empty(size, dtype=np.float32)
        return self._held[name][:size].reshape(shape)

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """The same as a tensor; None where `like` is no float32 on the CPU."""
        return (
            torch.from_numpy(self.array("maps", shape)) if like.device.type == "cpu" and like.dtype == torch.float32 else None
        )


def grouped_matmul(
    x_BHRK: Float[Tensor, "B H R K"], y_BGKC: Float[Tensor, "B G K C"], scratch: Scratch | None = None
) -> Float[Tensor, "B H R C"]:
    """Per query head h: x_h @ y_(h // (H / G)), without repeating y. → [B, H, R, C], in `scratch` where it is given."""
    b, h, r, k = x_BHRK.shape
    g, c = y_BGKC.shape[1], y_BGKC.shape[-1]
    x_BGXK = x_BHRK.reshape(b, g, h // g * r, k)
    out = None if scratch is None else scratch.take((b, g, h // g * r, c), x_BHRK)
    return torch.matmul(x_BGXK, y_BGKC, out=out).reshape(b, h, r, c)


def row_blocks(queries: int, rows: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most `rows` query rows that cover `queries`."""
    for start in range(0, queries, rows):
        yield start, min(start + rows, queries)


def softmax_rows(x: AttentionInputs, start: int, stop: int, head: int | None = None) -> RowBlock:
    """Attention probabilities of the rows [start, stop), of all query heads or of one.

    Rows that may see nothing are zero. A sink takes its share out of the row sum.
    """
    logits, c0, c1 = logits_rows(x, start, stop, head)
    heads = slice(None) if head is None else slice(head, head + 1)
    return RowBlock(_normalised(x, logits, heads, has_empty_rows=x.mask.block is not None), start, stop, c0, c1)


def logits_rows(
    x: AttentionInputs,
    start: int,
    stop: int,
    head: int | None = None,
    masked: bool = True,
    scratch: Scratch | None = None,
) -> tuple[Float[Tensor, "B H R C"], int, int]:
    """(logits of the rows [start, stop), first key, end of keys): cropped to the keys that any of the rows sees.

    Args:
        masked: whether the mask is applied; without it, `MaskSpec.ranges` says which keys count.
        scratch: memory for the result.
    """
    q_BHRD, k_BGMD, heads = x.q_BHND[:, :, start:stop], x.k_BGMD, slice(None)
    if head is not None:
        heads = slice(head, head + 1)
        group = head // x.groups
        q_BHRD, k_BGMD = q_BHRD[:, heads], k_BGMD[:, group : group + 1]
    columns = None if masked else x.mask.columns(start, stop, q_BHRD.device)
    mask, c0, c1 = x.mask.rows(start, stop, q_BHRD.device) if columns is None else (None, *columns)
    keys_BGDC = k_BGMD[:, :, c0:c1].to(x.dtype).transpose(-1, -2)
    q_BHRD = q_BHRD.to(x.dtype)
    logits = grouped_matmul(q_BHRD if x.scale == 1.0 else q_BHRD * x.scale, keys_BGDC, scratch)
    if x.softcap is not None:
        logits = torch.tanh(logits / x.softcap) * x.softcap
    if x.bias_BHNM is not None:
        logits = logits + x.bias_BHNM[:, heads, start:stop, c0:c1].to(x.dtype)
    if mask is not None:
        mask = mask[:, heads] if mask.dim() == 4 and mask.shape[1] > 1 else mask
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(x.dtype)
    return logits, c0, c1


def _normalised(x: AttentionInputs, logits_BHRC: Tensor, heads: slice, has_empty_rows: bool) -> Tensor:
    if x.sinks_H is not None:
        sinks = x.sinks_H[heads].to(x.dtype)[None, :, None, None].expand(*logits_BHRC.shape[:3], 1)
        return torch.softmax(torch.cat([logits_BHRC, sinks], dim=-1), dim=-1)[..., :-1]
    a_BHRC = torch.softmax(logits_BHRC, dim=-1)
    return torch.nan_to_num(a_BHRC, nan=0.0) if has_empty_rows else a_BHRC
