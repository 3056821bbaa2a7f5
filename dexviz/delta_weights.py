"""Changes of projection weights, ΔW: what is trained beside DEX ("full"), or instead of it (attention-only, LoRA).

    W' = W + ΔW on some output features, the base's elsewhere;    ΔW dense, or b a of rank r    (LoRA: arXiv 2106.09685)

Parts: "q", "k", "v" are the output features that become queries, keys and values, "o" the output projection. A fused
projection has one entry for all its parts. Biases stay the base's. Sums are taken in at least float32, then cast to the
weight's type; where ΔW = 0, W' equals W.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dexviz import projection
from dexviz.errors import AdapterError

PARTS = ("q", "k", "v", "o")
_NAME = "_dexviz_name"


@dataclass(frozen=True)
class DeltaEntry:
    """Which output features of one projection are changed, and how the change is stored."""

    module: str
    """Path of the projection in the model."""
    layer: int
    """Layer that it belongs to."""
    parts: tuple[str, ...]
    """What the changed features are, out of PARTS."""
    rows: tuple[tuple[int, int], ...]
    """The changed output features, as ascending half-open ranges."""
    features: tuple[int, int]
    """(out, in) of the projection."""
    rank: int | None = None
    """Rank r of b a; None for a dense ΔW."""

    def __post_init__(self) -> None:
        edges = [edge for span in self.rows for edge in span]
        ascending = all(a <= b if i % 2 else a < b for i, (a, b) in enumerate(pairwise(edges)))
        within = bool(edges) and edges[0] >= 0 and edges[-1] <= self.features[0] and ascending
        if not within or min(self.features) < 1 or (self.rank is not None and self.rank < 1):
            raise AdapterError(
                f"ranges of the {self.features[0]} output features of {self.module}, and a rank ≥ 1",
                f"{[list(span) for span in self.rows]}, rank {self.rank}",
                "Use an adapter that dexviz wrote.",
            )
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise AdapterError(f"parts out of {', '.join(PARTS)}", repr(self.parts), "Name other parts.")

    @property
    def count(self) -> int:
        """Changed output features, R."""
        return sum(stop - start for start, stop in self.rows)

    @classmethod
    def from_json(cls, data: Any) -> DeltaEntry:
        """Inverse of `dataclasses.asdict`, through JSON.

        Raises:
            AdapterError: a field is missing, unknown, of the wrong type or out of range.
        """
        try:
            rank, layer = data.get("rank"), data["layer"]
            spans = tuple((start, stop) for start, stop in data["rows"])
            outputs, inputs = data["features"]
            whole = [layer, outputs, inputs, *(edge for span in spans for edge in span), *([] if rank is None else [rank])]
            if any(type(number) is not int for number in whole) or not all(
                isinstance(text, str) for text in (data["module"], *data["parts"])
            ):
                raise TypeError(f"a value of the wrong type in {data}")
            return cls(**{**data, "parts": tuple(data["parts"]), "rows": spans, "features": (outputs, inputs)})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, AdapterError):
                raise
            reason = f"none of its field {error}" if isinstance(error, KeyError) else str(error)[:200]
            raise AdapterError("the entry of a changed projection", reason, "Use an adapter that dexviz wrote.") from error


class Deltas(nn.Module):
    """ΔW of some projections of one model, in float32. Dense changes and b start at zero: the variant is the base then.

    Shapes, with R changed output features: dense ΔW [R, in]; a [r, in] and b [R, r].
    """

    def __init__(self, entries: Iterable[DeltaEntry]) -> None:
        super().__init__()
        self.entries: dict[str, DeltaEntry] = {}
        self.dense, self.a, self.b = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        for entry in entries:
            if entry.module in self.entries:
                raise AdapterError(f"one entry for {entry.module}", "several", "Use an adapter that dexviz wrote.")
            index = torch.cat([torch.arange(start, stop) for start, stop in entry.rows])
            self.register_buffer(_rows_key(entry.module), index, persistent=False)
            self._place(entry)

    @property
    def parts(self) -> tuple[str, ...]:
        """What is changed, out of PARTS."""
        known = {part for entry in self.entries.values() for part in entry.parts}
        return tuple(part for part in PARTS if part in known)

    @property
    def low_rank(self) -> bool:
        """True where every change is stored as b a."""
        return bool(self.entries) and all(entry.rank is not None for entry in self.entries.values())

    def count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    def change(self, module: str) -> Tensor:
        """ΔW of the changed rows, [R, in], differentiable.

        Args:
            module: path of the projection in the model.
        """
        key = _key(module)
        if self.entries[module].rank is None:
            return self.dense[key]
        with torch.autocast(self.a[key].device.type, enabled=False):
            return self.b[key] @ self.a[key]

    def entry_of(self, module: nn.Module) -> DeltaEntry | None:
        """The entry of a projection of the model that these changes are attached to."""
        return self.entries.get(module.__dict__.get(_NAME, ""))

    def weight(self, module: projection.Projection, dtype: torch.dtype | None = None) -> Tensor:
        """W + ΔW in the module's layout, differentiable in ΔW; the module's own weight where it has no entry.

        Args:
            module: a projection of the model that these changes are attached to.
            dtype: type of the result, and at least that of the sum; None for the weight's own.
        """
        entry, weight = self.entry_of(module), module.weight
        if entry is None:
            return weight if dtype is None else weight.to(dtype)
        change = self.change(entry.module)
        wide = torch.promote_types(torch.promote_types(weight.dtype, torch.float32), dtype or weight.dtype)
        axis = 0 if isinstance(module, nn.Linear) else 1
        change = (change if axis == 0 else change.T).to(wide)
        whole = weight.to(dtype or weight.dtype)
        if entry.count == entry.features[0]:
            return (weight.to(wide) + change).to(whole.dtype)
        index = self.get_buffer(_rows_key(entry.module))
        return whole.index_copy(axis, index, (weight.index_select(axis, index).to(wide) + change).to(whole.dtype))

    @torch.no_grad()
    def set_dense(self, module: str, delta: Tensor) -> None:
        """Store ΔW [R or out, in] of a projection as it is.

        Raises:
            AdapterError: there is no such entry, the shape differs, or features outside the entry would change.
        """
        entry = self._known(module)
        self._place(replace(entry, rank=None), dense=self._own_rows(entry, delta, entry.features[1]))

    @torch.no_grad()
    def set_low_rank(self, module: str, a: Tensor, b: Tensor) -> None:
        """Store ΔW = b a of a projection, of any rank; the scale of a LoRA (α / r) belongs into one of the two.

        Args:
            module: path of the projection in the model.
            a: [r, in].
            b: [R, r], or [out, r] where the rows outside the entry are zero.

        Raises:
            AdapterError: there is no such entry, a shape differs, or features outside the entry would change.
        """
        entry = self._known(module)
        if a.dim() != 2 or a.shape[1] != entry.features[1]:
            raise _wrong_shape(module, f"[r, {entry.features[1]}]", a)
        b = self._own_rows(entry, b, a.shape[0])
        self._place(replace(entry, rank=a.shape[0]), a=a, b=b)

    def check(self, model: nn.Module) -> None:
        """Prove that every entry fits a projection of the model.

        Raises:
            AdapterError: a projection is missing, has another shape, or is no plain Linear or Conv1D.
        """
        check_entries(self.entries.values(), model)

    def to_json(self) -> list[dict[str, Any]]:
        """JSON-ready form of the entries, without weights."""
        return [asdict(entry) for entry in self.entries.values()]

    @classmethod
    def from_json(cls, data: Any, model: nn.Module) -> Deltas:
        """Inverse of `to_json`, with ΔW = 0, for the model that the entries are of.

        Raises:
            AdapterError: an entry is damaged, or does not fit the model.
        """
        if not isinstance(data, list) or not data:
            raise AdapterError("a list of changed projections", repr(data)[:100], "Use an adapter that dexviz wrote.")
        entries = [DeltaEntry.from_json(entry) for entry in data]
        check_entries(entries, model)
        return cls(entries)

    def _place(self, entry: DeltaEntry, **values: Tensor) -> None:
        """Set an entry and its parameters, `values` or what they start with."""
        key, (_, inputs), rank = _key(entry.module), entry.features, entry.rank
        device = self.get_buffer(_rows_key(entry.module)).device
        for store in (self.dense, self.a, self.b):
            if key in store:
                del store[key]
        if not values and rank is None:
            values = {"dense": torch.zeros(entry.count, inputs, device=device)}
        elif not values and rank is not None:
            values = {"a": torch.randn(rank, inputs, device=device) * inputs**-0.5, "b": torch.zeros(entry.count, rank)}
        for name, value in values.items():
            stored = value.detach().to(device, torch.float32, copy=True).contiguous()
            getattr(self, name)[key] = nn.Parameter(stored)
        self.entries[entry.module] = entry

    def _known(self, module: str) -> DeltaEntry:
        if module not in self.entries:
            raise AdapterError(f"a projection out of {', '.join(self.entries)}"[:300], repr(module), "Name one of them.")
        return self.entries[module]

    def _own_rows(self, entry: DeltaEntry, rows: Tensor, width: int) -> Tensor:
        """The entry's rows of a matrix [R or out, width]."""
        if tuple(rows.shape) == (entry.count, width):
            return rows
        if tuple(rows.shape) != (entry.features[0], width):
            raise _wrong_shape(entry.module, f"[{entry.count}, {width}]", rows)
        index = self.get_buffer(_rows_key(entry.module)).to(rows.device)
        if rows.index_fill(0, index, 0.0).any():
            raise AdapterError(
                f"a change of {entry.module} within its parts {', '.join(entry.parts)}",
                "one of other output features too",
                "Include the other parts in the adapter.",
            )
        return rows[index]


def check_entries(entries: Iterable[DeltaEntry], model: nn.Module) -> None:
    """Prove that every entry fits a projection of the model.

    Raises:
        AdapterError: a projection is missing, has another shape, or is no plain Linear or Conv1D.
    """
    todo = "Load the adapter's own base model."
    for entry in entries:
        try:
            module = model.get_submodule(entry.module)
        except AttributeError as error:
            raise AdapterError(f"a projection {entry.module} in the model", "none", todo) from error
        own = projection.features(plain(entry.module, module))
        if own != entry.features:
            wanted = f"{entry.features[0]} × {entry.features[1]} features in {entry.module}"
            raise AdapterError(wanted, f"{own[0]} × {own[1]}", todo)


def plain(name: str, module: nn.Module) -> projection.Projection:
    """The module, where its weight can be changed as it is run.

    Raises:
        AdapterError: it is no plain Linear or Conv1D with floating-point weights in memory (quantised, offloaded, wrapped).
    """
    foreign = "forward" in module.__dict__ and not named(module)
    weight = module.weight if type(module) in (nn.Linear, Conv1D) and not foreign else None
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.device.type != "meta":
        return cast(projection.Projection, module)
    raise AdapterError(
        f"a plain Linear or Conv1D in {name}, its weights in memory",
        f"{type(module).__name__}, quantised, offloaded or wrapped",
        "Load the model unquantised and on one device, or adapt it without its projections.",
    )


def name_projection(module: nn.Module, name: str) -> None:
    """Note a projection's path in its model, by which `Deltas.weight` knows it. Outside its saved state."""
    module.__dict__[_NAME] = name


def named(module: nn.Module) -> bool:
    """True where `name_projection` was here."""
    return _NAME in module.__dict__


def _key(module: str) -> str:
    """A path without dots, which parameter names cannot have; paths have no slashes, so it is reversible."""
    return module.replace(".", "/")


def _rows_key(module: str) -> str:
    return f"rows/{_key(module)}"


def _wrong_shape(module: str, expected: str, tensor: Tensor) -> AdapterError:
    return AdapterError(f"a matrix {expected} for {module}", str(list(tensor.shape)), "Choose the factors of this projection.")
