"""What the commands share: the type of an answer, the pair of models that was asked for, and notes on standard error."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dexviz import catalogue, processes
from dexviz.errors import AdapterError, SnapshotError

if TYPE_CHECKING:
    from dexviz.models import ModelPair

Answer = tuple[dict[str, Any], str]
"""What a command comes to, twice: as JSON-ready data, and as text."""
Command = Callable[[Namespace], Answer]
_WORK_SUFFIX = ".partial.12345678"
"""As long as what is added to the name of an output folder while it is being written."""


def load(arguments: Namespace) -> ModelPair:
    """The pair that --model, --adapter and --variant name."""
    from dexviz.models import load_pair

    quiet_libraries()
    import torch

    torch.manual_seed(arguments.seed)
    return load_pair(**pair_source(arguments))


def pair_source(arguments: Namespace) -> dict[str, Any]:
    """The arguments of `load_pair` that the options spell."""
    implied = None if arguments.adapter not in (None, catalogue.DEFAULT_ADAPTER) else catalogue.DEFAULT_MODEL
    return {
        "base": arguments.model or implied,
        "adapter": arguments.adapter,
        "variant": arguments.variant,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "force": arguments.force,
    }


def new_folder(name: str, *, replaces: str | None) -> Path:
    """The path of a folder to write, checked before anything costly starts. `replaces` as in `adapter.new_folder`."""
    from dexviz.adapter import check_target

    path = Path(name)
    try:
        Path(f"{path}{_WORK_SUFFIX}").exists()
        check_target(path, replaces=replaces)
    except OSError as error:
        raise AdapterError("a folder that can be written", f"{name!r} ({error.strerror})", "Choose another --out.") from None
    return path


def new_file(name: str) -> Path:
    """The path of a file to write, checked before anything costly starts.

    Raises:
        SnapshotError: its folder does not exist, or it is one.
    """
    path = Path(name)
    try:
        usable = not path.is_dir() and path.parent.is_dir()
    except OSError as error:
        raise SnapshotError("a file that can be written", f"{name!r} ({error.strerror})", "Change --out.") from None
    if not usable:
        raise SnapshotError("a file in a folder that exists", repr(name), "Change --out.")
    return path


def numbers(values: np.ndarray) -> Any:
    """Nested lists with null for NaN."""
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return plain.tolist()


def quiet_libraries() -> None:
    """Keep the libraries' own chatter out of standard error, which belongs to our notes."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def note(text: str) -> None:
    """A line on standard error; of several processes of one run, only the first speaks."""
    if processes.index():
        return
    print(f"dexviz: {text}", file=sys.stderr, flush=True)


def note_progress(stage: str, done: int, total: int) -> None:
    """One line that counts up on a terminal; nothing elsewhere."""
    if sys.stderr.isatty() and processes.index() == 0:
        print(f"\rdexviz: {stage} {done}/{total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
