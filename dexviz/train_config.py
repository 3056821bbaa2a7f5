"""How an adapter or one of its controls is trained: every setting, its default and its meaning. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from dexviz.corpora import SOTU
from dexviz.errors import TrainingError

METHODS = {
    "dex": "O − λ · O W_D",
    "dex-plus": "O + λ · O W_D, the same with the other sign",
    "attention-only": "W_K, W_V and W_O without DEX",
    "lora": "LoRA on W_O with as many parameters as DEX has",
}
"""What is trained, by name: DEX and its controls."""
MODES = ("adapter", "full")
PRECISIONS = ("float32", "bf16", "auto")
_RATES = {"dex": 2e-2, "dex-plus": 2e-2, "lora": 1e-2, "attention-only": 5e-4}


@dataclass(frozen=True)
class TrainConfig:
    """How an adapter is trained."""

    method: str = "dex"
    """What is trained: DEX or one of its controls (`METHODS`)."""
    mode: str | None = None
    """"adapter": what the method adds. "full": W_K, W_V and W_O too, the paper's setting. None: the method's own."""
    data: str = SOTU
    """Corpus: "sotu", some years of it as in "sotu:1990-2024", a text file or folder, a .jsonl file, or a data set id."""
    column: str = "text"
    """Where JSONL lines and data sets keep the text."""
    steps: int = 100
    """Optimiser steps."""
    anneal: int | None = None
    """Annealing length T of λ in steps; None for half of `steps`, so that the second half trains λ_learn alone."""
    block: int = 256
    """Tokens a training block."""
    batch: int = 4
    """Blocks that one process reads at a time."""
    accumulate: int = 1
    """Batches a step: their gradients are averaged."""
    learning_rate: float | None = None
    """Peak learning rate of W_D and λ (or of LoRA's factors); None for the method's own. Linear warm-up over a tenth of the
    steps, then cosine decay."""
    weight_learning_rate: float = 5e-4
    """The same of W_K, W_V and W_O."""
    precision: str = "float32"
    """Arithmetic of training: "float32", or "bf16" under autocast; "auto": bf16 where the device has it in hardware."""
    lambda_init: float | None = None
    """λ_init of every layer; None for the depth schedule."""
    heads: str | None = None
    """Plan of `select-heads`, a file; None to select heads by entropy."""
    heads_per_layer: int | None = None
    """Heads that are adapted in each layer; None for max(1, H // 2)."""
    calibration_blocks: int = 8
    """Training blocks over which attention entropy is measured to select heads."""
    validation_blocks: int = 8
    """Blocks of the corpus that are not trained on, and decide when to stop."""
    evaluate_every: int = 25
    """Steps between measurements of validation and held-out loss; 0 for none but that of the result."""
    patience: int = 0
    """Measurements without a lower validation loss after which training stops, and the best weights are kept; 0: never."""
    save_every: int = 25
    """Steps between checkpoints, from which a killed run goes on."""
    seed: int = 0
    """Order of the text and first weights: 0 ≤ seed < 2³²."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "calibration_blocks", "validation_blocks", "save_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"`{name}` of at least 1", str(getattr(self, name)), "Change it.")
        self._check_choices()
        if self.block < 2 or (self.anneal is not None and self.anneal < 1) or self.evaluate_every < 0:
            raise TrainingError(
                "block ≥ 2, anneal ≥ 1 and evaluate_every ≥ 0",
                f"block {self.block}, anneal {self.anneal}, evaluate_every {self.evaluate_every}",
                "Change them.",
            )
        if self.patience < 0 or (self.patience and not self.evaluate_every):
            raise TrainingError(
                "patience ≥ 0, and evaluate_every ≥ 1 with it",
                f"patience {self.patience}, evaluate_every {self.evaluate_every}",
                "Change them.",
            )
        rates = (self.rate, self.weight_learning_rate)
        if not (all(math.isfinite(rate) and rate > 0 for rate in rates) and math.isfinite(self.lambda_init or 0)):
            raise TrainingError(
                "a finite learning rate > 0 and a finite lambda_init",
                f"learning rate {rates[0]} and {rates[1]}, lambda_init {self.lambda_init}",
                "Change them.",
            )
        if not 0 <= self.seed < 2**32:
            raise TrainingError("0 ≤ seed < 2³²", str(self.seed), "Choose another seed.")

    def _check_choices(self) -> None:
        for name, known in (("method", tuple(METHODS)), ("mode", (None, *MODES)), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                offered = ", ".join(str(choice) for choice in known if choice)
                raise TrainingError(f"`{name}` out of {offered}", repr(getattr(self, name)), "Change it.")
        own = {"attention-only": "full", "lora": "adapter"}.get(self.method)
        if own and self.mode not in (None, own):
            raise TrainingError(f"mode {own!r} with method {self.method!r}", repr(self.mode), "Leave --mode out.")
        if self.heads is not None and (self.heads_per_layer is not None or not self.adapts_heads):
            other = "heads_per_layer" if self.adapts_heads else f"method {self.method}"
            raise TrainingError("a plan of heads, or other settings of them", f"heads and {other}", "Leave one of them out.")

    @property
    def rate(self) -> float:
        """Peak learning rate of what the method adds."""
        return self.learning_rate if self.learning_rate is not None else _RATES[self.method]

    @property
    def full(self) -> bool:
        """Whether W_K, W_V and W_O are trained."""
        return self.method == "attention-only" or self.mode == "full"

    @property
    def adapts_heads(self) -> bool:
        """Whether heads are selected and adapted by W_D and λ."""
        return self.method in ("dex", "dex-plus")

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of what is trained."""
        if self.method == "lora":
            return ("LoRA on W_O",)
        return (*(("W_D", "lambda_learn") if self.adapts_heads else ()), *(("W_K", "W_V", "W_O") if self.full else ()))

    @property
    def annealing_steps(self) -> int:
        """Annealing length T."""
        return self.anneal or max(1, self.steps // 2)


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "mode": "adapter",
        "data": "sotu:1990-2024",
        "steps": 100,
        "block": 256,
        "batch": 4,
        "precision": "auto",
        "evaluate_every": 50,
    },
    "paper": {
        "mode": "full",
        "steps": 2000,
        "anneal": 1000,
        "block": 2048,
        "batch": 8,
        "accumulate": 4,
        "weight_learning_rate": 1e-4,
        "precision": "auto",
        "calibration_blocks": 32,
        "validation_blocks": 32,
        "evaluate_every": 100,
        "save_every": 100,
    },
}
"""Settings by name. "quick": minutes on a laptop's CPU. "paper": what the paper trains (W_D, λ, W_K, W_V, W_O), on a GPU."""


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the settings in which two configurations, as dictionaries, differ."""
    return [field.name for field in fields(TrainConfig) if one.get(field.name) != other.get(field.name)]
