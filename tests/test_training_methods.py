"""Every method and mode of training: what changes and what does not, what is saved, and how a killed run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dexviz import lora, training
from dexviz.adapter import load_adapter
from dexviz.attention import attach
from dexviz.checkpoints import LOG
from dexviz.errors import TrainingError
from dexviz.heldout import held_out_blocks, mean_loss
from dexviz.models import LoadedModel, View, load_model, make_pair
from dexviz.trainee import optimizer
from dexviz.training import train
from tests import families
from tests.training_runs import METHODS, assert_same_adapter, base_and_text, config, killed_at, short_held_out, weights

Patch = pytest.MonkeyPatch
GROUPS = {
    "dex": {"w_d", "lambda"},
    "dex full": {"w_d", "lambda", "weights"},
    "dex-plus": {"w_d", "lambda"},
    "dex-plus full": {"w_d", "lambda", "weights"},
    "attention-only": {"weights"},
    "lora": {"lora"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_and_text(tmp_path_factory.mktemp("methods"))


@pytest.fixture
def loaded(root: Path, monkeypatch: Patch) -> LoadedModel:
    return short_held_out(load_model(str(root / "base")), monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_its_own_parts_and_goes_on_after_a_kill(
    method: str, root: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    modules = dict(loaded.model.named_modules())
    lines: list[dict] = []
    result = train(loaded, tmp_path / "whole", config(root, **METHODS[method]), on_step=lines.append)
    norms = {name.removeprefix("grad_norm_") for name in lines[-1] if name.startswith("grad_norm_")}
    assert norms == GROUPS[method]
    assert all(line[f"grad_norm_{name}"] > 0 for line in lines[1:] for name in norms)
    after = loaded.model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), f"{name} of the base has changed"
        assert not loaded.model.get_parameter(name).requires_grad
        assert loaded.model.get_parameter(name).grad is None
    assert dict(loaded.model.named_modules()) == modules
    assert not hasattr(loaded.model, "peft_config")
    pair = make_pair(loaded, adapter=str(tmp_path / "whole"))
    assert mean_loss(pair.variant, held_out_blocks(pair.base)) == result.variant
    assert result.variant != result.base
    told = json.loads((tmp_path / "whole" / "adapter_config.json").read_text())
    assert (told["method"], told["training"]["parameters"]) == (method.split()[0], result.parameters)
    assert pair.variant.adapter is not None
    assert pair.variant.adapter.method == method.split()[0]

    killed_at(3, loaded, tmp_path / "broken", config(root, **METHODS[method]))
    resumed: list[dict] = []
    train(loaded, tmp_path / "broken", config(root, **METHODS[method]), on_step=resumed.append)
    assert [line["step"] for line in resumed] == [3, 4]
    assert_same_adapter(tmp_path / "whole", tmp_path / "broken", loaded)


def test_methods_differ_and_learn(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    changes = {"steps": 20, "batch": 8, "save_every": 30, "learning_rate": 0.1, "weight_learning_rate": 5e-3}
    losses = {}
    for method in ("dex", "dex-plus", "attention-only", "lora"):
        lines: list[dict] = []
        train(loaded, tmp_path / method, config(root, **{**changes, **METHODS[method]}), on_step=lines.append)
        losses[method] = [line["loss"] for line in lines]
    assert len({tuple(series) for series in losses.values()}) == len(losses)
    first = [series[0] for series in losses.values()]
    np.testing.assert_allclose(first, first[0], rtol=0.02)
    for method, series in losses.items():
        assert np.mean(series[-5:]) < np.mean(series[:3]) - 0.01, (method, series)


def test_dex_plus_starts_as_the_opposite_of_dex(root: Path, loaded: LoadedModel) -> None:
    base = View("base", loaded)
    blocks = training.training_blocks(loaded, config(root))
    change = []
    for method in ("dex", "dex-plus"):
        torch.manual_seed(0)
        adapter = training.new_adapter(base, blocks, config(root, method=method))
        adapter.set_step(1)
        operator = next(iter(adapter.operators.values()))
        o_BHNE = torch.ones(1, loaded.layout.heads, 3, loaded.layout.value_width)
        change.append((operator(o_BHNE) - o_BHNE).detach())
    torch.testing.assert_close(change[0], -change[1])
    assert float(change[0].abs().max()) > 1e-4


def test_the_weights_learning_rate_is_theirs_alone(root: Path, loaded: LoadedModel) -> None:
    settings = config(root, mode="full", learning_rate=0.3, weight_learning_rate=0.007)
    adapter = training.new_adapter(View("base", loaded), training.training_blocks(loaded, settings), settings)
    with training._trainee(loaded, adapter, settings) as trainee:
        groups = optimizer(trainee, settings).param_groups
        owned = {id(p): group["lr"] for group in groups for p in group["params"]}
        assert {owned[id(p)] for p in adapter.deltas.parameters()} == {0.007}
        assert {owned[id(p)] for op in adapter.operators.values() for p in op.parameters()} == {0.3}
        assert owned.keys() == {id(p) for p in trainee.parameters()}


def test_lora_costs_what_dex_costs(loaded: LoadedModel) -> None:
    parameters = lora.control(loaded).deltas.count()
    layout = loaded.layout
    dex = layout.layers * (layout.value_width**2 + 1)
    rank = max(sum(module.weight.shape) for module in layout.projections.values())
    assert abs(parameters - dex) <= rank


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_factors_are_pefts_model(family: str) -> None:
    from tests.delta_cases import loaded as wrapped

    base = wrapped(family)
    adapter, ids = lora.control(base), families.prompt(11, batch=2)
    stock = base.model(ids).logits
    with lora.injected(base) as layers, torch.no_grad():
        trainee = lora.LoraTrainee(View("variant", base), adapter, layers)
        for factor in trainee.factors:
            factor.normal_(std=0.3)
        expected = base.model(ids).logits
        trainee.finish()
    torch.testing.assert_close(base.model(ids).logits, stock, rtol=0, atol=0)
    with torch.no_grad(), make_pair(base, adapter=adapter).variant.active():
        got = base.model(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert float((got - stock).detach().abs().max()) > 0.01


def test_pefts_layers_go_when_training_fails(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    modules = dict(loaded.model.named_modules())
    killed_at(1, loaded, tmp_path / "out", config(root, method="lora"))
    assert dict(loaded.model.named_modules()) == modules
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not hasattr(loaded.model, "peft_config")


def test_lora_without_peft_is_one_clear_error(root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TrainingError, match=r"package peft, which trains LoRA, got none\. Install it"):
        train(loaded, tmp_path / "out", config(root, method="lora"))
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_from_before_does_not_act_while_lora_is_trained(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    (alone,) = killed_at(1, loaded, tmp_path / "alone", config(root, method="lora"))
    train(loaded, tmp_path / "dex", config(root, mode="full", weight_learning_rate=0.1))
    assert make_pair(loaded, adapter=str(tmp_path / "dex")).variant.adapter is not None
    (after,) = killed_at(1, loaded, tmp_path / "after", config(root, method="lora"))
    assert after == alone
    attach(loaded.model, None)


def test_factors_of_a_bfloat16_base_are_trained_in_float32(root: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    loaded = short_held_out(load_model(str(root / "base"), dtype="bfloat16"), monkeypatch)
    with lora.injected(loaded) as layers:
        trained = [p for layer in layers.values() for p in layer.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
    train(loaded, tmp_path / "out", config(root, method="lora"))
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out", loaded).values())


@pytest.mark.parametrize("damage", ["optimizer.pt", "adapter_state.pt"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    train(loaded, tmp_path / "whole", config(root, steps=6))
    killed_at(5, loaded, tmp_path / "out", config(root, steps=6))
    file = tmp_path / "out.partial" / "checkpoints" / "checkpoint-4" / damage
    content = bytearray(file.read_bytes())
    middle = slice(len(content) // 4, len(content) // 2)  # wider than the padding between the archive's parts
    content[middle] = bytes(byte ^ 0xFF for byte in content[middle])
    file.write_bytes(content[: len(content) - (damage == "optimizer.pt") * 40])
    resumed: list[dict] = []
    train(loaded, tmp_path / "out", config(root, steps=6), resume=True, on_step=resumed.append)
    assert [line["step"] for line in resumed] == [3, 4, 5, 6]
    assert_same_adapter(tmp_path / "whole", tmp_path / "out", loaded)


def test_resume_refuses_other_settings_and_names_them(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    killed_at(3, loaded, tmp_path / "out", config(root))
    with pytest.raises(TrainingError, match=r"stopped in .*, got another steps, learning_rate\. Resume with the same"):
        train(loaded, tmp_path / "out", config(root, steps=5, learning_rate=0.01), resume=True)
    assert len((tmp_path / "out.partial" / LOG).read_text().splitlines()) == 3, "the stopped run is still there"
    (tmp_path / "other.txt").write_text("w7 " + (root / "text.txt").read_text())
    with pytest.raises(TrainingError, match=r"got another data\."):
        train(loaded, tmp_path / "out", config(root, data=str(tmp_path / "other.txt")), resume=True)


def test_two_small_batches_are_one_large_one(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    runs = {}
    for name, batch, accumulate in (("one", 4, 1), ("two", 2, 2)):
        lines: list[dict] = []
        train(loaded, tmp_path / name, config(root, batch=batch, accumulate=accumulate, mode="full"), on_step=lines.append)
        runs[name] = [line["loss"] for line in lines]
    np.testing.assert_allclose(runs["one"], runs["two"], rtol=1e-5)
    one, two = (load_adapter(str(tmp_path / name), loaded).state_dict() for name in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=2e-3, rtol=2e-2)
