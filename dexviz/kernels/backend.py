"""Which kernels run: eager torch, or with `DEXVIZ_KERNELS=triton` the Triton twins on CUDA devices.

The twins have been run in Triton's interpreter alone; they become what CUDA devices choose once a GPU has checked them.

A Triton kernel that fails is not tried again on that kind of device: eager twins take over, and the reason is logged and kept
for the capture's provenance.
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
NAMES = ("eager", "triton")

T = TypeVar("T")
_failures: dict[str, str] = {}
"""Device type → why Triton was given up there."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """What computes on one kind of device."""

    name: str
    """ "eager" or "triton"."""
    note: str | None = None
    """Why it is not what would have been chosen; None where it is."""


def chosen(device: torch.device) -> Backend:
    """The backend of a device.

    Raises:
        DexvizError: `DEXVIZ_KERNELS` names no backend, or asks for Triton on a CPU without Triton's interpreter.
    """
    backend, note = _choice(os.environ.get(VARIABLE), device.type), _failures.get(device.type)
    return Backend("eager", note) if note is not None and backend.name == "triton" else backend


def attempt(device: torch.device, triton: Callable[[], T], eager: Callable[[], T]) -> T:
    """What the device's backend makes of it: eager where that is chosen, or where Triton fails. Neither may keep half a result.

    What the input or the user is to blame for, and a full memory, are no failures of Triton: they are raised.
    """
    if chosen(device).name == "triton":
        try:
            return triton()
        except (DexvizError, Cancelled, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            _failures[device.type] = f"Triton failed on {device.type}, eager kernels took over. {text[:300]}"
            _log.warning(_failures[device.type], exc_info=error)
    return eager()


@cache
def _choice(asked: str | None, device: str) -> Backend:
    """Made once for each kind of device."""
    if not asked:
        return Backend("eager")
    if asked not in NAMES:
        raise DexvizError(f"{VARIABLE} to be {' or '.join(NAMES)}", repr(asked), "Correct it, or leave it unset.")
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
