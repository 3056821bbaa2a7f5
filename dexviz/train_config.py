"""How a DEX adapter is trained: every setting, its default and its meaning. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dexviz.corpora import SOTU
from dexviz.errors import TrainingError


@dataclass(frozen=True)
class TrainConfig:
    """How a DEX adapter is trained."""

    data: str = SOTU
    """Corpus: "sotu", a text file or folder, a .jsonl file, or a data set id."""
    column: str = "text"
    """Where JSONL lines and data sets keep the text."""
    steps: int = 100
    """Optimiser steps."""
    anneal: int | None = None
    """Annealing length T of λ in steps; None for half of `steps`, so that the second half trains λ_learn alone."""
    block: int = 256
    """Tokens a training block."""
    batch: int = 4
    """Blocks a step."""
    learning_rate: float = 2e-2
    """Peak learning rate of W_D and λ; linear warm-up over a tenth of the steps, then cosine decay."""
    lambda_init: float | None = None
    """λ_init of every layer; None for the depth schedule."""
    heads_per_layer: int | None = None
    """Heads that are adapted in each layer; None for max(1, H // 2)."""
    calibration_blocks: int = 8
    """Training blocks over which attention entropy is measured to select heads."""
    evaluate_every: int = 25
    """Steps between measurements of the held-out loss; 0 for the last only."""
    save_every: int = 25
    """Steps between checkpoints, from which a killed run goes on."""
    seed: int = 0
    """Order of the text and first weights: 0 ≤ seed < 2³²."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "calibration_blocks", "save_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"`{name}` of at least 1", str(getattr(self, name)), "Change it.")
        if self.block < 2 or (self.anneal is not None and self.anneal < 1) or self.evaluate_every < 0:
            raise TrainingError(
                "block ≥ 2, anneal ≥ 1 and evaluate_every ≥ 0",
                f"block {self.block}, anneal {self.anneal}, evaluate_every {self.evaluate_every}",
                "Change them.",
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0 and math.isfinite(self.lambda_init or 0)):
            raise TrainingError(
                "a finite learning rate > 0 and a finite lambda_init",
                f"learning rate {self.learning_rate}, lambda_init {self.lambda_init}",
                "Change them.",
            )
        if not 0 <= self.seed < 2**32:
            raise TrainingError("0 ≤ seed < 2³²", str(self.seed), "Choose another seed.")
