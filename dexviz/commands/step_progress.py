"""Progress of training on standard error: a bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from dexviz import processes
from dexviz.commands.common import note
from dexviz.train_config import TrainConfig


class StepProgress:
    """Shows loss, range of λ, tokens a second and the time left, step by step. A run that goes on starts where it was."""

    def __init__(self, config: TrainConfig) -> None:
        self.steps = config.steps
        self.tokens = config.batch * config.accumulate * config.block * processes.count()
        self.began: tuple[int, float] | None = None
        self.bar: tqdm | None = None

    def __call__(self, line: Mapping[str, Any]) -> None:
        if processes.index():
            return
        step, now = int(line["step"]), time.monotonic()
        if self.began is None:
            self.began = step, now
        if not sys.stderr.isatty():
            note(self._text(line, step, now))
            return
        if self.bar is None:
            size = shutil.get_terminal_size((100, 24))  # on a terminal that tells no size tqdm would show nothing
            shape = {"ncols": size.columns, "nrows": size.lines}
            self.bar = tqdm(total=self.steps, initial=step - 1, desc="train", unit="step", **shape)
        self.bar.set_postfix_str(_values(line) + self._speed(step, now), refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        """Leave the terminal on a fresh line."""
        if self.bar is not None:
            self.bar.close()

    def _text(self, line: Mapping[str, Any], step: int, now: float) -> str:
        left = ""
        if self.began is not None and step > self.began[0]:
            seconds = (now - self.began[1]) / (step - self.began[0]) * (self.steps - step)
            left = f", {tqdm.format_interval(seconds)} left"
        return f"step {step}/{self.steps}: {_values(line)}{self._speed(step, now)}{left}"

    def _speed(self, step: int, now: float) -> str:
        """Tokens a second since the first step that was seen, which itself is not timed."""
        if self.began is None or step <= self.began[0] or now <= self.began[1]:
            return ""
        return f", {self.tokens * (step - self.began[0]) / (now - self.began[1]):,.0f} tokens/s"


def _values(line: Mapping[str, Any]) -> str:
    measured = [(name, line[key]) for name, key in (("validation", "validation"), ("held-out", "held_out"))]
    losses = "".join(f", {name} {value:.4f}" for name, value in measured if value is not None)
    lam = line["lambda"]
    strength = f", λ {min(lam):.3f} to {max(lam):.3f}" if any(lam) else ""
    return f"loss {line['loss']:.4f}{losses}{strength}"
