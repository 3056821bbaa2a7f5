"""What the commands do. Each takes the parsed arguments and returns its answer twice: as JSON-ready data, and as text."""

from __future__ import annotations

import os
import re
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dexviz import catalogue, fetching
from dexviz.errors import AdapterError, CaptureError, DexvizError, PromptError, SnapshotError
from dexviz.records import Capture, CaptureRequest, TopTokens
from dexviz.requests import ModelInfo

if TYPE_CHECKING:
    from dexviz.models import ModelPair

Answer = tuple[dict[str, Any], str]
Command = Callable[[Namespace], Answer]

ROOT = Path(__file__).resolve().parent.parent
_HEAD = re.compile(r"L(-?\d{1,9})·?H(-?\d{1,9})", re.IGNORECASE)
_SPAN = re.compile(r"(.+)=(-?\d{1,9}):(-?\d{1,9})")
_WORK_SUFFIX = ".partial.12345678"
"""As long as what is added to the name of an output folder while it is being written."""


def fetch(arguments: Namespace) -> Answer:
    """Install a known model."""
    if catalogue.installed_path(arguments.model) is None:
        _quiet_libraries()
    path = str(fetching.fetch(arguments.model, progress=_note_progress))
    return {"name": arguments.model, "path": path}, f"{arguments.model} is at {path}"


def models(arguments: Namespace) -> Answer:
    """List what has a name."""
    found = catalogue.models()
    rows = [f"{info.name:16} {info.kind:8} {info.parameters / 1e6:9.3f} M  {_state(info):12} {info.title}" for info in found]
    return {"models": [asdict(info) for info in found]}, "\n".join(rows)


def capture(arguments: Namespace) -> Answer:
    """Measure one view, and save the snapshot where --out asks for it."""
    from dexviz.recorder import capture as measure
    from dexviz.snapshot import save_snapshot

    request, text = capture_request(arguments), read_prompt(arguments)
    out = _writable(arguments.out) if arguments.out else None
    pair = _load(arguments)
    tokens = pair.tokenize(text, chat=arguments.chat)
    view = pair.base if arguments.view == "base" else pair.variant
    taken = measure(view, tokens, request, progress=lambda done, total: _note_progress("capture", done, total))
    answer = describe(taken)
    summary = f"{view.title}: {len(tokens)} tokens, {taken.layers} layers × {taken.heads} heads; next {_next(taken.logits_top)}"
    if out is None:
        return answer, summary
    save_snapshot(taken, out, compact=arguments.compact)
    return {**answer, "out": str(out)}, f"{summary}\nsaved to {out}"


def train(arguments: Namespace) -> Answer:
    """Train a DEX adapter and write its folder."""
    from dexviz.models import load_model
    from dexviz.train_config import TrainConfig
    from dexviz.training import train as run

    _quiet_libraries()
    out = _new_folder(arguments.out, replaces=catalogue.ADAPTER_CONFIG)
    config = TrainConfig(**{field.name: getattr(arguments, field.name) for field in fields(TrainConfig)})
    loaded = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype, progress=_note_progress)
    result = run(loaded, out, config, on_step=lambda line: _note(_log_line(line, config.steps)))
    losses = {"base": asdict(result.base), "variant": asdict(result.variant), "relative_change": result.change}
    answer = {
        "model": loaded.name,
        "out": str(result.folder),
        "steps": result.steps,
        "held_out": losses,
        "lambda": result.lambdas,
    }
    summary = f"held-out loss {result.base.mean:.4f} → {result.variant.mean:.4f} nats a token ({100 * result.change:+.2f} %)"
    return answer, f"{summary}\nadapter at {result.folder}"


def merge(arguments: Namespace) -> Answer:
    """Write a plain checkpoint with the adapter folded in."""
    from dexviz.merging import merge as write

    if arguments.adapter is None:
        raise AdapterError("an adapter to merge", "none", 'Name one, for example --adapter "default".')
    out = _new_folder(arguments.out, replaces=None)
    pair = _load(arguments)
    path = str(write(pair.variant, out))
    return {"model": pair.base.title, "adapter": arguments.adapter, "out": path}, f"merged checkpoint at {path}"


def serve(arguments: Namespace) -> Answer:
    """Replace this process by the app's server."""
    page = ROOT / "app" / "main.py"
    if not page.is_file():
        raise DexvizError(f"the app at {page}", "no such file", "Serve from a checkout of the repository.")
    _check_port(arguments.address, arguments.port)
    url = f"http://{arguments.address}:{arguments.port}"
    _note(f"serving {url} (Ctrl+C stops)")
    options = {"server.port": arguments.port, "server.address": arguments.address, "server.headless": "true"}
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(page), *flags])


def capture_request(arguments: Namespace) -> CaptureRequest:
    """The request that the options spell.

    Raises:
        CaptureError: a head, a span or a value that cannot be, or two spans of one name.
    """
    return CaptureRequest(
        maps=tuple(_parse_head(text) for text in arguments.maps),
        pool=arguments.pool,
        similarity=tuple(arguments.similarity.split(",")) if arguments.similarity else False,
        spans=_parse_spans(arguments.span),
        score=arguments.score,
        space=arguments.space,
        sink=arguments.sink,
        local=arguments.local,
        threshold=arguments.threshold,
    )


def read_prompt(arguments: Namespace) -> str:
    """The prompt from the command line, a file or standard input.

    Raises:
        PromptError: the file cannot be read as UTF-8.
    """
    if arguments.prompt is not None:
        return str(arguments.prompt)
    name = arguments.prompt_file
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"UTF-8 text in {name}", str(error), "Check the path and the encoding.") from None


def describe(taken: Capture) -> dict[str, Any]:
    """A capture for `--json`: means over query rows, [layer][head]; null where a statistic has no denominator."""
    similarity = {name: _numbers(_off_diagonal(values)) for name, values in taken.similarity.items()}
    return {
        "model": taken.provenance["model"],
        "view": taken.provenance["view"],
        "layers": taken.layers,
        "heads": taken.heads,
        "tokens": [{"id": int(i), "label": label} for i, label in zip(taken.tokens.ids, taken.tokens.labels, strict=True)],
        "stats": {name: _numbers(taken.mean(name)) for name in taken.stats},
        "lambda": _numbers(taken.lam),
        "selected": [np.flatnonzero(heads).tolist() for heads in taken.selected],
        "similarity": similarity,
        "top": top_tokens(taken.logits_top),
        "request": taken.request.to_json(),
        "provenance": dict(taken.provenance),
    }


def top_tokens(top: TopTokens) -> list[dict[str, Any]]:
    """Most probable next tokens for `--json`."""
    rows = zip(top.ids, top.labels, top.prob, strict=True)
    return [{"id": int(i), "token": label, "prob": float(prob)} for i, label, prob in rows]


def _off_diagonal(values: np.ndarray) -> np.ndarray:
    """Mean similarity of the pairs of different heads, per layer: [L] of [L, H, H]."""
    heads = values.shape[-1]
    if heads < 2:
        return np.full(len(values), np.nan)
    return (values.sum((1, 2)) - np.trace(values, axis1=1, axis2=2)) / (heads * (heads - 1))


def _numbers(values: np.ndarray) -> Any:
    """Nested lists with null for NaN."""
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return plain.tolist()


def _log_line(line: Mapping[str, Any], steps: int) -> str:
    held_out = "" if line["held_out"] is None else f", held-out {line['held_out']:.4f}"
    return f"step {line['step']}/{steps}: loss {line['loss']:.4f}{held_out}"


def _state(info: ModelInfo) -> str:
    return "ready" if info.ready else "not fetched"


def _next(top: TopTokens) -> str:
    return ", ".join(f"{label} {prob:.3f}" for label, prob in list(zip(top.labels, top.prob, strict=True))[:3])


def _parse_head(text: str) -> tuple[int, int]:
    if not (match := _HEAD.fullmatch(text)):
        raise CaptureError("a head written like L12H3", repr(text), "Change --maps.")
    return int(match[1]), int(match[2])


def _parse_span(text: str) -> tuple[str, tuple[int, int]]:
    if not (match := _SPAN.fullmatch(text)):
        raise CaptureError("a span written like needle=10:18", repr(text), "Change --span.")
    return match[1], (int(match[2]), int(match[3]))


def _parse_spans(texts: list[str]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for name, span in map(_parse_span, texts):
        if name in spans:
            raise CaptureError("spans with different names", f"{name!r} twice", "Change --span.")
        spans[name] = span
    return spans


def _writable(name: str) -> Path:
    """The path of a file to write, checked before anything costly starts."""
    path = Path(name)
    try:
        usable = not path.is_dir() and path.parent.is_dir()
    except OSError as error:
        raise SnapshotError("a file that can be written", f"{name!r} ({error.strerror})", "Change --out.") from None
    if not usable:
        raise SnapshotError("a file in a folder that exists", repr(name), "Change --out.")
    return path


def _new_folder(name: str, *, replaces: str | None) -> Path:
    """The path of a folder to write, checked before anything costly starts. `replaces` as in `adapter.new_folder`."""
    from dexviz.adapter import check_target

    path = Path(name)
    try:
        Path(f"{path}{_WORK_SUFFIX}").exists()
        check_target(path, replaces=replaces)
    except OSError as error:
        raise AdapterError("a folder that can be written", f"{name!r} ({error.strerror})", "Choose another --out.") from None
    return path


def _check_port(address: str, port: int) -> None:
    todo = "Choose another --port or --address."
    if not 0 < port < 1 << 16:
        raise DexvizError("a port within 1..65535", str(port), todo)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except (OSError, UnicodeError) as error:
        raise DexvizError(f"a free port at {address}:{port}", str(error), todo) from None


def _load(arguments: Namespace) -> ModelPair:
    from dexviz.models import load_pair

    _quiet_libraries()
    import torch

    torch.manual_seed(arguments.seed)
    implied = None if arguments.adapter not in (None, catalogue.DEFAULT_ADAPTER) else catalogue.DEFAULT_MODEL
    return load_pair(
        arguments.model or implied,
        adapter=arguments.adapter,
        variant=arguments.variant,
        device=arguments.device,
        dtype=arguments.dtype,
        force=arguments.force,
    )


def _quiet_libraries() -> None:
    """Keep the libraries' own chatter out of standard error, which belongs to our notes."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _note(text: str) -> None:
    print(f"dexviz: {text}", file=sys.stderr, flush=True)


def _note_progress(stage: str, done: int, total: int) -> None:
    """One line that counts up on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\rdexviz: {stage} {done}/{total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
