"""Loading models and putting two views of them side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dexviz import attention, diff, fingerprint
from dexviz.adapter import load_adapter
from dexviz.catalogue import base_of
from dexviz.dex import DexAdapter
from dexviz.errors import AdapterError, ModelError
from dexviz.fetching import resolve_adapter, resolve_model
from dexviz.records import Tokens
from dexviz.selfcheck import Layout, check, context_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEVICES = ("cpu", "cuda", "mps", "xpu")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One copy of a model's weights with its tokenizer, proven to be capturable."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    layout: Layout
    fingerprint: str

    @property
    def max_tokens(self) -> int:
        """Context length in tokens."""
        return context_length(self.model)


@dataclass(frozen=True, eq=False)
class View:
    """A model as it is looked at: the base alone, or with a DEX adapter. Several views may share one model's weights."""

    name: str
    """"base" or "variant"."""
    loaded: LoadedModel
    adapter: DexAdapter | None = None
    title: str = ""

    @property
    def model(self) -> PreTrainedModel:
        return self.loaded.model

    @property
    def layout(self) -> Layout:
        return self.loaded.layout

    def active(self, recorder: attention.Recorder | None = None) -> AbstractContextManager[None]:
        """Context in which calls of the model run in this view, seen by `recorder`."""
        return attention.active(self.adapter, recorder)

    def lambdas(self) -> list[float]:
        """λ per layer; zeros without DEX or DIFF, NaN in DIFF V2, where it depends on the prompt."""
        if self.layout.differential:
            if self.layout.differential.tokenwise:
                return [float("nan")] * self.layout.layers
            return [diff.layer_lambda(self.layout.modules[layer]) for layer in range(self.layout.layers)]
        return self.adapter.lambdas() if self.adapter is not None else [0.0] * self.layout.layers


@dataclass(frozen=True, eq=False)
class ModelPair:
    """Two views. With neither adapter nor variant, both are the base.

    Two models with different tokenizers can be measured on the same text (`dexviz.noise`), but have no tokens in common to put
    their maps over each other: `tokenize` refuses them.
    """

    base: View
    variant: View

    @cached_property
    def same_tokenizer(self) -> bool:
        """Whether both views read a prompt as the same tokens; a model without a tokenizer reads what it is given."""
        base, variant = self.base.loaded.tokenizer, self.variant.loaded.tokenizer
        return base is variant or base is None or variant is None or base.get_vocab() == variant.get_vocab()

    def tokenize(self, text: str, *, chat: bool = False) -> Tokens:
        """The prompt as both views read it.

        Raises:
            PromptError: empty, or longer than the models' context.
            ModelError: no tokenizer, or two different ones.
        """
        from dexviz.tokens import tokenize

        self.check_tokenizers()
        if self.base.loaded.tokenizer is None:
            raise ModelError(
                "a model with a tokenizer",
                f"{self.base.loaded.name} without one",
                "Pass token ids, or load a folder that has one.",
            )
        limit = min(self.base.loaded.max_tokens, self.variant.loaded.max_tokens)
        return tokenize(self.base.loaded.tokenizer, text, chat=chat, max_tokens=limit)

    def check_tokenizers(self) -> None:
        """Raise a ModelError unless both views read a prompt as the same tokens."""
        if not self.same_tokenizer:
            raise ModelError(
                "two models with the same tokenizer, so that their tokens can be put side by side",
                f"{self.base.loaded.name} and {self.variant.loaded.name}, which differ",
                "Compare models of one family; noise on a marked prompt is measured by characters and works with these.",
            )


def load_pair(
    base: str | None = None,
    *,
    adapter: str | None = None,
    variant: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    force: bool = False,
) -> ModelPair:
    """Load a base model and its variant; a DEX variant shares the base's weights.

    Args:
        base: known name, hub id or folder; may be left out where the adapter names its base.
        adapter: "default", a known name, hub id or folder of a DEX adapter.
        variant: a second model, with the same tokenizer for all that lies on tokens; excludes `adapter`.
        device: "cpu", "cuda", …; default $DEXVIZ_DEVICE, else CUDA where there is one.
        dtype: "float32", "bfloat16" or "float16"; default bfloat16 on CUDA, float32 on the CPU.
        force: turn the adapter's fingerprint mismatch into a warning.

    Raises:
        ModelError, AdapterError: with what was expected and what to do.
    """
    base = base or (base_of(resolve_adapter(adapter)) if adapter is not None else None)
    if base is None:
        raise ModelError("a base model, or an adapter that names one", "neither", 'Pass "smollm2-135m", for example.')
    loaded = load_model(base, device=device, dtype=dtype)
    other = load_model(variant, device=device, dtype=dtype) if variant is not None else None
    return make_pair(loaded, adapter=adapter, variant=other, force=force)


def make_pair(
    loaded: LoadedModel, *, adapter: str | DexAdapter | None = None, variant: LoadedModel | None = None, force: bool = False
) -> ModelPair:
    """Two views over models that are loaded already.

    Raises:
        AdapterError: the adapter is damaged or belongs to another model.
        ModelError: both an adapter and a variant.
    """
    if adapter is not None and variant is not None:
        raise ModelError("an adapter or a variant", "both", "Leave one of them out.")
    base = View("base", loaded, title=loaded.name)
    if variant is not None:
        return ModelPair(base, View("variant", variant, title=variant.name))
    if adapter is None:
        return ModelPair(base, View("variant", loaded, title=loaded.name))
    if loaded.layout.differential:
        raise differential(loaded)
    if isinstance(adapter, str):
        title, adapter = adapter, load_adapter(adapter, loaded, force=force)
    else:
        title = "DEX"
    adapter.to(loaded.model.device)
    attention.attach(loaded.model, adapter)
    return ModelPair(base, View("variant", loaded, adapter, title=title))


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> LoadedModel:
    """Load one model: safetensors only, no remote code; then prove by a probe that it can be captured.

    Raises:
        ModelError: unknown, damaged, or outside what dexviz can capture.
    """
    source = resolve_model(name, progress=progress)
    target = choose_device(device)
    kind = choose_dtype(dtype, target)
    model = _read_model(name, source, kind)
    reader = _read_tokenizer(name, source) if tokenizer else None
    try:
        model = model.to(target).eval().requires_grad_(False)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"room on a usable device, {target}", _first_line(error), "Choose --device cpu.") from error
    return LoadedModel(str(name), model, reader, check(model), fingerprint.of_folder(Path(source)))


def _read_model(name: str, source: Path | str, kind: torch.dtype) -> Any:
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            source, dtype=kind, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(
            "a causal language model in transformers' format with undamaged safetensors",
            f"{name!r}: {_first_line(error)}",
            "Check the name, the folder's files and the disk.",
        ) from error
    if lost := sorted(report["missing_keys"]):
        raise ModelError(f"every weight of {name!r} in its files", f"none for {', '.join(lost[:3])}", "Save the model again.")
    return model


def _read_tokenizer(name: str, source: Path | str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            "a tokenizer beside the model's weights", f"{name!r}: {_first_line(error)}", "Save its tokenizer into the folder."
        ) from error


def wrap_model(model: PreTrainedModel, tokenizer: Any = None, *, name: str | None = None) -> LoadedModel:
    """Take in a model that is in memory already.

    Raises:
        ModelError: the self-check failed.
    """
    layout = check(model)
    return LoadedModel(name or model.config.model_type, model, tokenizer, layout, fingerprint.of_module(model))


def choose_device(wanted: str | None = None) -> torch.device:
    """The device to load on: the wanted one, else $DEXVIZ_DEVICE, else CUDA where there is one.

    Raises:
        ModelError: torch does not know the device, or CUDA is asked for and there is none.
    """
    name = wanted or os.environ.get("DEXVIZ_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"  # torchrun: one process a GPU
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError('a device such as "cpu" or "cuda"', repr(name), "Change --device or DEXVIZ_DEVICE.") from error
    if device.type not in _DEVICES:
        raise ModelError(f"a device out of {', '.join(_DEVICES)}", repr(name), "Change --device or DEXVIZ_DEVICE.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("a CUDA device", "none on this machine", "Choose --device cpu.")
    return device


def choose_dtype(wanted: str | None, device: torch.device) -> torch.dtype:
    """The type of the weights: the wanted one, else bfloat16 on CUDA and float32 elsewhere.

    Raises:
        ModelError: not a type that models run in.
    """
    if wanted is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if wanted not in _DTYPES:
        raise ModelError(f"a dtype out of {', '.join(_DTYPES)}", repr(wanted), "Change --dtype.")
    return _DTYPES[wanted]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def reader(*views: View) -> PreTrainedTokenizerBase:
    """The tokenizer of the first of the views that has one.

    Raises:
        ModelError: none has.
    """
    found = next((view.loaded.tokenizer for view in views if view.loaded.tokenizer is not None), None)
    if found is None:
        raise no_tokenizer(views[0].loaded)
    return found


def no_tokenizer(loaded: LoadedModel) -> ModelError:
    """What to tell someone who needs text where the model has no tokenizer."""
    return ModelError("a model with a tokenizer", f"{loaded.name} without one", "Load a folder that has one.")


def differential(loaded: LoadedModel) -> AdapterError:
    """The refusal of DEX on a DIFF Transformer."""
    return AdapterError(
        "a model without differential attention", f"{loaded.name}, a DIFF Transformer", "Use DEX on a standard model."
    )
