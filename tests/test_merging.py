"""Merging writes a loadable checkpoint whatever the base's generation settings and context are, or refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from dexviz.errors import AdapterError
from dexviz.merging import merge
from dexviz.models import ModelPair, make_pair, wrap_model
from tests.adapters import random_adapter
from tests.families import build


def random_pair(model: PreTrainedModel, folder: Path) -> ModelPair:
    loaded = wrap_model(model)
    return make_pair(loaded, adapter=str(random_adapter(loaded, folder)))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 0.9, "top_k": 7, "do_sample": False}, {"do_sample": False}),
        ({"temperature": 0.9, "length_penalty": 2.0, "do_sample": True}, {"temperature": 0.9, "do_sample": True}),
        ({"temperature": 0.9, "do_sample": True}, {"temperature": 0.9, "do_sample": True}),
    ],
    ids=["greedy", "single beam", "sampling"],
)
def test_merge_drops_generation_settings_that_cannot_be_saved(
    settings: dict[str, object], kept: dict[str, object], tmp_path: Path
) -> None:
    model = build("llama")
    model.generation_config.update(**settings)
    before = model.generation_config.to_dict()
    out = merge(random_pair(model, tmp_path / "dex").variant, tmp_path / "merged")
    saved = json.loads((out / "generation_config.json").read_text(encoding="utf-8"))
    assert {name: saved[name] for name in settings if name in saved} == kept
    assert model.generation_config.to_dict() == before


def test_merge_refuses_configurations_that_cannot_be_saved(tmp_path: Path) -> None:
    pair = random_pair(build("llama"), tmp_path / "dex")
    pair.base.model.generation_config.num_return_sequences = 3
    with pytest.raises(AdapterError, match=r"a configuration of llama that transformers can save, got .*num_return_sequences"):
        merge(pair.variant, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["dex"]


def test_merge_of_a_model_with_a_short_context(tmp_path: Path) -> None:
    assert merge(random_pair(build("gpt2", n_positions=8), tmp_path / "dex").variant, tmp_path / "merged").is_dir()
