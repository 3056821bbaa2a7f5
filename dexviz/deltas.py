"""Finding the projections that a "full" adapter changes, W_K, W_V and W_O, with no code per family.

One probe forward with gradients: every Linear and Conv1D of an attention module hands on a fresh leaf, so that what the seam
sees as K depends on nothing but the outputs that become keys. The columns of those outputs on which a random projection of K
has a gradient are the rows of W_K; V and Q alike. W_O is the one projection whose input depends on O. Multi-head latent
attention comes out as its up-projection, and the shared rotary rows of its down-projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dexviz import projection
from dexviz.attention import AttentionCall, active
from dexviz.delta_weights import PARTS, DeltaEntry, Deltas, plain
from dexviz.errors import AdapterError
from dexviz.selfcheck import Layout, eval_mode, probe_ids

__all__ = ["PARTS", "DeltaEntry", "Deltas", "find", "for_model"]

Found = dict[nn.Module, Tensor]
"""Projection → which of its output features, bool [out]."""
_INSTEAD = "Adapt this model without changing its projections."


def for_model(
    model: PreTrainedModel,
    layout: Layout,
    parts: Sequence[str] = ("k", "v", "o"),
    ranks: Mapping[str, int] | None = None,
) -> Deltas:
    """Changes ΔW = 0 of all the model's projections that make up `parts`, in every layer that has attention.

    Args:
        parts: out of "q", "k", "v", "o".
        ranks: path of a projection in the model → rank r of its ΔW = b a; projections that are left out are dense.

    Raises:
        AdapterError: a projection cannot be found, is shared between layers or with a part that is not named, or is no plain
            Linear or Conv1D.
    """
    entries = find(model, layout, parts)
    if unknown := sorted(set(ranks or {}) - {entry.module for entry in entries}):
        known = ", ".join(entry.module for entry in entries[:3])
        raise AdapterError(f"ranks of projections such as {known}", ", ".join(unknown[:3]), "Correct their paths.")
    ranked = [replace(entry, rank=(ranks or {}).get(entry.module)) for entry in entries]
    return Deltas(ranked).to(model.device)


def find(model: PreTrainedModel, layout: Layout, parts: Sequence[str] = ("k", "v", "o")) -> list[DeltaEntry]:
    """The projections that make up `parts`, by layer: one entry each, as `for_model` uses them.

    Raises:
        AdapterError: see `for_model`.
    """
    if not parts or not set(parts) <= set(PARTS):
        raise AdapterError(f"one or more parts out of {', '.join(PARTS)}", repr(tuple(parts)), "Name other parts.")
    if layout.differential:
        raise AdapterError("a model without differential attention", "a DIFF Transformer", "Choose a standard model.")
    names = {id(module): name for name, module in model.named_modules()}
    entries: dict[str, DeltaEntry] = {}
    for layer, found in _probed(model, layout).items():
        for module, chosen in _together(layer, found, parts).items():
            name = names[id(module)]
            target = plain(name, module)
            own = tuple(part for part in PARTS if part in parts and module in found.parts[part])
            rows = torch.ones(projection.features(target)[0], dtype=torch.bool) if chosen is None else chosen
            entries[name] = DeltaEntry(name, layer, own, _ranges(rows), projection.features(target))
    _check_untied(model, entries)
    return list(entries.values())


@dataclass
class _Layer:
    """What the probe saw in one layer."""

    outputs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    """Projections of the attention module in the order they ran, with the leaves that they handed on."""
    parts: dict[str, Found] = field(default_factory=dict)
    o_BHNE: Tensor | None = None
    same_keys_as: int | None = None
    """Earlier layer whose keys and values this one uses again."""


def _probed(model: PreTrainedModel, layout: Layout) -> dict[int, _Layer]:
    """Run the probe over every layer that has attention."""
    layers = {layer: _Layer(parts={part: {} for part in PARTS}) for layer in layout.modules}
    keys: dict[int, int] = {}
    kept: list[Tensor] = []  # no two layers' keys have one address by chance

    def record(call: AttentionCall) -> None:
        layer, x = layers[call.layer], call.inputs
        layer.parts["q"] = _sources(x.q_BHND, layer.outputs)
        layer.parts["k"] = _sources(x.k_BGMD, layer.outputs)
        layer.parts["v"] = _sources(x.v_BGME, layer.outputs)
        layer.o_BHNE = call.adapted_BHNE
        layer.same_keys_as = keys.get(x.k_BGMD.data_ptr())
        keys.setdefault(x.k_BGMD.data_ptr(), call.layer)
        kept.append(x.k_BGMD)

    with torch.inference_mode(False), torch.enable_grad(), eval_mode(model), _cut(layout, layers), active(None, record):
        model(probe_ids(model), use_cache=False)
    return layers


@contextmanager
def _cut(layout: Layout, layers: Mapping[int, _Layer]) -> Iterator[None]:
    """Let every projection of an attention module hand on a leaf, and note which one O flows into first."""

    def leaf(layer: _Layer) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if layer.o_BHNE is not None and _depends(args[0], layer.o_BHNE):
                layer.parts["o"][module] = torch.ones(output.shape[-1], dtype=torch.bool)
            fresh = output.detach().requires_grad_()
            layer.outputs.append((module, fresh))
            return fresh.clone()  # a leaf itself could not be changed in place

        return hook

    owners: dict[nn.Module, int] = {}
    for index, owner in layout.modules.items():
        for module in owner.modules():
            if projection.is_projection(module) and owners.setdefault(module, index) != index:
                got = f"a {type(module).__name__} that layers {owners[module]} and {index} share"
                raise AdapterError("projections that belong to one layer each", got, _INSTEAD)
    handles = [module.register_forward_hook(leaf(layers[index])) for module, index in owners.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _depends(tensor: Tensor, source: Tensor) -> bool:
    if not (tensor.requires_grad and source.requires_grad):
        return False
    return torch.autograd.grad(tensor.sum(), source, retain_graph=True, allow_unused=True)[0] is not None


def _sources(tensor: Tensor, outputs: Sequence[tuple[nn.Module, Tensor]]) -> Found:
    """Which output features of which projections a tensor depends on, by the gradient of a random projection of it."""
    if not outputs or not tensor.requires_grad:
        return {}
    direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor.device)
    total = (tensor.float() * direction).sum()
    gradients = torch.autograd.grad(total, [leaf for _, leaf in outputs], retain_graph=True, allow_unused=True)
    found: Found = {}
    for (module, _), gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and bool((gradient != 0).any()):
            columns = (gradient != 0).flatten(0, -2).any(dim=0).cpu()
            found[module] = columns | found.get(module, torch.zeros_like(columns))
    return found


def _together(layer: int, seen: _Layer, parts: Sequence[str]) -> Found:
    """Projection → output features that make up `parts`; none of them may make up another part, too."""
    chosen: Found = {}
    for part in parts:
        found = seen.parts[part]
        if (part == "o" and len(found) != 1) or not found:
            if part in ("k", "v") and seen.same_keys_as is not None:
                continue
            wanted = f"a projection in the attention module of layer {layer} that makes up W_{part.upper()}"
            raise AdapterError(wanted, f"{len(found)} of them" if found else "none", _INSTEAD)
        for module, columns in found.items():
            chosen[module] = columns | chosen.get(module, torch.zeros_like(columns))
    for part in set(PARTS) - set(parts):
        for module, columns in seen.parts[part].items():
            if module in chosen and bool((columns & chosen[module]).any()):
                wanted = ", ".join(f"W_{name.upper()}" for name in parts)
                got = f"some in layer {layer} that are W_{part.upper()} too"
                raise AdapterError(f"output features for {wanted} alone", got, _INSTEAD)
    return chosen


def _check_untied(model: nn.Module, entries: Mapping[str, DeltaEntry]) -> None:
    """Raise where a projection's weight is another module's too."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name in entries:
        tied = owners[id(model.get_submodule(name).weight)]
        if len(tied) > 1:
            raise AdapterError(f"a weight of its own in {name}", f"one that {' and '.join(tied)} share", _INSTEAD)


def _ranges(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending half-open ranges of the true entries of bool [out]."""
    edges = torch.diff(rows.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, stops, strict=True))
