"""What a training run keeps on disk while it is at work: its settings, its checkpoints and its log, in a folder of its own.

A killed run goes on from the last checkpoint that is whole. The settings mark a folder as one of ours.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dexviz.errors import TrainingError
from dexviz.train_config import TrainConfig, differing

LOG = "training_log.jsonl"
CHECKPOINTS = "checkpoints"
_SETTINGS = "train_config.json"
"""What a run depends on."""


def partial(out: Path) -> Path:
    """Where the run that will write `out` keeps its checkpoints."""
    return out.with_name(out.name + ".partial")


@contextmanager
def work_folder(work: Path) -> Iterator[Path]:
    """The folder of a run's checkpoints and log, proven writable before long work; it goes again where it stays empty.

    Raises:
        TrainingError: the folder holds something else, or cannot be written to.
    """
    try:
        if work.exists() and not (work / _SETTINGS).is_file() and (not work.is_dir() or any(work.iterdir())):
            raise TrainingError(
                "a new or empty folder for checkpoints", f"{work}, which exists", "Move it or choose another --out."
            )
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise TrainingError(f"a writable folder for checkpoints at {work}", str(error), "Choose another --out.") from error
    try:
        yield work
    finally:
        with suppress(OSError):
            work.rmdir()


def clear(work: Path) -> None:
    """Remove what a run keeps in its folder, and nothing else; the settings last, by which the folder is known."""
    if (work / CHECKPOINTS).exists():
        shutil.rmtree(work / CHECKPOINTS)
    for name in (LOG, _SETTINGS):
        (work / name).unlink(missing_ok=True)


@contextmanager
def writing(work: Path) -> Iterator[None]:
    """Turns a failure to write into a TrainingError; torch reports a full disk as a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        todo = "Free space and repeat the call: it goes on from the last whole checkpoint."
        raise TrainingError(f"room to write to {work}", reason, todo) from error


@dataclass(frozen=True)
class StoppedRun:
    """What a run that was stopped had been asked for."""

    config: TrainConfig
    base_model: str
    dtype: str


def stopped_run(out: Path) -> StoppedRun | None:
    """The run that was stopped on its way to `out`, or None where there is none.

    Raises:
        TrainingError: its file of settings is damaged.
    """
    settings = partial(out) / _SETTINGS
    if not settings.is_file():
        return None
    found = _read(settings)
    try:
        return StoppedRun(TrainConfig(**found["config"]), str(found["base_model"]), str(found["dtype"]))
    except (KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        todo = f"Remove {settings.parent}, or leave --resume out to start anew."
        raise TrainingError(f"the settings of a run in {settings}", got, todo) from error


def last_checkpoint(work: Path, identity: dict[str, Any], *, resume: bool = False) -> Path | None:
    """The newest whole checkpoint of a stopped run of the same identity; the log is cut back to it, other checkpoints go.

    Args:
        identity: all that a run's weights depend on, JSON-ready; its settings under "config".
        resume: refuse to start anew where the stopped run was of something else.

    Raises:
        TrainingError: what differs, with `resume`.
    """
    settings = work / _SETTINGS
    before = _read(settings)
    depends = [name for name in identity if name != "base_model"]  # a name, not what the weights depend on
    if any(before.get(name) != identity[name] for name in depends):
        if resume and before:
            settings_too = differing(before.get("config", {}), identity["config"])
            follows = ("config", "dex", "text") if settings_too else ("config",)  # other settings may read other text
            differ = [name for name in depends if name not in follows and before.get(name) != identity[name]] + settings_too
            raise TrainingError(
                f"the settings, text and base of the run that was stopped in {work}",
                f"another {', '.join(differ)}",
                "Resume with the same ones, or leave --resume out to start anew.",
            )
        clear(work)
        settings.write_text(json.dumps(identity), encoding="utf-8")
    lines = _whole_lines(work / LOG)
    found = list((work / CHECKPOINTS).glob("checkpoint-*"))
    whole = {int(p.name.split("-")[1]): p for p in found if _is_whole(p)}
    step = max((step for step in whole if step <= len(lines)), default=0)
    (work / LOG).write_text("".join(f"{line}\n" for line in lines[:step]), encoding="utf-8")
    last = whole.get(step)
    for other in found:
        if other != last:
            shutil.rmtree(other)
    return last


def _read(settings: Path) -> dict[str, Any]:
    """A run's identity; empty where there is none that can be read."""
    try:
        found = json.loads(settings.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole_lines(path: Path) -> list[str]:
    """The log's lines, one a step from step 1, up to the first that a kill has torn."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return list(takewhile(_is_json, lines))


def _is_whole(checkpoint: Path) -> bool:
    """Trainer writes its state last; torch's files are archives with checksums."""
    state = checkpoint / "trainer_state.json"
    if not (state.is_file() and _is_json(state.read_text(encoding="utf-8", errors="replace"))):
        return False
    try:
        return all(zipfile.ZipFile(path).testzip() is None for path in checkpoint.glob("*.pt*"))
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError):
        return False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
