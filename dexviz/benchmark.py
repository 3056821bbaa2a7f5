"""Time and peak extra memory of the cases of `dexviz.bench_cases`, against the number of tokens.

Times are paired: every round runs each case once, in an order drawn anew, and ratios are medians over rounds of a case's time
divided by that of the stock SDPA forward in the same round. Memory is measured in a process of its own for each case.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dexviz import __version__
from dexviz.bench_cases import TITLES, Cases, reading
from dexviz.errors import EvaluationError
from dexviz.models import ModelPair
from dexviz.speed import Speed, Timing, in_turns, measure_speed

ROUNDS = 5
LENGTHS = (128, 512, 2048)
SLOW = {"dense": 3}
"""Most rounds of the cases that take long."""
_LONG = 2048
"""Above it the cases are warmed up on fewer tokens."""
_SHORT = 256

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, what is done, and how much there is."""


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    lengths: tuple[int, ...] = LENGTHS
    """Tokens of the prompts."""
    rounds: int = ROUNDS
    """Rounds of timing; `SLOW` cases take part in fewer."""
    memory: bool = True
    """Whether each case is run once more in a process of its own, for its peak memory."""
    seed: int = 0
    """Draws ids for a model without a tokenizer."""

    def __post_init__(self) -> None:
        if not self.lengths or self.rounds < 1:
            got = f"{len(self.lengths)} lengths, {self.rounds} rounds"
            raise EvaluationError("at least one length and one round", got, "Change --lengths or --rounds.")


@dataclass(frozen=True)
class Peak:
    """One call of a case in a process of its own, after a warm-up on a few tokens."""

    extra_bytes: int
    """Largest resident set above what the process held after the warm-up (CUDA: largest allocation)."""
    held_bytes: int
    """What it held after the warm-up: model, libraries."""
    seconds: float


@dataclass(frozen=True)
class Length:
    """All cases on one prompt."""

    tokens: int
    rounds: int
    timings: Mapping[str, Timing]
    """By name of the case."""
    peaks: Mapping[str, Peak]
    """By name of the case; empty where memory was not asked for."""
    left_out: Mapping[str, str]
    """Name of the case → why it was not measured."""


@dataclass(frozen=True)
class Bench:
    """What `python -m dexviz bench` answers."""

    lengths: tuple[Length, ...]
    dex: Speed | None
    """Base, unmerged and merged variant; None without a variant."""
    machine: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    def table(self) -> str:
        """For a terminal: one line a case and length."""
        rows = [f"{self.machine['model']} on {self.machine['cpu']}, {self.machine['threads']} threads"]
        for length in self.lengths:
            rows.append(f"\n{length.tokens:,} tokens, {length.rounds} rounds: seconds, ratio to SDPA, peak extra memory")
            for name, title in TITLES.items():
                rows.append(f"  {title:40} {_cells(length, name)}")
        if self.dex is not None:
            rows.append(f"\nDEX, {self.dex.tokens:,} tokens, ratio to the base: {_dex(self.dex)}")
        return "\n".join(rows)


def bench(
    pair: ModelPair, config: BenchConfig, source: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Bench:
    """Measure all cases at all lengths, and DEX against its base.

    Args:
        source: arguments of `load_pair` from which another process can load the pair; needed for memory.

    Raises:
        PromptError: a length that the models do not read.
    """
    for count in config.lengths:
        reading(pair, count, config.seed)
    lengths = tuple(measure_length(pair, count, config, source, progress) for count in config.lengths)
    dex = None
    if pair.variant.adapter is not None:
        dex = measure_speed(pair, tokens=min(max(config.lengths), _LONG), rounds=config.rounds, seed=config.seed)
    return Bench(lengths, dex, machine(pair))


def measure_length(
    pair: ModelPair, count: int, config: BenchConfig, source: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Length:
    """All cases on one prompt of `count` tokens."""
    timings, left_out = time_cases(pair, count, config, progress)
    peaks = {}
    for done, name in enumerate(timings if config.memory and source is not None else ()):
        found = peak_of(name, count, source or {}, config.seed)
        if isinstance(found, Peak):
            peaks[name] = found
        else:
            left_out[name] = found
        if progress is not None:
            progress(f"memory at {count} tokens", done + 1, len(timings))
    return Length(count, config.rounds, timings, peaks, left_out)


@torch.inference_mode()
def time_cases(
    pair: ModelPair, count: int, config: BenchConfig, progress: Progress | None = None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(name → timing, name → why it is left out) on a prompt of `count` tokens."""
    cases = Cases(pair, reading(pair, count, config.seed))
    reasons = {name: cases.left_out(name) for name in TITLES}
    wanted = [name for name, reason in reasons.items() if reason is None]
    if count > _LONG:
        short = Cases(pair, reading(pair, _SHORT, config.seed))
        for name in wanted:
            short.call(name)()
    calls = {name: cases.call(name) for name in wanted}
    timings = in_turns(
        calls,
        pair.base.model.device,
        config.rounds,
        warm_up=0 if count > _LONG else 1,
        at_most=SLOW,
        progress=None if progress is None else lambda done, total: progress(f"time at {count} tokens", done, total),
    )
    return timings, {name: reason for name, reason in reasons.items() if reason is not None}


def peak_of(name: str, count: int, source: Mapping[str, Any], seed: int = 0) -> Peak | str:
    """A case's peak memory from a fresh process, or why there is none."""
    asked = json.dumps(
        {"name": name, "tokens": count, "source": dict(source), "seed": seed, "threads": torch.get_num_threads()}
    )
    command = [sys.executable, "-m", "dexviz.bench_process", asked]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Peak(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode < 0:
        return f"Its process was ended by signal {-done.returncode}; signal 9 is a lack of memory."
    return (done.stderr.strip().splitlines() or ["Its process failed."])[-1]


def machine(pair: ModelPair) -> dict[str, Any]:
    """Where and with what it was measured."""
    variant, model = pair.variant, pair.base.model
    return {
        "model": pair.base.loaded.name,
        "fingerprint": pair.base.loaded.fingerprint,
        "variant": variant.title if variant.adapter is not None or variant.loaded is not pair.base.loaded else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {
            "dexviz": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cells(length: Length, name: str) -> str:
    if name not in length.timings:
        return f"left out: {length.left_out[name]}"
    timing = length.timings[name]
    peak = f"{length.peaks[name].extra_bytes / 1e6:12,.1f} MB" if name in length.peaks else ""
    return f"{timing.median:10.4f} s {timing.ratio:9.3f} ×{peak}"


def _dex(speed: Speed) -> str:
    merged = "not mergeable" if speed.merged is None else f"merged {speed.merged.ratio:.3f} ×"
    return merged if speed.variant is None else f"unmerged {speed.variant.ratio:.3f} ×, {merged}"
