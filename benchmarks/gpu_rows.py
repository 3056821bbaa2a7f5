"""Rows of the GPU script's table, the time it may take, and a clock that waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One measurement; None where a column does not apply."""

    quantity: str
    tokens: int
    dtype: str
    seconds: float | None = None
    """Median."""
    sdpa_seconds: float | None = None
    """SDPA on the same queries, keys and values; for a whole capture, the SDPA forward pass."""
    ratio: float | None = None
    """seconds / sdpa_seconds."""
    floor_seconds: float | None = None
    """The larger of operations / measured rate and bytes / measured rate."""
    floor_ratio: float | None = None
    """seconds / floor_seconds."""
    error: float | None = None
    """Largest deviation from the reference, relative to its largest entry, or mean deviation where the quantity says so."""
    tolerance: float | None = None
    holds: bool | None = None
    """Whether the error is within the tolerance."""
    note: str | None = None
    """Why nothing was measured."""


def compared(quantity: str, tokens: int, dtype: str, error: float, tolerance: float) -> Row:
    """A row of a correctness check."""
    return Row(quantity, tokens, dtype, error=error, tolerance=tolerance, holds=error <= tolerance)


class Limit:
    """The seconds that everything together may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def left(self) -> float:
        return self.end - time.perf_counter()

    def spent(self) -> bool:
        return self.left() <= 0


def timed(work: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Median seconds of a call, after one that is not counted (kernels are compiled in it)."""
    work()
    seconds = []
    for _ in range(rounds):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: Sequence[Row]) -> str:
    """The rows as one table."""
    lines = [f"{'quantity':44} {'tokens':>7} {'dtype':9} {'seconds':>10} {'SDPA':>7} {'floor':>7} {'error':>9} {'allowed':>8}"]
    for row in rows:
        cells = (
            _cell(row.seconds, ".3e", 10),
            _cell(row.ratio, ".2f", 6, "×"),
            _cell(row.floor_ratio, ".2f", 6, "×"),
            _cell(row.error, ".1e", 9),
            _cell(row.tolerance, ".0e", 8),
        )
        verdict = row.note or {True: "ok", False: "FAILS", None: ""}[row.holds]
        lines.append(f"{row.quantity:44} {row.tokens:7,} {row.dtype:9} {' '.join(cells)}  {verdict}".rstrip())
    return "\n".join(lines)


def _cell(value: float | None, form: str, width: int, unit: str = "") -> str:
    return " " * (width + len(unit)) if value is None else f"{value:{width}{form}}{unit}"
