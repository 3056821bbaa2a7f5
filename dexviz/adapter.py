"""Adapters on disk: DEX, changes of projections beside it ("full"), and the controls.

An adapter is a folder: `adapter_config.json` (versioned), `adapter_model.safetensors` (half precision), and, where training
wrote it, `training_log.jsonl` and `README.md`. Folders appear whole or not at all: they are written beside and renamed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dexviz.catalogue import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config
from dexviz.delta_weights import Deltas
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import AdapterError
from dexviz.fetching import resolve_adapter

if TYPE_CHECKING:
    from dexviz.models import LoadedModel

FORMAT_VERSION = 1
METHODS = ("dex", "dex-plus", "attention-only", "lora")
"""What an adapter may be: O − λ O W_D, O + λ O W_D, and changed projections without DEX, dense or of low rank."""
SAVED_DTYPE = torch.float16
"""Type of the weights on disk."""


def save_adapter(
    adapter: DexAdapter,
    folder: str | Path,
    base: LoadedModel,
    *,
    method: str | None = None,
    details: Mapping[str, Any] | None = None,
    extra: Callable[[Path], None] | None = None,
    dtype: torch.dtype = SAVED_DTYPE,
) -> Path:
    """Write an adapter folder, whole or not at all.

    Args:
        folder: must not exist yet, or hold an adapter that is then replaced.
        method: out of METHODS; None for what the adapter shows itself to be.
        details: what was trained, how, with which tools; goes into the configuration under "training".
        extra: writes further files into the new folder before it is renamed into place.
        dtype: of the weights on disk.

    Raises:
        AdapterError: the folder holds something else, the disk is full, or the method is none.
    """
    _check_method(method := method or adapter.method, adapter)
    config = {
        "format_version": FORMAT_VERSION,
        "method": method,
        "mode": "adapter" if adapter.deltas is None else "full",
        "trained": list(adapter.trained),
        "base_model": base.name,
        "base_fingerprint": base.fingerprint,
        "dex": adapter.config.to_json(),
        "step": adapter.annealing.step,
        "parameters": sum(p.numel() for p in adapter.parameters()),
        "lambda": adapter.lambdas(),
        **({} if adapter.deltas is None else {"deltas": adapter.deltas.to_json()}),
        "training": dict(details or {}),
    }
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in adapter.state_dict().items()}
    with new_folder(Path(folder), replaces=ADAPTER_CONFIG) as work:
        (work / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        save_file(weights, work / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        if extra is not None:
            extra(work)
    return Path(folder)


def round_as_saved(adapter: DexAdapter) -> None:
    """Round the weights to what `save_adapter` writes and `load_adapter` gives back; they stay in float32."""
    adapter.to(SAVED_DTYPE).float()


def load_adapter(name: str, base: LoadedModel, *, force: bool = False) -> DexAdapter:
    """Read an adapter and prove that it belongs to the base.

    Args:
        name: "default", a known name, a hub id or a folder.
        force: turn a fingerprint mismatch into a warning; shapes must match all the same.

    Raises:
        AdapterError: damaged, of another version, or of another model.
    """
    folder = resolve_adapter(name, base.name)
    data = adapter_config(folder)
    if data.get("format_version") != FORMAT_VERSION or data.get("method") not in METHODS:
        raise AdapterError(
            f"an adapter of format version {FORMAT_VERSION} and a method out of {', '.join(METHODS)}",
            f"method {data.get('method')!r}, version {data.get('format_version')!r} in {folder}",
            "Use the dexviz version that wrote it, or train it again.",
        )
    config = DexConfig.from_json(data.get("dex") or {})
    step = data.get("step", config.steps)
    if type(step) is not int or step < 0:
        raise AdapterError(f"a `step` ≥ 0 in {folder / ADAPTER_CONFIG}", repr(step), "Copy or train the adapter again.")
    _check_base(config, data, base, folder, force)
    adapter = DexAdapter(config, Deltas.from_json(data["deltas"], base.model) if "deltas" in data else None)
    _check_method(data.get("method"), adapter, f" in {folder}")
    try:
        adapter.load_state_dict({key: tensor.float() for key, tensor in load_file(folder / ADAPTER_WEIGHTS).items()})
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise AdapterError(
            f"undamaged weights in {folder / ADAPTER_WEIGHTS}", reason, "Copy or train the adapter again."
        ) from error
    adapter.set_step(step)
    return adapter.eval().requires_grad_(False)


def _check_method(method: Any, adapter: DexAdapter, where: str = "") -> None:
    """LoRA may be stored dense, and low-rank changes be called attention-only; nothing else goes by another name."""
    fitting = ("attention-only", "lora") if not len(adapter.operators) else (adapter.method,)
    if method not in fitting:
        raise AdapterError(
            f"the method {' or '.join(fitting)}, which fits what was trained",
            f"{method!r}{where}",
            "Use the dexviz version that wrote it, or train it again.",
        )


def _check_base(config: DexConfig, data: Mapping[str, Any], base: LoadedModel, folder: Path, force: bool) -> None:
    shape = (len(config.heads), config.query_heads, config.width)
    own = (base.layout.layers, base.layout.heads, base.layout.value_width)
    made_for = f"{folder.name}, made for {data.get('base_model')!r}"
    if shape != own:
        raise AdapterError(
            f"an adapter for {own[0]} layers, {own[1]} heads of width {own[2]} ({base.name})",
            f"{made_for} with {shape[0]} layers, {shape[1]} heads of width {shape[2]}",
            "Load the model that the adapter was trained on.",
        )
    if data.get("base_fingerprint") == base.fingerprint:
        return
    error = AdapterError(
        f"an adapter trained on exactly these weights of {base.name}",
        f"{made_for}, whose fingerprint differs",
        "Load the model it was trained on, or use --force (force=True) if you know that the weights are close.",
    )
    if not force:
        raise error
    import warnings

    warnings.warn(str(error), stacklevel=3)


@contextmanager
def new_folder(target: Path, *, replaces: str | None) -> Iterator[Path]:
    """A folder beside `target` that is renamed to it at the end, or removed on any failure.

    Args:
        replaces: name of a file by which an existing folder shows that it may be replaced; None refuses any.

    Raises:
        AdapterError: the target is in use, or the disk is full.
    """
    check_target(target, replaces=replaces)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise AdapterError(f"a writable folder at {target.parent}", str(error), "Choose another --out.") from error
    try:
        yield work
        work.chmod(0o755)
        _swap(work, target)
    except (OSError, SafetensorError) as error:
        raise AdapterError(
            f"room to write {target}", " ".join(str(error).split()), "Free space or choose another --out."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_target(target: Path, *, replaces: str | None) -> None:
    """Raise an AdapterError unless `new_folder` may write to `target`: before long work, say."""
    occupied = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    replaceable = replaces is not None and (target / replaces).is_file()
    if not target.name or (occupied and not replaceable):
        raise AdapterError("a new or empty folder to write to", f"{target}, which exists", "Choose another --out.")


def _swap(work: Path, target: Path) -> None:
    """Rename `work` to `target`; what was there moves aside first, goes when the new folder stands, and else comes back."""
    if not target.exists():
        work.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    old = aside / "old"
    try:
        target.rename(old)
        work.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
