"""The adapter that ships: small, of this base, made by the default settings, and better than the base on held-out text."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from safetensors import safe_open

from dexviz.catalogue import ADAPTERS, DEFAULT_MODEL
from dexviz.dex import DexConfig
from dexviz.heldout import held_out_blocks, mean_loss
from dexviz.models import ModelPair, load_pair
from dexviz.train_config import TrainConfig
from dexviz.training import dex_config, training_blocks

pytestmark = pytest.mark.model
FOLDER = ADAPTERS / DEFAULT_MODEL


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return load_pair(DEFAULT_MODEL, adapter="default")


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "adapter_config.json").read_text())


def test_weights_are_small_and_in_half_precision() -> None:
    weights = FOLDER / "adapter_model.safetensors"
    assert weights.stat().st_size < 500_000
    with safe_open(weights, framework="numpy") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {np.dtype(np.float16)}  # noqa: SIM118 - no mapping


def test_it_was_made_by_the_default_settings(config: dict) -> None:
    assert config["training"]["config"] == asdict(TrainConfig())
    assert config["training"]["trained"] == ["W_D", "lambda_learn"]


def test_its_heads_are_selected_again_from_the_same_text(pair: ModelPair, config: dict) -> None:
    blocks = training_blocks(pair.base.loaded, TrainConfig())
    assert dex_config(pair.base, blocks, TrainConfig()) == DexConfig.from_json(config["dex"])


def test_log_and_card_tell_the_same_story(config: dict) -> None:
    lines = [json.loads(line) for line in (FOLDER / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, TrainConfig().steps + 1))
    measured = config["training"]["held_out"]
    assert lines[-1]["held_out"] == pytest.approx(measured["variant"]["mean"], abs=1e-4)
    card = (FOLDER / "README.md").read_text()
    assert f"| {measured['base']['mean']:.4f} | {measured['variant']['mean']:.4f} |" in card
    assert measured["relative_change"] < -0.04


def test_it_lowers_the_loss_of_held_out_text(pair: ModelPair) -> None:
    blocks = held_out_blocks(pair.base)[:8]
    base, variant = mean_loss(pair.base, blocks), mean_loss(pair.variant, blocks)
    assert variant.mean < 0.98 * base.mean


def test_the_held_out_text_is_not_in_the_corpus() -> None:
    from dexviz.corpora import documents, held_out_text

    opening = held_out_text()[:200]
    assert not any(opening in text for text in documents("sotu"))
