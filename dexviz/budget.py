"""What a capture will cost in time and memory, before it is started, and the refusal of one that cannot fit.

    operations = 2 · parameters · N  (the forward pass)  +  8 · L · H · N² · D  (attention, and what is made of its maps)

The memory counted is what a capture takes beside the model's weights; `docs/performance.md` has measured peaks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dexviz.errors import BudgetError, DexvizError
from dexviz.records import STATISTICS, CaptureRequest

RATES = {"cpu": 4e10, "cuda": 2e13}
"""Operations per second that a capture reaches by kind of device, until this process has measured its own."""
FIXED_SECONDS = 0.15
"""Seconds that a capture takes whatever its length."""
KEEP_VARIABLE = "DEXVIZ_KEEP_BYTES"
KEEP_BYTES = 4 << 30
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_FLOAT = 4
_BLOCKS, _BLOCK_BYTES, _LEAST_ROWS = 4, 4 << 20, 16
"""Blocks of maps that exist at a time, what each takes, and how many rows it has at least."""
_ACTIVATIONS, _COPIES, _FIXED_BYTES = 8, 6, 64 << 20
"""Activations of hidden and of MLP width that live at once; copies of Q, K, V and O of one layer; what any capture takes."""
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, usage and statistics of a control group, in versions 2 and 1."""
_RESERVE = 0.9
"""Share of the free memory that a capture may fill."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model that the cost of a capture follows from."""

    layers: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    hidden: int
    intermediate: int
    logits: int
    """Logits that each position takes: the vocabulary, or 0 where the model can leave all but the last out."""
    context: int
    """Tokens that the model reads at most."""
    parameters: int
    dtype: str
    device: str

    @property
    def kind(self) -> str:
        """Kind of device, "cpu" or "cuda"."""
        return "cuda" if self.device.startswith("cuda") else "cpu"

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return BYTES.get(self.dtype.removeprefix("torch."), _FLOAT)


@dataclass(frozen=True)
class Estimate:
    """Expected cost of one capture."""

    tokens: int
    seconds: float
    memory: Mapping[str, int]
    """Bytes by part, beside the weights."""
    available: int | None = None
    """Bytes that are free on the device; None where that is not known."""
    longest: int | None = None
    """Tokens of the longest prompt that the same request fits with; None where `available` is not known."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the memory is there, as far as is known."""
        return self.available is None or self.total <= self.available * _RESERVE

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            BudgetError: with what is needed and what is there.
        """
        if self.fits:
            return
        assert self.available is not None
        parts = sorted(self.memory.items(), key=lambda item: -item[1])[:2]
        largest = ", ".join(f"{name} {_readable(size)}" for name, size in parts)
        remedy = f"Shorten the prompt to at most {self.longest:,} tokens" if self.longest else "Free memory"
        raise BudgetError(
            f"a capture that fits into {_readable(self.available * _RESERVE)} of free memory",
            f"{self.tokens:,} tokens, which need about {_readable(self.total)} ({largest})",
            f"{remedy}{', or ask for fewer exact maps' if 'exact maps' in self.memory else ''}.",
        )


def _readable(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def operations(size: ModelSize, tokens: int) -> float:
    """Floating-point operations of one capture."""
    attention = 8 * size.layers * size.heads * tokens**2 * size.value_width
    return 2.0 * size.parameters * tokens + attention


def memory(size: ModelSize, tokens: int, request: CaptureRequest, keep: int = 0) -> dict[str, int]:
    """Bytes of one capture by part.

    Args:
        keep: bytes up to which Q, K and V of the layers stay, for maps without another pass.
    """
    heads, n = size.layers * size.heads, tokens
    width = size.heads * size.key_width + size.kv_heads * (size.key_width + size.value_width)
    names = len(STATISTICS) + len(request.spans) + 1
    side = min(request.pool or 0, n)
    outputs = size.heads * size.value_width
    block = max(_BLOCK_BYTES, _LEAST_ROWS * size.heads * n * _FLOAT)
    activations = n * size.itemsize * (_ACTIVATIONS * size.hidden + 3 * size.intermediate)
    parts = {
        "activations and one layer's Q, K, V and O": activations + _COPIES * n * (width + outputs) * _FLOAT + _FIXED_BYTES,
        "logits": n * size.logits * size.itemsize,
        "blocks of maps": _BLOCKS * block,
        "statistics": 2 * names * heads * n * _FLOAT,
        "tiles": 4 * heads * side**2 * _FLOAT,
        "similarity": 2 * len(request.similarities) * heads * size.heads * _FLOAT,
        "exact maps": 2 * len(request.maps) * n**2 * _FLOAT,
        "kept Q, K and V": min(size.layers * n * width * size.itemsize, keep),
    }
    return {name: value for name, value in parts.items() if value}


def estimated(
    size: ModelSize,
    tokens: int,
    request: CaptureRequest | None = None,
    *,
    keep: int = 0,
    rate: float | None = None,
    available: int | None = None,
) -> Estimate:
    """Cost of one capture of so many tokens.

    Args:
        rate: operations per second; by default what is usual for the kind of device.
        available: bytes that are free; see `free_memory`.
    """
    request = request or CaptureRequest()
    seconds = FIXED_SECONDS + operations(size, tokens) / (rate or RATES[size.kind])
    parts = memory(size, tokens, request, keep)
    longest = None if available is None else _longest(size, request, keep, available)
    return Estimate(tokens, seconds, parts, available, longest)


def _longest(size: ModelSize, request: CaptureRequest, keep: int, available: int) -> int:
    """Tokens of the longest prompt that the model reads and the memory holds: what is needed grows with the length."""
    low, high = 0, size.context + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(memory(size, middle, request, keep).values()) <= available * _RESERVE
        low, high = (middle, high) if fits else (low, middle)
    return low


def free_memory() -> int | None:
    """Bytes that can still be taken of this machine, within its control group. None where nobody says."""
    found = [value for value in (_machine(), _control_group()) if value is not None]
    return min(found) if found else None


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE") if pages else None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_group() -> int | None:
    """What a container may still take; what its page cache holds can be given back."""
    for names in _CGROUP_FILES:
        try:
            limit, used, stat = ((_CGROUP / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            continue
        if not limit.isdigit() or not used.isdigit():
            return None
        counted = dict(line.split() for line in stat.splitlines())
        cached = int(counted.get("total_inactive_file", counted.get("inactive_file", 0)))
        return max(0, int(limit) - int(used) + cached)
    return None


def keep_bytes() -> int:
    """Byte budget for the Q, K and V of recent prompts, over all sessions.

    Raises:
        DexvizError: the variable holds no whole number of bytes.
    """
    text = os.environ.get(KEEP_VARIABLE)
    if not text:
        return KEEP_BYTES
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise DexvizError(f"{KEEP_VARIABLE} to be a whole number of bytes", repr(text), "Correct it, or leave it unset.")
    return value
