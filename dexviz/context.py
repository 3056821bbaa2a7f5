"""Which view is on: the adapter and the recorder of the current context, and the adapter that a model has by default.

What is active travels in a ContextVar, never in the model: a request changes nothing that others share. New threads start
with an empty context: run a call in another thread through `contextvars.copy_context().run`. Projections whose weights some
adapter changes are wrapped once; the wrapper reads the same context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dexviz import projection
from dexviz.delta_weights import Deltas, name_projection, named, plain
from dexviz.dex import DexAdapter
from dexviz.errors import CaptureError

_DEFAULT = "_dexviz_default"
_WATCHED = "_dexviz_adopted"
Watcher = Callable[[Any], None]
"""Called with each `dexviz.attention.AttentionCall`."""


@dataclass(frozen=True)
class _Pass:
    adapter: DexAdapter | None
    recorder: Watcher | None


_PASS: ContextVar[_Pass | None] = ContextVar("dexviz_pass", default=None)


@dataclass(frozen=True)
class _Attached:
    """Holds an adapter so that nn.Module does not take it for a submodule: it never enters the base's saved state."""

    adapter: DexAdapter


@contextmanager
def active(adapter: DexAdapter | None, recorder: Watcher | None = None) -> Iterator[None]:
    """Run calls of any model in this context with `adapter` (None: the base) and `recorder`."""
    token = _PASS.set(_Pass(adapter, recorder))
    try:
        yield
    finally:
        _PASS.reset(token)


def attach(model: PreTrainedModel, adapter: DexAdapter | None) -> None:
    """Make `adapter` what the model runs with outside any request (training, generation); None detaches.

    Raises:
        AdapterError: the adapter changes projections that the model does not have, or not as a plain Linear or Conv1D.
    """
    _wrap(model, adapter)
    holder = _Attached(adapter) if adapter is not None else None
    model.__dict__[_DEFAULT] = holder
    for module in model.modules():
        if hasattr(module, "layer_idx") or named(module):
            module.__dict__[_DEFAULT] = holder


def attached(model: nn.Module) -> DexAdapter | None:
    """The adapter that `attach` set on a model, on one of its attention modules, or on a wrapped projection."""
    holder = model.__dict__.get(_DEFAULT)
    return holder.adapter if holder is not None else None


def active_adapter(module: nn.Module) -> DexAdapter | None:
    """The adapter with which a model, an attention module or a wrapped projection runs here and now."""
    current = _PASS.get()
    return attached(module) if current is None else current.adapter


def active_recorder() -> Watcher | None:
    """Who sees the attention calls here and now."""
    current = _PASS.get()
    return current.recorder if current is not None else None


def effective_weight(adapter: DexAdapter | None, module: projection.Projection, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that a projection has under `adapter`, W + ΔW, in its own layout; see `Deltas.weight`."""
    if adapter is None or adapter.deltas is None:
        return module.weight if dtype is None else module.weight.to(dtype)
    return adapter.deltas.weight(module, dtype)


def watch(model: PreTrainedModel) -> None:
    """Check every forward pass of the model: a cache belongs to one view. Idempotent."""
    if not model.__dict__.get(_WATCHED):
        model.register_forward_pre_hook(_check_pass, with_kwargs=True)
        model.register_forward_hook(_tag_cache, with_kwargs=True)
        model.__dict__[_WATCHED] = True


def _wrap(model: PreTrainedModel, adapter: DexAdapter | None) -> None:
    """Let the projections that the adapter changes read the context. Idempotent; the base's computation stays as it is."""
    deltas: Deltas | None = adapter.deltas if adapter is not None else None
    if deltas is None:
        return
    deltas.check(model)
    for name in deltas.entries:
        module = plain(name, model.get_submodule(name))
        if not named(module):
            name_projection(module, name)
            module.__dict__[_DEFAULT] = model.__dict__.get(_DEFAULT)
            module.__dict__["forward"] = MethodType(_projected, module)  # a bound method is copied with its module


def _projected(module: Any, x: Tensor) -> Tensor:
    """Forward of a wrapped projection."""
    adapter = active_adapter(module)
    if adapter is None or adapter.deltas is None or adapter.deltas.entry_of(module) is None:
        return type(module).forward(module, x)
    return projection.apply(module, x, adapter.deltas.weight(module))


def _check_pass(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward: a cache belongs to one view, and checkpointing recomputes outside the context of a request."""
    current = _PASS.get()
    if current is not None and current.adapter is not attached(model):
        checkpointing = getattr(model, "is_activation_checkpointing", False) and model.training
        if checkpointing and torch.is_grad_enabled():
            raise CaptureError(
                "gradient checkpointing only in the model's default view",
                "a forward pass in another view with gradients",
                "Call model.activation_checkpointing_disable(), or train outside `active(...)`.",
            )
        _wrap(model, current.adapter)
    cache = _cache_of(kwargs)
    owner = getattr(cache, "_dexviz_owner", None)
    if owner is not None and owner[0] is not active_adapter(model):
        raise CaptureError(
            "a key/value cache that was filled in the same view",
            "one that another view (base or variant) filled",
            "Start with a fresh cache, or switch back to the view that filled it.",
        )
    _own(cache, model)


def _tag_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After each forward: a cache that the model made itself belongs to the view that filled it."""
    if isinstance(output, dict):
        _own(_cache_of(output), model)


def _own(cache: Any, model: nn.Module) -> None:
    if cache is not None:
        cache._dexviz_owner = (active_adapter(model),)


def _cache_of(fields: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments or output fields; transformers 5 renames it from past_key_values to cache."""
    return next((fields[name] for name in ("cache", "past_key_values") if name in fields.keys()), None)  # noqa: SIM118 - model outputs warn on `in`
