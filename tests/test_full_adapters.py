"""Full adapters and the controls against stock models merged by hand in float64; on disk, merged, and in the scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dexviz.adapter import load_adapter, round_as_saved, save_adapter
from dexviz.catalogue import ADAPTER_CONFIG
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import AdapterError
from dexviz.merging import merge
from dexviz.models import LoadedModel, ModelPair, make_pair
from dexviz.recorder import capture
from dexviz.records import CaptureRequest, Tokens
from tests import families, reference
from tests.delta_cases import adapter_for, loaded, merged_by_hand, outputs_first

DIRECT = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "olmo2", "starcoder2"),
    *("gpt_oss", "deepseek_v3", "cohere2", "mixtral", "gptj"),
)
"""Grouped queries, biases, tied embeddings, fused and transposed projections, norms on K, sinks, MLA, experts."""
KINDS = {
    "full": {},
    "plus": {"plus": True},
    "attention-only": {"dex": False},
    "lora": {"dex": False, "rank": 3},
    "low rank and DEX": {"rank": 2},
}


def logits(pair: ModelPair, view: str = "variant") -> torch.Tensor:
    with torch.no_grad(), getattr(pair, view).active():
        return pair.base.model(families.prompt(21, batch=2), use_cache=False).logits


def stock_logits(name: str, adapter: DexAdapter, base: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return merged_by_hand(name, adapter, base)(families.prompt(21, batch=2), use_cache=False).logits


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


def assert_equals_the_stock_model(name: str, base: LoadedModel, adapter: DexAdapter, tolerance: float) -> None:
    pair = make_pair(base, adapter=adapter)
    got, expected = logits(pair), stock_logits(name, adapter, base)
    assert relative(got, expected) <= tolerance
    assert relative(logits(pair, "base"), expected) > 10 * tolerance, "the adapter changes something"


@pytest.mark.parametrize("name", DIRECT)
def test_a_full_adapter_equals_the_stock_model_merged_by_hand(name: str) -> None:
    base = loaded(name, torch.float64)
    assert_equals_the_stock_model(name, base, adapter_for(base).double(), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_every_kind_equals_the_stock_model_merged_by_hand(name: str, kind: str) -> None:
    base = loaded(name, torch.float64)
    assert_equals_the_stock_model(name, base, adapter_for(base, **KINDS[kind]).double(), 2e-6)


@pytest.mark.parametrize("name", families.NO_MERGE)
def test_projections_are_changed_where_something_lies_before_the_output_projection(name: str, tmp_path: Path) -> None:
    base = loaded(name)
    adapter = adapter_for(base, dex=False)
    assert_equals_the_stock_model(name, base, adapter, 1e-4)
    pair = make_pair(base, adapter=adapter)
    merged = AutoModelForCausalLM.from_pretrained(merge(pair.variant, tmp_path / "merged"), attn_implementation="eager").eval()
    assert relative(merged(families.prompt(21, batch=2)).logits.detach(), logits(pair)) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "gpt_neox", "qwen2"])
def test_bfloat16_weights(name: str) -> None:
    base = loaded(name, torch.bfloat16)
    assert_equals_the_stock_model(name, base, adapter_for(base, strength=0.3), 6e-2)


def test_plus_is_minus_with_the_other_sign() -> None:
    base = loaded()
    minus, plus = adapter_for(base, lam=0.3), adapter_for(base, lam=-0.3, plus=True)
    assert minus.lambdas() == plus.lambdas() == pytest.approx([0.3, 0.3])
    assert torch.equal(logits(make_pair(base, adapter=minus)), logits(make_pair(base, adapter=plus)))
    assert (minus.method, plus.method) == ("dex", "dex-plus")
    annealed = DexAdapter(DexConfig(((0,),), width=4, query_heads=2, steps=10, plus=True))
    annealed.set_step(5)
    assert annealed.lambdas() == pytest.approx([-reference.lambda_at(5, 10, 0, 0.0)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "deepseek_v3"])
def test_saved_and_loaded_and_merged_it_is_the_same(name: str, kind: str, tmp_path: Path) -> None:
    base = loaded(name)
    adapter = adapter_for(base, **KINDS[kind])
    round_as_saved(adapter)
    pair = make_pair(base, adapter=adapter)
    before = logits(pair)
    folder = save_adapter(adapter, tmp_path / "adapter", base)
    again = make_pair(base, adapter=str(folder))
    assert torch.equal(logits(again), before)
    assert again.variant.adapter.method == adapter.method
    merged = AutoModelForCausalLM.from_pretrained(merge(again.variant, tmp_path / "merged"), attn_implementation="eager").eval()
    assert relative(merged(families.prompt(21, batch=2)).logits.detach(), before) <= 2e-5
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    dex = ["W_D", "lambda_learn"] if adapter.operators else []
    assert (config["mode"], config["trained"]) == ("full", [*dex, "W_K", "W_V", "W_O"])
    assert config["method"] == {"full": "dex", "plus": "dex-plus", "low rank and DEX": "dex"}.get(kind, kind)


def test_without_projections_nothing_new_is_on_disk(tmp_path: Path) -> None:
    base = loaded()
    folder = save_adapter(DexAdapter(DexConfig(((0,), (1,)), width=8, query_heads=6)), tmp_path / "adapter", base)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert (config["method"], config["mode"]) == ("dex", "adapter")
    assert not {"deltas"} & set(config)
    assert "plus" not in config["dex"]
    assert load_adapter(str(folder), base).deltas is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "prefix"}, "a method out of dex, dex-plus, attention-only, lora, got method 'prefix'"),
        ({"method": "dex-plus"}, "the method dex, which fits"),
        ({"deltas": []}, "a list of changed projections"),
        ({"deltas": [{"module": "lm_head"}]}, "none of its field"),
        ({"deltas": "missing"}, "undamaged weights"),
        ({"deltas": {"rows": [[0, 99]]}}, "ranges of the 16 output features"),
        ({"deltas": {"rows": [[0, 8], [4, 12]]}}, "ranges of the 16 output features"),
        ({"deltas": {"rows": [[0, 8]]}}, "undamaged weights"),
        ({"deltas": {"features": [10**12, 48], "rows": [[0, 10**12]]}}, "features in model"),
        ({"deltas": {"rank": 3}}, "undamaged weights"),
        ({"deltas": {"rank": "3"}}, "wrong type"),
        ({"deltas": {"layer": None}}, "wrong type"),
        ({"deltas": {"module": "model.layers.0.mlp"}}, "a plain Linear"),
        ({"deltas": {"module": "model.layers.7.self_attn.k_proj"}}, "a projection model"),
        ({"deltas": {"parts": ["w"]}}, "parts out of"),
        ({"deltas": {"surprise": 1}}, "surprise"),
    ],
    ids=str,
)
def test_damage_is_one_clear_error(change: dict, message: str, tmp_path: Path) -> None:
    base = loaded()
    path = save_adapter(adapter_for(base), tmp_path / "adapter", base) / ADAPTER_CONFIG
    config = json.loads(path.read_text())
    if isinstance(change.get("deltas"), dict):
        config["deltas"][0].update(change["deltas"])
    elif change.get("deltas") == "missing":
        del config["deltas"]
    else:
        config.update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=message) as caught:
        load_adapter(str(path.parent), base)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("Expected ")


def test_a_method_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    base = loaded()
    with pytest.raises(AdapterError, match="the method attention-only or lora"):
        save_adapter(adapter_for(base, dex=False), tmp_path / "adapter", base, method="dex")
    assert not list(tmp_path.iterdir())
    folder = save_adapter(adapter_for(base, dex=False), tmp_path / "adapter", base, method="lora")
    assert json.loads((folder / ADAPTER_CONFIG).read_text())["method"] == "lora"


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_residual_gains_are_those_of_the_changed_output_projection(name: str, plus: bool) -> None:
    base = loaded(name)
    adapter = adapter_for(base, plus=plus, strength=0.3)
    pair = make_pair(base, adapter=adapter)
    layer, layout = 1, base.layout
    heads = adapter.config.heads[layer]
    ids = families.prompt(17)
    kept = []
    request = CaptureRequest(maps=[(layer, head) for head in heads], space="residual")
    tokens = Tokens(ids[0].numpy(), ("",) * 17, "", np.zeros((17, 2), dtype=np.int64), np.zeros(17, dtype=bool))
    cap = capture(pair.variant, tokens, request, keep=kept.append)
    names = {id(module): path for path, module in base.model.named_modules()}
    path = names[id(layout.projections[layer])]
    operator = adapter.operator(layer)
    selected = np.isin(np.arange(layout.heads), heads)
    lam = -0.3 if plus else 0.3
    v_GNE = kept[layer].inputs.v_BGME[0].double().numpy()

    def gain(module: torch.nn.Module) -> np.ndarray:
        w_o_HEM = outputs_first(module).T.reshape(layout.heads, layout.value_width, -1)
        return reference.dex_gains(v_GNE, operator.w_d.double().numpy(), lam, selected, w_o_HEM)[0]

    changed = gain(merged_by_hand(name, adapter_without_dex(adapter), base).get_submodule(path))
    unchanged = gain(base.model.get_submodule(path))
    for head in heads:
        np.testing.assert_allclose(cap.maps[(layer, head)].gain, changed[head], atol=1e-4)
        assert np.abs(unchanged[head] - changed[head]).max() > 1e-2
    assert cap.provenance["adapter"]["method"] == ("dex-plus" if plus else "dex")


def adapter_without_dex(adapter: DexAdapter) -> DexAdapter:
    config = adapter.config
    return DexAdapter(DexConfig(((),) * len(config.heads), config.width, config.query_heads), adapter.deltas)


def test_attention_only_has_no_lambda_and_no_selected_head() -> None:
    base = loaded()
    pair = make_pair(base, adapter=adapter_for(base, dex=False))
    ids = families.prompt(17)[0].numpy()
    tokens = Tokens(ids, ("",) * 17, "", np.zeros((17, 2), dtype=np.int64), np.zeros(17, dtype=bool))
    cap, plain = (capture(view, tokens) for view in (pair.variant, pair.base))
    assert not cap.lam.any()
    assert not cap.selected.any()
    assert np.abs(cap.stats["entropy"] - plain.stats["entropy"]).max() > 1e-2
    assert cap.provenance["adapter"]["trained"] == ["W_K", "W_V", "W_O"]
