"""What transformers' Trainer trains: a frozen model with an adapter. Only what is trained is among the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from dexviz.dex import DexAdapter, DexOperator
from dexviz.models import View
from dexviz.train_config import TrainConfig


class Trainee(nn.Module):
    """DEX, its opposite, or changes of W_K, W_V and W_O, in training.

    The adapter is attached: it acts outside any request. `view` is the model with what has been trained so far.
    """

    def __init__(self, view: View, adapter: DexAdapter) -> None:
        super().__init__()
        self.view = view
        self.adapter = adapter

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Mean next-token loss on blocks of token ids [B, N]."""
        logits = self.view.model(input_ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss}

    def groups(self) -> Mapping[str, list[nn.Parameter]]:
        """Parameters by what they are: w_d, lambda, weights, lora. Empty groups are left out."""
        operators = cast("list[DexOperator]", list(self.adapter.operators.values()))
        deltas = list(self.adapter.deltas.parameters()) if self.adapter.deltas is not None else []
        found: dict[str, list[nn.Parameter]] = {
            "w_d": [op.w_d for op in operators],
            "lambda": [op.lambda_learn for op in operators],
            "weights": deltas,
        }
        return {name: parameters for name, parameters in found.items() if parameters}

    def lambdas(self) -> list[float]:
        """λ_l(t) of every layer, as it is subtracted."""
        return self.adapter.lambdas()

    def set_step(self, step: int) -> None:
        """Move the λ schedule to step t of T."""
        self.adapter.set_step(step)

    def finish(self) -> None:
        """Leave the adapter as it is used: frozen, in evaluation mode."""
        self.adapter.eval().requires_grad_(False)


def optimizer(trainee: Trainee, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW without weight decay, with a learning rate of its own for W_K, W_V and W_O."""
    rates = {"weights": config.weight_learning_rate}
    groups = [{"params": parameters, "lr": rates.get(name, config.rate)} for name, parameters in trainee.groups().items()]
    return torch.optim.AdamW(groups, lr=config.rate, weight_decay=0.0)


def gradient_norms(trainee: Trainee) -> dict[str, float]:
    """Euclidean norm of the gradient of each group of parameters."""
    return {
        name: math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
        for name, parameters in trainee.groups().items()
    }
