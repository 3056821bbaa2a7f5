"""Training an adapter: what is trained, what is logged, how a killed run goes on, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dexviz.adapter import load_adapter
from dexviz.dex import top_heads
from dexviz.errors import AdapterError, TrainingError
from dexviz.heldout import held_out_blocks, mean_loss
from dexviz.models import LoadedModel, View, load_model, make_pair
from dexviz.train_config import TrainConfig
from dexviz.trainer import LOG
from dexviz.training import mean_entropy, train
from tests import families
from tests.adapters import tiny_model

SMALL = {
    "steps": 8,
    "block": 16,
    "batch": 2,
    "calibration_blocks": 2,
    "save_every": 3,
    "evaluate_every": 0,
    "learning_rate": 0.05,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("training")
    tiny_model(root / "base", "llama")
    words = np.random.default_rng(0).integers(1, 30, 4000)
    (root / "text.txt").write_text(" ".join(f"w{i}" for i in words))
    return root


@pytest.fixture
def loaded(root: Path) -> LoadedModel:
    return load_model(str(root / "base"))


def config(root: Path, **changes: object) -> TrainConfig:
    return TrainConfig(**{**SMALL, "data": str(root / "text.txt"), **changes})


def test_a_run_writes_a_whole_adapter_that_loads(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    lines: list[dict] = []
    result = train(loaded, tmp_path / "out", config(root), on_step=lines.append)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    files = ["README.md", "adapter_config.json", "adapter_model.safetensors", LOG]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == files
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines == [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    assert all(line["grad_norm_w_d"] > 0 and line["grad_norm_lambda"] > 0 for line in lines)
    assert lines[-1]["held_out"] == pytest.approx(result.variant.mean, abs=1e-5)
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} of the base has changed"
    adapter = load_adapter(str(tmp_path / "out"), loaded)
    assert adapter.lambdas() == pytest.approx(list(result.lambdas), abs=1e-3)
    assert max(map(abs, result.lambdas)) > 0.01
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{result.base.mean:.4f}" in card
    assert f"{result.variant.mean:.4f}" in card


def test_training_lowers_the_loss_of_what_it_trains_on(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    lines: list[dict] = []
    train(loaded, tmp_path / "out", config(root, steps=40, batch=8), on_step=lines.append)
    losses = [line["loss"] for line in lines]
    assert np.mean(losses[-8:]) < np.mean(losses[:4]) - 0.02


def test_the_learned_lambda_stands_alone_after_annealing(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    lines: list[dict] = []
    train(loaded, tmp_path / "out", config(root, steps=6, anneal=3), on_step=lines.append)
    adapter = load_adapter(str(tmp_path / "out"), loaded)
    learned = [float(op.lambda_learn) for op in adapter.operators.values()]
    assert adapter.lambdas() == pytest.approx(learned)
    assert lines[-1]["lambda"] == pytest.approx(learned, abs=1e-3)


def test_a_killed_run_goes_on_to_the_same_weights(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    train(loaded, tmp_path / "whole", config(root))

    def die(line: dict) -> None:
        if line["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(loaded, tmp_path / "broken", config(root), on_step=die)
    assert not (tmp_path / "broken").exists()
    resumed: list[dict] = []
    train(loaded, tmp_path / "broken", config(root), on_step=resumed.append)
    assert [line["step"] for line in resumed] == [4, 5, 6, 7, 8]
    one, other = (load_adapter(str(tmp_path / name), loaded).state_dict() for name in ("whole", "broken"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    logs = [(tmp_path / name / LOG).read_text() for name in ("whole", "broken")]
    assert logs[0] == logs[1]


def test_a_loss_that_is_no_number_stops_the_run(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"NaN or infinity at step \d"):
        train(loaded, tmp_path / "out", config(root, learning_rate=1e30))
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "nowhere.txt"}, TrainingError, "nowhere.txt"),
        ({"block": 100_000}, TrainingError, "blocks of at most"),
        ({"heads_per_layer": 99}, AdapterError, "heads a layer"),
    ],
)
def test_bad_input_is_refused(root: Path, loaded: LoadedModel, tmp_path: Path, changes, error, message: str) -> None:
    with pytest.raises(error, match=message):
        train(loaded, tmp_path / "out", config(root, **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_before_training(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(AdapterError, match="new or empty folder"):
        train(loaded, tmp_path / "out", config(root), on_step=lambda _: pytest.fail("it trained"))


@pytest.mark.parametrize("changes", [{"steps": 0}, {"batch": 0}, {"block": 1}, {"learning_rate": 0}, {"anneal": 0}])
def test_impossible_settings_are_refused(changes: dict) -> None:
    with pytest.raises(TrainingError):
        TrainConfig(**changes)


def test_heads_are_those_of_highest_entropy(loaded: LoadedModel) -> None:
    blocks = families.prompt(20, batch=3).numpy()
    entropy = mean_entropy(View("base", loaded), blocks)
    model = families.build("llama")
    with torch.no_grad():
        maps = model(torch.from_numpy(blocks), output_attentions=True).attentions
    expected = torch.stack([-torch.special.xlogy(a, a).sum(-1).mean((0, 2)) for a in maps])
    np.testing.assert_allclose(entropy, expected, atol=1e-5)
    assert top_heads(torch.from_numpy(entropy), 2) == tuple(tuple(sorted(row.tolist())) for row in expected.topk(2).indices)


def test_held_out_loss_is_the_stock_models(loaded: LoadedModel, root: Path) -> None:
    view = make_pair(loaded).base
    blocks = held_out_blocks(view, 64)
    assert blocks.shape[1] == 64
    some = families.prompt(33, batch=5).numpy()
    stock = families.build("llama")
    ids = torch.from_numpy(some)
    with torch.no_grad():
        expected = float(stock(ids, labels=ids).loss)
    measured = mean_loss(view, some)
    assert measured.mean == pytest.approx(expected, rel=1e-5)
    assert (measured.tokens, measured.blocks) == (5 * 32, 5)
