"""Adapters on disk and merging: round trips bit for bit, merged equals unmerged, wrong bases and damage refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dexviz.adapter import check_target, load_adapter, save_adapter
from dexviz.catalogue import ADAPTERS, DEFAULT_MODEL
from dexviz.dex import DexConfig
from dexviz.errors import AdapterError
from dexviz.heldout import Loss
from dexviz.merging import merge, merged_projections
from dexviz.modelcard import COMPARISON, model_card
from dexviz.models import LoadedModel, make_pair, wrap_model
from dexviz.train_config import TrainConfig
from dexviz.training import TrainResult
from tests import families, reference
from tests.adapters import random_adapter

MERGED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "olmo2", "gpt_oss", "deepseek_v3")


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> LoadedModel:
    return wrap_model(families.build(name, seed=seed).to(dtype), name=name)


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = tiny()
    folder = random_adapter(base, tmp_path / "adapter")
    first = load_adapter(str(folder), base)
    again = load_adapter(str(save_adapter(first, tmp_path / "again", base, dtype=torch.float32)), base)
    assert first.config == again.config
    assert first.lambdas() == again.lambdas()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_an_unfinished_schedule_comes_back_where_it_was(tmp_path: Path) -> None:
    base = tiny()
    adapter = load_adapter(str(random_adapter(base, tmp_path / "a")), base)
    object.__setattr__(adapter.config, "steps", 10)
    adapter.annealing.steps = 10
    adapter.set_step(4)
    again = load_adapter(str(save_adapter(adapter, tmp_path / "b", base, dtype=torch.float32)), base)
    assert again.lambdas() == adapter.lambdas()
    assert again.annealing.step == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MERGED)
def test_merged_logits_equal_the_unmerged_variants(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny(name, dtype)
    pair = make_pair(base, adapter=str(random_adapter(base, tmp_path / "adapter")))
    ids = families.prompt(21, batch=2)
    with torch.no_grad():
        with pair.base.active():
            before = base.model(ids).logits
        with pair.variant.active():
            unmerged = base.model(ids).logits
        out = merge(pair.variant, tmp_path / "merged")
        stock = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, attn_implementation="eager").eval()
        merged = stock(ids).logits
    scale = float(unmerged.abs().max())
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    assert float((merged - unmerged).abs().max()) <= tolerance * scale
    assert float((before - unmerged).abs().max()) > 1e-3 * scale, "the adapter changes something"
    assert "dexviz" not in (out / "config.json").read_text()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_merged_weight_is_the_formula(name: str, tmp_path: Path) -> None:
    base = tiny(name)
    pair = make_pair(base, adapter=str(random_adapter(base, tmp_path / "adapter")))
    adapter, layout = pair.variant.adapter, base.layout
    assert adapter is not None
    weights = list(merged_projections(pair.variant).values())
    for layer, weight in enumerate(weights):
        operator, stored = adapter.operator(layer), layout.projections[layer].weight.detach()
        assert operator is not None
        linear = isinstance(layout.projections[layer], torch.nn.Linear)
        rows, merged = (stored.T, weight.T) if linear else (stored, weight)
        heads_HEM = rows.double().reshape(layout.heads, layout.value_width, -1).numpy()
        selected = torch.zeros(layout.heads, dtype=torch.bool)
        selected[operator.heads] = True
        expected = reference.merged_output_projection(
            heads_HEM, operator.w_d.detach().double().numpy(), float(operator.lam()), selected.numpy()
        )
        torch.testing.assert_close(merged.double().reshape(expected.shape), torch.from_numpy(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(families.NO_MERGE))
def test_merging_is_refused_where_something_lies_in_between(name: str, tmp_path: Path) -> None:
    base = tiny(name)
    pair = make_pair(base, adapter=str(random_adapter(base, tmp_path / "adapter")))
    with pytest.raises(AdapterError, match="output projection directly follows attention"):
        merge(pair.variant, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_adapter_on_a_diff_model_is_refused(tmp_path: Path) -> None:
    folder = random_adapter(tiny(), tmp_path / "adapter")
    with pytest.raises(AdapterError, match="without differential attention"):
        make_pair(tiny("diffllama"), adapter=str(folder))


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = str(random_adapter(tiny(), tmp_path / "adapter"))
    with pytest.raises(AdapterError, match="heads of width"):
        load_adapter(folder, tiny("gpt2"), force=True)
    other = tiny(seed=5)
    with pytest.raises(AdapterError, match="fingerprint differs"):
        load_adapter(folder, other)
    with pytest.warns(UserWarning, match="fingerprint differs"):
        load_adapter(folder, other, force=True)


def test_the_fingerprint_does_not_depend_on_the_type_it_is_loaded_in() -> None:
    assert tiny().fingerprint == tiny(dtype=torch.bfloat16).fingerprint
    assert tiny().fingerprint != tiny(seed=5).fingerprint


@pytest.mark.parametrize("damage", ["truncated", "missing", "json", "version", "foreign"])
def test_damage_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    base = tiny()
    folder = random_adapter(base, tmp_path / "adapter")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-40])
    elif damage == "missing":
        weights.unlink()
    elif damage == "json":
        config.write_text("{")
    elif damage == "version":
        config.write_text(json.dumps({**json.loads(config.read_text()), "format_version": 99}))
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), "dex": {"surprise": 1}}))
    with pytest.raises(AdapterError) as caught:
        load_adapter(str(folder), base)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("Expected ")


@pytest.mark.parametrize("step", ["x", None, 1.5, -1, True])
def test_a_step_that_is_none_is_refused(step: object, tmp_path: Path) -> None:
    base = tiny()
    config = random_adapter(base, tmp_path / "adapter") / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "step": step}))
    with pytest.raises(AdapterError, match="`step` ≥ 0"):
        load_adapter(str(config.parent), base)


def test_the_old_adapter_comes_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny()
    folder = random_adapter(base, tmp_path / "adapter")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.startswith(".adapter."):
            raise OSError("no space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(AdapterError, match="no space left"):
        random_adapter(base, folder, seed=9)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_folder_without_a_name_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterError, match="new or empty folder"):
        check_target(Path(), replaces=None)


def test_a_folder_in_use_is_never_overwritten(tmp_path: Path) -> None:
    base = tiny()
    pair = make_pair(base, adapter=str(random_adapter(base, tmp_path / "adapter")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for write in (
        lambda: merge(pair.variant, tmp_path / "mine"),
        lambda: save_adapter(pair.variant.adapter, tmp_path / "mine", base),
    ):
        with pytest.raises(AdapterError, match="new or empty folder"):
            write()
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    random_adapter(base, tmp_path / "adapter", seed=9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "mine"], "nothing is left beside"


def without_comparison(card: str) -> str:
    """The card without the table of controls, which is measured and put in later."""
    before, _, after = card.partition("\n| setting | value |")
    return before.partition(COMPARISON)[0].partition("\n## ")[0].rstrip() + after


def test_the_card_says_what_was_measured_and_no_more() -> None:
    folder = ADAPTERS / DEFAULT_MODEL
    made = json.loads((folder / "adapter_config.json").read_text())
    told = made["training"]
    base, variant = (Loss(**told["held_out"][name]) for name in ("base", "variant"))
    bounds = told["held_out"].get("relative_change_95")
    steps, parameters = told.get("steps", told["config"]["steps"]), told.get("parameters", 0)
    result = TrainResult(folder, base, variant, tuple(made["lambda"]), steps, parameters, bounds and tuple(bounds))
    dex, settings = DexConfig.from_json(made["dex"]), TrainConfig(**told["config"])
    known = wrap_model(families.build("llama"), name=DEFAULT_MODEL)
    if {"parameters", "steps"} <= set(told):  # an adapter of an earlier version tells less
        assert without_comparison(model_card(result, dex, known, settings)) == without_comparison(
            (folder / "README.md").read_text()
        )
    other = wrap_model(families.build("llama").to(torch.bfloat16), name="mine")
    card = model_card(TrainResult(folder, base, Loss(1e4, 1, 1), (0.1,), 1, 10), dex, other, settings)
    assert "predicted tokens), bfloat16." in card
    assert "later than the base model" not in card
    assert "→ ∞." in card
