"""What a run of both views will cost, in the sidebar's words; the numbers are the library's."""

from __future__ import annotations

from dataclasses import dataclass

from dexviz.budget import FIXED_SECONDS, Estimate, estimated, free_memory, keep_bytes, operations
from dexviz.errors import BudgetError
from dexviz.records import CaptureRequest
from dexviz.requests import PairInfo

VIEWS = 2
FIXED = VIEWS * FIXED_SECONDS
"""Seconds that every run takes, whatever its length."""
_STAYS = ("kept Q, K and V", "statistics")
"""What the first view leaves in memory while the second is captured."""


@dataclass(frozen=True)
class Cost:
    """Estimated time in seconds and memory in bytes of capturing base and variant."""

    seconds: float
    memory: int
    refusal: str | None = None
    """Why it cannot be run; None where it fits."""

    def __str__(self) -> str:
        memory = f"{max(1, round(self.memory / 2**20)):,} MB"
        if self.seconds < 1:
            return f"less than 1 s, about {memory}"
        return f"about {self.seconds:.{1 if self.seconds < 10 else 0}f} s, {memory}"


def work(info: PairInfo, tokens: int) -> float:
    """Floating-point operations of capturing both views."""
    return VIEWS * operations(info.size, tokens)


def cost(info: PairInfo, tokens: int, rate: float | None = None, request: CaptureRequest | None = None) -> Cost:
    """Cost of capturing both views of a loaded pair at `rate` operations per second."""
    available = free_memory() if info.size.kind == "cpu" else None
    one = estimated(info.size, tokens, request, keep=keep_bytes() // 2, rate=rate, available=available)
    left = sum(one.memory.get(name, 0) for name in _STAYS)
    return Cost(VIEWS * one.seconds, one.total + left, _refusal(one))


def _refusal(one: Estimate) -> str | None:
    try:
        one.check()
    except BudgetError as error:
        return str(error)
    return None
