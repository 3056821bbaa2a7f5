"""What a run will cost, before it is started."""

from __future__ import annotations

from dataclasses import dataclass

from dexviz.requests import PairInfo

VIEWS = 2
RATES = {"cpu": 4e10, "cuda": 2e13}
"""Floating-point operations per second that a capture reaches by kind of device, until this process has measured its own."""
FIXED = 0.3
"""Seconds that every run takes, whatever its length."""
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STATISTICS = 7


@dataclass(frozen=True)
class Cost:
    """Estimated time in seconds and memory in bytes of capturing base and variant."""

    seconds: float
    memory: int

    def __str__(self) -> str:
        memory = f"{max(1, round(self.memory / 2**20)):,} MB"
        if self.seconds < 1:
            return f"less than 1 s, about {memory}"
        return f"about {self.seconds:.{1 if self.seconds < 10 else 0}f} s, {memory}"


def operations(info: PairInfo, tokens: int) -> float:
    """Floating-point operations of capturing both views: the forward pass, and attention once more."""
    attention = 4 * info.layers * info.heads * tokens**2 * info.head_width
    return VIEWS * (2.0 * info.parameters * tokens + 2 * attention)


def cost(info: PairInfo, tokens: int, rate: float | None = None) -> Cost:
    """Cost of capturing both views of a loaded pair at `rate` operations per second; memory is the kept Q, K and V."""
    width = (info.heads + 2 * info.kv_heads) * info.head_width
    kept = info.layers * tokens * width * BYTES.get(info.dtype.removeprefix("torch."), 4)
    statistics = STATISTICS * info.layers * info.heads * tokens * 4
    usual = RATES["cuda" if info.device.startswith("cuda") else "cpu"]
    return Cost(FIXED + operations(info, tokens) / (rate or usual), VIEWS * (kept + statistics))
