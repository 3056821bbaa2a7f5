"""Handlers of the engine for noise: one marked prompt, and a battery of needle prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dexviz.battery import noise_battery
from dexviz.models import ModelPair
from dexviz.needle_noise import measure
from dexviz.noise_records import BatteryReport, NoiseOnPrompt
from dexviz.requests import MeasureNoise, PairSpec, RunBattery
from dexviz.tasks import Task


class NoiseHandlers:
    """Serve requests about noise with pairs that the server holds; passes take turns on its device."""

    def __init__(self, pair: Callable[[PairSpec, Task], ModelPair], device: threading.Lock) -> None:
        self._pair, self._device = pair, device

    def measure(self, request: MeasureNoise, task: Task) -> NoiseOnPrompt:
        """Signal and noise on one prompt."""
        pair = self._pair(request.pair, task)
        with task.holding(self._device, "measuring noise"):
            return measure(
                pair,
                request.prompt.text,
                request.marks,
                rows=request.rows,
                score=request.score,
                space=request.space,
                answer=request.answer,
                chat=request.prompt.chat,
                cancel=task.cancelled,
            )

    def battery(self, request: RunBattery, task: Task) -> BatteryReport:
        """A battery; the device is free between its prompts' requests only once it is done or cancelled."""
        pair = self._pair(request.pair, task)
        with task.holding(self._device, "needle prompts"):
            return noise_battery(pair, request.battery, progress=task.report, cancel=task.cancelled)
