"""Which kernels run: compiled loops on the CPU, eager torch elsewhere, or what `DEXVIZ_KERNELS` says.

The Triton twins have been run in Triton's interpreter alone; they become what CUDA devices choose once a GPU has checked them.

Kernels that fail are not tried again on that kind of device: eager twins take over, and the reason is logged and kept for the
capture's provenance.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from dexviz.errors import Cancelled, DexvizError

VARIABLE = "DEXVIZ_KERNELS"
NAMES = ("eager", "compiled", "triton")
TITLES = {"compiled": "Compiled loops", "triton": "Triton"}

T = TypeVar("T")
_failures: dict[str, str] = {}
"""Device type → why its kernels were given up there."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """What computes on one kind of device."""

    name: str
    """ "eager", "compiled" or "triton"."""
    note: str | None = None
    """Why it is not what would have been chosen; None where it is."""


def chosen(device: torch.device) -> Backend:
    """The backend of a device.

    Raises:
        DexvizError: `DEXVIZ_KERNELS` names no backend, or one that this device cannot have.
    """
    backend, note = _choice(os.environ.get(VARIABLE), device.type), _failures.get(device.type)
    return Backend("eager", note) if note is not None and backend.name != "eager" else backend


def attempt(device: torch.device, own: Callable[[], T], eager: Callable[[], T]) -> T:
    """What the device's backend makes of it: eager where that is chosen, or where `own` fails. Neither may keep half a result.

    What the input or the user is to blame for, and a full memory, are no failures of the kernels: they are raised.
    """
    name = chosen(device).name
    if name != "eager":
        try:
            return own()
        except (DexvizError, Cancelled, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            _failures[device.type] = f"{TITLES[name]} failed on {device.type}, eager kernels took over. {text[:300]}"
            _log.warning(_failures[device.type], exc_info=error)
    return eager()


@cache
def _choice(asked: str | None, device: str) -> Backend:
    """Made once for each kind of device."""
    if not asked:
        return Backend("compiled" if device == "cpu" else "eager")
    if asked not in NAMES:
        raise DexvizError(
            f"{VARIABLE} to be {', '.join(NAMES[:-1])} or {NAMES[-1]}", repr(asked), "Correct it, or leave it unset."
        )
    if asked == "compiled" and device != "cpu":
        raise DexvizError(f"a CPU for {VARIABLE}=compiled", device, f"Unset {VARIABLE}.")
    if asked == "triton" and device != "cuda" and not interpreted():
        raise DexvizError(
            f"a CUDA device for {VARIABLE}=triton",
            device,
            f"Unset {VARIABLE}, or set TRITON_INTERPRET=1 to run the kernels, slowly, in Triton's interpreter.",
        )
    return Backend(asked)


def interpreted() -> bool:
    """Whether Triton runs kernels through its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
