"""Activation outliers against dense float64: logits from stock models, hidden states as transformers returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from dexviz import outliers
from dexviz.bootstrap import Bootstrap
from dexviz.claims_records import TOP, Extremes
from dexviz.errors import CaptureError
from dexviz.models import View, make_pair, wrap_model
from dexviz.outliers import HIDDEN, LOGITS, LOGITS_1, LOGITS_2, Distribution, blocks, joined, measure
from tests.adapters import random_adapter
from tests.diff_models import NeighbourAttention, TokenwiseAttention, build_diff
from tests.families import build, prompt

PROMPTS = prompt(40, 2).numpy()
FAMILIES = ("llama", "gemma2", "gpt2", "gpt_oss", "diffllama")


def check(found: Extremes, values: np.ndarray) -> None:
    """Against all values at once, float64."""
    sizes = np.sort(np.abs(values))[::-1]
    assert found.count == len(values)
    for rank in TOP:
        expected = None if rank > len(sizes) else pytest.approx(sizes[rank - 1], rel=1e-4)
        assert found.top[str(rank)] == expected, rank
    assert found.median == pytest.approx(np.sort(sizes)[(len(sizes) + 1) // 2 - 1], rel=0.005)
    centred = values - values.mean()
    assert found.kurtosis == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-4)


class Spy:
    """What the attention function of a stock model is called with, as visible logits by layer: [H, …]."""

    def __init__(self) -> None:
        self.logits: dict[int, list[np.ndarray]] = {}

    def __call__(self, module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **settings: Any) -> Any:
        q_HND, k_GND = query[0].double(), key[0].double()
        k_HND = k_GND.repeat_interleave(len(q_HND) // len(k_GND), dim=0)
        scale = settings.get("scaling") or q_HND.shape[-1] ** -0.5
        logits_HNN = scale * q_HND @ k_HND.transpose(-1, -2)
        if settings.get("softcap"):
            logits_HNN = settings["softcap"] * torch.tanh(logits_HNN / settings["softcap"])
        seen_NN = attention_mask[0, 0] > -1e4
        if module.layer_idx not in self.logits:
            self.logits[module.layer_idx] = [each[seen_NN].numpy() for each in logits_HNN]
        masked = logits_HNN.masked_fill(~seen_NN, -torch.inf)
        if settings.get("s_aux") is not None:
            sinks = settings["s_aux"].double()[:, None, None].expand(-1, masked.shape[1], 1)
            masked = torch.cat([masked, sinks], dim=-1)
        a_HNN = torch.softmax(masked, dim=-1)[..., : seen_NN.shape[1]].to(value.dtype)
        v_HNE = value[0].repeat_interleave(len(q_HND) // len(value[0]), dim=0)
        return (a_HNN @ v_HNE)[None].transpose(1, 2).contiguous(), None


def stock(model: PreTrainedModel, ids: np.ndarray) -> tuple[dict[int, list[np.ndarray]], list[np.ndarray]]:
    """Visible logits by layer and head, and what each block puts out, from a pass that dexviz has no part in."""
    spy, last = Spy(), []
    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", eager_mask)
    model.set_attn_implementation("spy")
    final = next(module for name, module in model.named_modules() if name in ("model.norm", "transformer.ln_f"))
    handle = final.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.no_grad():
        hidden = model(torch.from_numpy(ids)[None], use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    return spy.logits, [states.double().flatten().numpy() for states in (*hidden[1:-1], last[0])]


@pytest.fixture(scope="module", params=FAMILIES)
def measured(request: pytest.FixtureRequest) -> tuple[View, Any, list[Any]]:
    passes = [stock(build(request.param), ids) for ids in PROMPTS]
    view = make_pair(wrap_model(build(request.param))).base
    return view, measure(view, list(PROMPTS)), passes


def test_logits_are_those_of_the_stock_model(measured: tuple[View, Any, list[Any]]) -> None:
    view, found, passes = measured
    for layer in range(view.layout.layers):
        values = np.concatenate([np.concatenate(logits[layer]) for logits, _ in passes])
        check(found.layers[LOGITS][layer].extremes(), values)
    pairs = view.layout.differential.pairs(view.layout.heads) if view.layout.differential else ()
    for kind, heads in zip((LOGITS_1, LOGITS_2), pairs, strict=False):
        values = np.concatenate([logits[1][head] for logits, _ in passes for head in heads])
        check(found.layers[kind][1].extremes(), values)
    assert (LOGITS_1 in found.layers) == bool(pairs)


def test_hidden_states_are_what_blocks_put_out(measured: tuple[View, Any, list[Any]]) -> None:
    view, found, passes = measured
    for layer in range(view.layout.layers):
        check(found.layers[HIDDEN][layer].extremes(), np.concatenate([hidden[layer] for _, hidden in passes]))
    check(joined(found.layers[HIDDEN].values()).extremes(), np.concatenate([part for _, hidden in passes for part in hidden]))
    for which, (_, hidden) in enumerate(passes):
        values = np.concatenate(hidden)
        assert found.largest[HIDDEN][which] == pytest.approx(np.abs(values).max(), rel=1e-4)
        centred = values - values.mean()
        assert found.kurtosis[HIDDEN][which] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-4)


def test_small_blocks_of_logits_give_the_same_and_hold_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_pair(wrap_model(build("llama"))).base
    whole = measure(view, [PROMPTS[0]])
    held: list[int] = []
    real = outliers.logits_rows
    monkeypatch.setattr(outliers, "_ENTRIES", 6 * 40 * 3)
    monkeypatch.setattr(outliers, "logits_rows", lambda *args: held.append((block := real(*args))[0].numel()) or block)
    parts = measure(view, [PROMPTS[0]])
    assert max(held) <= 6 * 40 * 3
    for layer in range(2):
        one, other = (found.layers[LOGITS][layer].extremes() for found in (whole, parts))
        assert (one.count, one.median) == (other.count, other.median)
        assert other.kurtosis == pytest.approx(one.kurtosis, rel=1e-9)
        assert list(other.top.values()) == pytest.approx(list(one.top.values()), rel=1e-6)


@pytest.mark.parametrize("attention", [NeighbourAttention, TokenwiseAttention])
def test_both_maps_of_other_conventions(attention: type[Any]) -> None:
    view = make_pair(wrap_model(build_diff(attention))).base
    found = measure(view, [PROMPTS[0]]).layers
    logits, _ = stock(build_diff(attention), PROMPTS[0])
    for kind, first in ((LOGITS_1, 0), (LOGITS_2, 1)):
        check(found[kind][1].extremes(), np.concatenate(logits[1][first::2]))
    check(found[LOGITS][1].extremes(), np.concatenate(logits[1]))


def test_numbers_that_are_hard_to_sum() -> None:
    random = np.random.default_rng(0)
    for values in (random.normal(1e4, 1, 5000), random.standard_cauchy(5000), np.arange(7.0), np.array([0.0, 0.0, 3.0])):
        values = values.astype(np.float32).astype(np.float64)
        total = joined(Distribution.of(torch.from_numpy(part)) for part in np.array_split(values, 13))
        centred = values - values.mean()
        assert total.kurtosis() == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-6)
        assert total.mean == pytest.approx(values.mean(), rel=1e-9)
        assert total.median() == pytest.approx(np.sort(np.abs(values))[(len(values) + 1) // 2 - 1], rel=0.005)
        sizes = np.sort(np.abs(values))[::-1]
        assert total.largest.tolist() == sizes[: TOP[-1]].tolist()


def test_values_that_are_all_the_same_have_no_kurtosis() -> None:
    found = Distribution.of(torch.full((50,), 2.0)).extremes()
    assert (found.kurtosis, found.top["100"], found.top["10"]) == (None, None, 2.0)
    assert found.median == pytest.approx(2.0, rel=0.005)


def test_views_are_compared_on_the_same_prompts(tmp_path: Path) -> None:
    loaded = wrap_model(build("llama"))
    pair = make_pair(loaded, adapter=str(random_adapter(loaded, tmp_path, lam=0.8)))
    steps: list[tuple[str, int, int]] = []
    result = outliers.outliers(pair.base, pair.variant, list(PROMPTS), "test", progress=lambda *step: steps.append(step))
    ends = {view.name: measure(view, list(PROMPTS)) for view in (pair.base, pair.variant)}
    row: Mapping[str, Any] = {each.what: each for each in result.rows}
    assert list(row) == [LOGITS, HIDDEN]
    expected = Bootstrap().compare(ends["base"].largest[HIDDEN], ends["variant"].largest[HIDDEN], unit="prompt")
    assert row[HIDDEN].largest == expected
    assert abs(expected.change.mean) > 1e-3
    assert row[HIDDEN].variant_layers[1] == ends["variant"].layers[HIDDEN][1].extremes()
    assert (result.prompts, result.tokens, steps[-1]) == (2, 40, ("activations, variant", 2, 2))
    alone = outliers.outliers(pair.base, None, list(PROMPTS), "test").rows[1]
    assert (alone.variant, alone.variant_layers, alone.largest.variant) == (None, (), None)


def test_a_second_map_is_not_compared_with_a_model_that_has_none() -> None:
    base, variant = (make_pair(wrap_model(build(name))).base for name in ("llama", "diffllama"))
    rows = {each.what: each for each in outliers.outliers(base, variant, [PROMPTS[0]], "test").rows}
    assert rows[LOGITS_1].base is None
    assert rows[LOGITS_1].base_layers == ()
    assert rows[LOGITS_1].variant is not None
    assert rows[LOGITS_1].largest is None
    assert rows[LOGITS].largest is not None


def test_nothing_stays_on_the_model_and_other_passes_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_pair(wrap_model(build("llama"))).base
    expected = measure(view, [PROMPTS[0]]).layers[HIDDEN][0].count
    real, ids = outliers.Distribution.of, torch.from_numpy(PROMPTS[1])[None]

    def disturbed(values: torch.Tensor) -> Distribution:
        with view.active():
            view.model(ids, use_cache=False)
        return real(values)

    monkeypatch.setattr(outliers.Distribution, "of", disturbed)
    assert measure(view, [PROMPTS[0]]).layers[HIDDEN][0].count == expected
    assert not any(block._forward_hooks for block in blocks(view))


def test_models_whose_blocks_stand_in_no_list() -> None:
    view = make_pair(wrap_model(build("llama"))).base
    bare = nn.Module()
    bare.attention = next(iter(view.layout.modules.values()))
    with pytest.raises(CaptureError, match="Expected a model whose blocks stand in a list, got Module"):
        blocks(replace(view, loaded=replace(view.loaded, model=bare)))
