"""Training an adapter: what is trained, what is logged, how a killed run goes on, and where it stops."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dexviz import training
from dexviz.adapter import load_adapter
from dexviz.checkpoints import LOG
from dexviz.dex import top_heads
from dexviz.errors import AdapterError, TrainingError
from dexviz.head_scores import mean_entropy
from dexviz.heldout import held_out_blocks, mean_loss
from dexviz.models import LoadedModel, View, load_model, make_pair, wrap_model
from dexviz.train_config import TrainConfig
from dexviz.trainee import Trainee
from dexviz.training import train
from tests import families
from tests.training_runs import base_and_text, config as short_config, killed_at

Patch = pytest.MonkeyPatch
EIGHT = {"steps": 8, "anneal": None, "save_every": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_and_text(tmp_path_factory.mktemp("training"))


@pytest.fixture
def loaded(root: Path) -> LoadedModel:
    return load_model(str(root / "base"))


def config(root: Path, **changes: object) -> TrainConfig:
    return short_config(root, **{**EIGHT, **changes})


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
    assert {line["held_out"] for line in lines} == {None}, "only the result is measured"
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
    killed_at(5, loaded, tmp_path / "broken", config(root))
    assert not (tmp_path / "broken").exists()
    with (tmp_path / "broken.partial" / LOG).open("a") as file:
        file.write('{"step": 6, "lo')
    shutil.copytree(tmp_path / "broken.partial/checkpoints/checkpoint-3", tmp_path / "broken.partial/checkpoints/checkpoint-6")
    resumed: list[dict] = []
    train(loaded, tmp_path / "broken", config(root), on_step=resumed.append)
    assert [line["step"] for line in resumed] == [4, 5, 6, 7, 8]
    one, other = (load_adapter(str(tmp_path / name), loaded).state_dict() for name in ("whole", "broken"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    logs = [(tmp_path / name / LOG).read_text() for name in ("whole", "broken")]
    assert logs[0] == logs[1]


def test_an_unpublished_run_is_not_trained_again(root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(training, "round_as_saved", lambda _: pytest.fail("the power went"))
        with pytest.raises(pytest.fail.Exception, match="the power went"):
            train(loaded, tmp_path / "out", config(root))
    result = train(loaded, tmp_path / "out", config(root), on_step=lambda _: pytest.fail("it trained"))
    assert result.variant == train(loaded, tmp_path / "whole", config(root)).variant
    assert len((tmp_path / "out" / LOG).read_text().splitlines()) == EIGHT["steps"]


@pytest.mark.parametrize("change", ["base", "dtype", "text", "settings"])
def test_a_run_of_something_else_starts_anew(root: Path, loaded: LoadedModel, tmp_path: Path, change: str) -> None:
    shutil.copy(root / "text.txt", tmp_path / "text.txt")
    settings = config(root, data=str(tmp_path / "text.txt"))
    killed_at(5, loaded, tmp_path / "out", settings)
    if change == "base":
        loaded = wrap_model(families.build("llama", seed=5), loaded.tokenizer)
    elif change == "dtype":
        loaded = load_model(str(root / "base"), dtype="bfloat16")
    elif change == "text":
        (tmp_path / "text.txt").write_text("w7 " + (root / "text.txt").read_text())
    else:
        settings = config(root, data=str(tmp_path / "text.txt"), learning_rate=0.01)
    assert [line["step"] for line in killed_at(2, loaded, tmp_path / "out", settings)] == [1, 2]
    assert not list((tmp_path / "out.partial" / "checkpoints").glob("*"))


def test_a_loss_that_is_no_number_stops_the_run(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"NaN or infinity at step \d.* Choose a lower learning rate"):
        train(loaded, tmp_path / "out", config(root, learning_rate=1e30, save_every=1))
    assert not (tmp_path / "out").exists()
    kept = list((tmp_path / "out.partial").rglob("adapter_state.pt"))
    assert kept
    for path in kept:
        weights = torch.load(path, weights_only=True)["trainee"]
        assert weights
        assert all(tensor.isfinite().all() for tensor in weights.values()), path
    again = killed_at(1, loaded, tmp_path / "out", config(root, save_every=1))
    assert [line["step"] for line in again] == [1], "a lower learning rate starts anew"


def test_weights_that_are_nan_are_never_saved(root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch) -> None:
    forward = Trainee.forward

    def spoil(self: torch.nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = forward(self, input_ids)["loss"]
        loss.register_hook(lambda gradient: gradient * torch.inf)
        return {"loss": loss}

    monkeypatch.setattr(Trainee, "forward", spoil)
    with pytest.raises(TrainingError, match="at step 1"):
        train(loaded, tmp_path / "out", config(root, steps=1, save_every=1))
    assert not list((tmp_path / "out.partial").rglob("adapter_state.pt"))


def test_norms_are_those_of_the_whole_gradient(root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch) -> None:
    forward = Trainee.forward
    (one,) = killed_at(1, loaded, tmp_path / "one", config(root))
    monkeypatch.setattr(Trainee, "forward", lambda self, input_ids: {"loss": 1000 * forward(self, input_ids)["loss"]})
    (thousand,) = killed_at(1, loaded, tmp_path / "thousand", config(root))
    for name in ("grad_norm_w_d", "grad_norm_lambda"):
        assert thousand[name] == pytest.approx(1000 * one[name], rel=1e-4), name
    assert thousand["grad_norm_w_d"] > 1, "where Trainer would clip by default"


def test_the_result_is_measured_on_the_weights_on_disk(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    result = train(loaded, tmp_path / "out", config(root))
    pair = make_pair(loaded, adapter=str(tmp_path / "out"))
    assert mean_loss(pair.variant, held_out_blocks(pair.base)) == result.variant
    assert tuple(pair.variant.lambdas()) == result.lambdas


@pytest.mark.parametrize(("size", "reached"), [(300, 5), (2000, 6)], ids=["log", "checkpoint"])
def test_a_full_disk_is_one_clear_error(root: Path, loaded: LoadedModel, tmp_path: Path, size: int, reached: int) -> None:
    lines: list[dict] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(line: dict) -> None:
        lines.append(line)
        if line["step"] == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    try:
        with pytest.raises(TrainingError, match=r"room to write to .* goes on from the last whole checkpoint"):
            train(loaded, tmp_path / "out", config(root), on_step=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lines[-1]["step"] == reached
    assert killed_at(5, loaded, tmp_path / "out", config(root)) == lines[3:5]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "nowhere.txt"}, TrainingError, "nowhere.txt"),
        ({"block": 100_000}, TrainingError, "blocks of at most"),
        (
            {"block": 16, "calibration_blocks": 250},
            TrainingError,
            "more than 252 blocks of 16 tokens, which calibration and validation take",
        ),
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


def test_a_folder_of_the_users_beside_is_kept(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match=r"new or empty folder for checkpoints, got .*out\.partial"):
        train(loaded, tmp_path / "out", config(root, data="nowhere.txt"))
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "mine"


def test_only_what_a_run_wrote_is_removed(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    killed_at(4, loaded, tmp_path / "out", config(root))
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    train(loaded, tmp_path / "out", config(root, steps=2))
    assert [p.name for p in (tmp_path / "out.partial").iterdir()] == ["notes.txt"]


def test_an_unwritable_place_is_refused_at_once(root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(training, "dex_config", lambda *_: pytest.fail("it selected heads"))
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="writable folder for checkpoints"):
        train(loaded, tmp_path / "file" / "out", config(root))


IMPOSSIBLE = {
    **dict.fromkeys(("steps", "batch", "anneal", "save_every", "calibration_blocks"), (0,)),
    "block": (1,),
    "evaluate_every": (-1,),
    "seed": (-1, 2**32),
    "learning_rate": (0, float("nan"), float("inf")),
    "lambda_init": (float("nan"), float("-inf")),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(TrainingError, match=name.replace("learning_rate", "learning rate")):
        TrainConfig(**{name: value})


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


def test_held_out_blocks_fit_a_short_context(loaded: LoadedModel, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 48)
    assert held_out_blocks(View("base", loaded)).shape[1] == 48
