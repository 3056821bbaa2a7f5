"""The adapter that ships: small, of this base, made as `make adapter` makes it, and better than the base on held-out text."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dexviz.catalogue import ADAPTERS, DEFAULT_MODEL
from dexviz.cli import build_parser
from dexviz.commands.adapters import train_config
from dexviz.dex import DexConfig
from dexviz.heldout import held_out_blocks, mean_loss
from dexviz.models import ModelPair, load_pair
from dexviz.train_config import TrainConfig
from dexviz.training import dex_config, training_blocks

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ADAPTERS / DEFAULT_MODEL
RECIPE = TrainConfig(data="sotu:1990-2024", steps=150, anneal=50, precision="bf16", evaluate_every=50)
"""What the options of `make adapter` come to."""


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


def test_it_was_made_as_make_adapter_makes_it(config: dict) -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nadapter:")[2].partition("\n\n")[0]
    options = re.search(r"-m dexviz train (.*)", recipe.replace("\\\n", " "))
    assert options is not None
    asked = build_parser().parse_args(["train", *options[1].replace("$(MODEL)", DEFAULT_MODEL).split()])
    assert train_config(asked) == RECIPE
    assert config["training"]["config"] == asdict(RECIPE)
    assert config["training"]["trained"] == ["W_D", "lambda_learn"]


def test_its_heads_are_selected_again_from_the_same_text(pair: ModelPair, config: dict) -> None:
    blocks = training_blocks(pair.base.loaded, RECIPE)
    assert dex_config(pair.base, blocks, RECIPE) == DexConfig.from_json(config["dex"])


def test_log_and_card_tell_the_same_story(config: dict) -> None:
    lines = [json.loads(line) for line in (FOLDER / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, RECIPE.steps + 1))
    measured = config["training"]["held_out"]
    assert lines[-1]["held_out"] == pytest.approx(measured["variant"]["mean"], abs=1e-4)
    card = (FOLDER / "README.md").read_text()
    assert f"| {measured['base']['mean']:.4f} | {measured['variant']['mean']:.4f} |" in card
    assert measured["relative_change"] < -0.05


def test_it_lowers_the_loss_of_held_out_text(pair: ModelPair) -> None:
    blocks = held_out_blocks(pair.base)[:8]
    base, variant = mean_loss(pair.base, blocks), mean_loss(pair.variant, blocks)
    assert variant.mean < 0.98 * base.mean


def test_the_held_out_text_is_not_in_the_corpus() -> None:
    from dexviz.corpora import documents, held_out_text

    opening = held_out_text()[:200]
    assert not any(opening in text for text in documents("sotu"))
