"""DEX adapters on disk, and merging one into a plain checkpoint.

An adapter is a folder: `adapter_config.json` (versioned), `adapter_model.safetensors` (half precision), and, where training
wrote it, `training_log.jsonl` and `README.md`. Folders appear whole or not at all: they are written beside and renamed.

Merging is exact where W_O directly follows attention: with row vectors, W_O,h ← (I − λ W_D) W_O,h for selected heads
(README, "What is computed").
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dexviz import projection
from dexviz.catalogue import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import AdapterError
from dexviz.fetching import resolve_adapter
from dexviz.models import LoadedModel, View, load_model

FORMAT_VERSION = 1
_MERGE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_COARSE_MERGE_TOLERANCE = 5e-2
"""Half-precision models: largest logit deviation as a share of the largest logit."""


def save_adapter(
    adapter: DexAdapter,
    folder: str | Path,
    base: LoadedModel,
    *,
    details: Mapping[str, Any] | None = None,
    extra: Callable[[Path], None] | None = None,
    dtype: torch.dtype = torch.float16,
) -> Path:
    """Write an adapter folder, whole or not at all.

    Args:
        folder: must not exist yet, or hold an adapter that is then replaced.
        details: what was trained, how, with which tools; goes into the configuration under "training".
        extra: writes further files into the new folder before it is renamed into place.
        dtype: of the weights on disk.

    Raises:
        AdapterError: the folder holds something else, or the disk is full.
    """
    config = {
        "format_version": FORMAT_VERSION,
        "method": "dex",
        "base_model": base.name,
        "base_fingerprint": base.fingerprint,
        "dex": adapter.config.to_json(),
        "step": adapter.annealing.step,
        "parameters": sum(p.numel() for p in adapter.parameters()),
        "lambda": adapter.lambdas(),
        "training": dict(details or {}),
    }
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in adapter.state_dict().items()}
    with new_folder(Path(folder), replaces=ADAPTER_CONFIG) as work:
        (work / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        save_file(weights, work / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        if extra is not None:
            extra(work)
    return Path(folder)


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
    if data.get("format_version") != FORMAT_VERSION or data.get("method") != "dex":
        raise AdapterError(
            f"a DEX adapter of format version {FORMAT_VERSION}",
            f"method {data.get('method')!r}, version {data.get('format_version')!r} in {folder}",
            "Use the dexviz version that wrote it, or train it again.",
        )
    config = DexConfig.from_json(data.get("dex") or {})
    _check_base(config, data, base, folder, force)
    adapter = DexAdapter(config)
    try:
        adapter.load_state_dict({key: tensor.float() for key, tensor in load_file(folder / ADAPTER_WEIGHTS).items()})
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise AdapterError(
            f"undamaged weights in {folder / ADAPTER_WEIGHTS}", reason, "Copy or train the adapter again."
        ) from error
    adapter.set_step(int(data.get("step", config.steps)))
    return adapter.eval().requires_grad_(False)


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


def merged_projections(view: View) -> dict[str, Tensor]:
    """Parameter name → merged W_O weight, in the base's layout and type, of every layer that DEX adapts.

    Raises:
        AdapterError: there is no adapter, or something lies between attention and W_O.
    """
    adapter, layout = view.adapter, view.layout
    if adapter is None:
        raise AdapterError("a view with a DEX adapter", f"the {view.name} view without one", "Load the pair with an adapter.")
    names = {id(parameter): name for name, parameter in view.model.named_parameters()}
    merged: dict[str, Tensor] = {}
    for layer, heads in enumerate(adapter.config.heads):
        operator = adapter.operator(layer)
        if operator is None:
            continue
        target = layout.projections.get(layer)
        if target is None:
            raise AdapterError(
                "a model whose output projection directly follows attention",
                f"{view.loaded.name}, where a norm or gate lies in between in layer {layer}",
                "Use the adapter unmerged.",
            )
        rows = projection.rows(target).detach().double().clone()
        keep = (
            torch.eye(adapter.config.width, dtype=torch.float64, device=rows.device)
            - operator.lam().double() * operator.w_d.double()
        )
        for head in heads:
            span = slice(head * adapter.config.width, (head + 1) * adapter.config.width)
            rows[span] = keep @ rows[span]
        weight = rows.T if isinstance(target, torch.nn.Linear) else rows
        merged[names[id(target.weight)]] = weight.to(target.weight.dtype).contiguous()
    return merged


@torch.no_grad()
def merge(view: View, out: str | Path) -> Path:
    """Write the variant as a plain checkpoint that any runtime loads, and prove that its logits are the variant's.

    Raises:
        AdapterError: no exact merge exists, the folder is in use, the disk is full, or the logits differ.
    """
    weights = merged_projections(view)
    with new_folder(Path(out), replaces=None) as work:
        state = {**view.model.state_dict(), **weights}
        view.model.save_pretrained(work, state_dict=state)
        if view.loaded.tokenizer is not None:
            view.loaded.tokenizer.save_pretrained(work)
        _prove(view, work)
    return Path(out)


def _prove(view: View, folder: Path) -> None:
    """Compare logits of the checkpoint in `folder` with the unmerged variant's on a probe batch."""
    vocabulary = int(view.model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (2, 33), generator=torch.Generator().manual_seed(1)).to(view.model.device)
    with view.active():
        expected = view.model(ids, use_cache=False).logits
    dtype = str(view.model.dtype).removeprefix("torch.")
    merged = load_model(str(folder), device=str(view.model.device), dtype=dtype, tokenizer=view.loaded.tokenizer is not None)
    deviation = float((merged.model(ids, use_cache=False).logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not deviation <= _MERGE_TOLERANCE.get(view.model.dtype, _COARSE_MERGE_TOLERANCE):
        raise AdapterError(
            "merged logits equal to the unmerged variant's",
            f"a relative deviation of {deviation:.2g}",
            "Use the adapter unmerged.",
        )


@contextmanager
def new_folder(target: Path, *, replaces: str | None) -> Iterator[Path]:
    """A folder beside `target` that is renamed to it at the end, or removed on any failure.

    Args:
        replaces: name of a file by which an existing folder shows that it may be replaced; None refuses any.

    Raises:
        AdapterError: the target is in use, or the disk is full.
    """
    occupied = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    replaceable = replaces is not None and (target / replaces).is_file()
    if occupied and not replaceable:
        raise AdapterError("a new or empty folder to write to", f"{target}, which exists", "Choose another --out.")
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


def _swap(work: Path, target: Path) -> None:
    """Rename `work` to `target`; what was there moves aside first and goes when the new folder stands."""
    if not target.exists():
        work.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(aside / "old")
    work.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
