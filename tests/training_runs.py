"""Short training runs of tiny models in tests: a base with text on disk, settings, and runs that are killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dexviz.adapter import load_adapter
from dexviz.models import LoadedModel
from dexviz.train_config import TrainConfig
from dexviz.training import train
from tests.adapters import tiny_model

SMALL = {
    "steps": 4,
    "anneal": 4,
    "block": 16,
    "batch": 2,
    "calibration_blocks": 2,
    "validation_blocks": 2,
    "save_every": 2,
    "evaluate_every": 0,
    "learning_rate": 0.05,
}
METHODS: dict[str, dict[str, str]] = {
    "dex": {},
    "dex full": {"mode": "full"},
    "dex-plus": {"method": "dex-plus"},
    "dex-plus full": {"method": "dex-plus", "mode": "full"},
    "attention-only": {"method": "attention-only"},
    "lora": {"method": "lora"},
}
"""Every method in every mode."""


def base_and_text(root: Path) -> Path:
    """A tiny Llama at `root`/base, and a text of its words at `root`/text.txt."""
    tiny_model(root / "base", "llama")
    words = np.random.default_rng(0).integers(1, 30, 4000)
    (root / "text.txt").write_text(" ".join(f"w{i}" for i in words))
    return root


def config(root: Path, **changes: object) -> TrainConfig:
    return TrainConfig(**{**SMALL, "data": str(root / "text.txt"), **changes})


def options(root: Path, **changes: object) -> list[str]:
    """The same settings on the command line."""
    settings = {"model": root / "base", "data": root / "text.txt", **SMALL, **changes}
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def short_held_out(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The model, with a held-out text of four blocks."""
    monkeypatch.setattr("dexviz.heldout.held_out_text", lambda: " ".join(f"w{i % 30}" for i in range(1024)))
    return loaded


def killed_at(step: int, loaded: LoadedModel, out: Path, settings: TrainConfig) -> list[dict]:
    """The log's lines of a run that is killed at a step."""
    lines: list[dict] = []

    def die(line: dict) -> None:
        lines.append(line)
        if line["step"] == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(loaded, out, settings, on_step=die)
    return lines


def weights(folder: Path, loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return load_adapter(str(folder), loaded).state_dict()


def assert_same_adapter(one: Path, other: Path, loaded: LoadedModel) -> None:
    """Weights and logs are equal, bit for bit."""
    first, second = weights(one, loaded), weights(other, loaded)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert (one / "training_log.jsonl").read_text() == (other / "training_log.jsonl").read_text()
