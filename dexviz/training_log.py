"""What is written down while an adapter is trained, and when training stops: a callback of transformers' Trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dexviz import processes
from dexviz.checkpoints import writing
from dexviz.train_config import TrainConfig
from dexviz.trainee import Trainee, gradient_norms

OnStep = Callable[[dict[str, Any]], None]
"""Called with each line of the training log."""
_NORMS = {"w_d": "grad_norm_w_d", "lambda": "grad_norm_lambda", "weights": "grad_norm_weights", "lora": "grad_norm_lora"}


@dataclass
class Stopping:
    """The best weights so far by validation loss, and for how many measurements none was better."""

    loss: float = math.inf
    step: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    waited: int = 0

    def see(self, loss: float, step: int, trainee: Trainee) -> None:
        """Take in a measurement."""
        if loss < self.loss:
            weights = {name: tensor.detach().clone() for name, tensor in trainee.state_dict().items()}
            self.loss, self.step, self.weights, self.waited = loss, step, weights, 0
        else:
            self.waited += 1


class TrainingLog(TrainerCallback):
    """Moves λ(t) along, and writes a line a step: loss, validation and held-out loss, λ per layer, gradient norms.

    All of it is of the float32 weights in training; those on disk are rounded once more.
    """

    def __init__(
        self,
        path: Path,
        trainee: Trainee,
        validation: np.ndarray,
        held_out: np.ndarray,
        config: TrainConfig,
        on_step: OnStep,
    ) -> None:
        self.path, self.trainee, self.config, self.on_step = path, trainee, config, on_step
        self.validation, self.held_out = validation, held_out
        self.stopping = Stopping()
        self.norms: dict[str, float] = {}
        self.failed_at: int | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Training counts t from 1."""
        self.trainee.set_step(state.global_step + 1)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note gradient norms while the gradients are there."""
        self.norms = gradient_norms(self.trainee)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Write the step's line; stop, without a checkpoint, at a loss or a weight that is no number."""
        if not logs or "loss" not in logs:
            return
        step, loss = state.global_step, float(logs["loss"])
        measured: dict[str, float | None] = {"validation": None, "held_out": None}
        finite = math.isfinite(loss) and all(bool(p.isfinite().all()) for p in self.trainee.parameters())
        if finite and self._due(step):
            view = self.trainee.view
            measured = {name: processes.shared_loss(view, getattr(self, name)).mean for name in measured}
            finite = all(math.isfinite(value or 0) for value in measured.values())
        if not finite:
            self.failed_at, control.should_training_stop, control.should_save = step, True, False
            return
        if self.config.patience and measured["validation"] is not None:
            self.stopping.see(measured["validation"], step, self.trainee)
            if self.stopping.waited >= self.config.patience:
                control.should_training_stop = True
        self._write(step, loss, measured)

    def _write(self, step: int, loss: float, measured: dict[str, float | None]) -> None:
        line = {
            "step": step,
            "loss": round(loss, 6),
            **{name: None if value is None else round(value, 6) for name, value in measured.items()},
            "lambda": [round(value, 5) for value in self.trainee.lambdas()],
            **{_NORMS[name]: value for name, value in self.norms.items()},
        }
        if processes.index() == 0:
            with writing(self.path.parent), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.on_step(line)

    def _due(self, step: int) -> bool:
        every = self.config.evaluate_every
        return every > 0 and (step >= self.config.steps or step % every == 0)
