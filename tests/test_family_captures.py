"""Captures of many families, base, DEX and DIFF, against the float64 reference; DEX against a hook on the stock model.

Maps and values come from the seam, whose maps tests/test_families.py compares with each family's own eager attention; the
values of DIFF come from the output of its value projection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dexviz.attention import AttentionCall
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import AdapterError, CaptureError
from dexviz.models import ModelPair, View, make_pair, wrap_model
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest, Tokens
from dexviz.snapshot import read_snapshot_bytes, snapshot_bytes
from tests import reference as ref
from tests.captures import arrays_of, assert_same
from tests.families import FAMILIES, NO_MERGE, WINDOW, build, prompt

TOKENS = 3 * WINDOW + 2
DIFF = "diffllama"
STANDARD = [name for name in FAMILIES if name != DIFF]
DIRECT = [name for name in STANDARD if name not in NO_MERGE]


def random_adapter(name: str) -> DexAdapter:
    """λ of both signs; half of the heads, which differ from layer to layer."""
    family = FAMILIES[name]
    chosen = tuple(tuple((layer + 2 * k) % family.heads for k in range(family.heads // 2)) for layer in range(family.layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        adapter = DexAdapter(DexConfig(heads=chosen, width=family.value_width, query_heads=family.heads))
    for layer, operator in enumerate(adapter.operators.values()):
        operator.lambda_learn.data.fill_((1.4, -0.6)[layer % 2])
    return adapter.requires_grad_(False)


@cache
def pair_of(name: str) -> ModelPair:
    return make_pair(wrap_model(build(name), name=name), adapter=None if name == DIFF else random_adapter(name))


def tokens_of(ids: torch.Tensor) -> Tokens:
    flat = ids[0].numpy()
    return Tokens(flat, tuple(map(str, flat)), "", np.zeros((len(flat), 2), np.int64), np.zeros(len(flat), bool))


@torch.no_grad()
def calls_of(view: View, ids: torch.Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with view.active(calls.append):
        view.model(ids, use_cache=False)
    return calls


def captured(view: View, score: str, **request: Any) -> Capture:
    family = FAMILIES[view.loaded.name]
    heads = family.heads // 2 if view.layout.differential and score != "attention" else family.heads
    settings = {"pool": 5, "similarity": ("cosine", "cka", "js"), "spans": {"needle": (2, 6)}, "threshold": 0.01, **request}
    maps = tuple((layer, head) for layer in range(family.layers) for head in range(heads))
    return capture(view, tokens_of(prompt(TOKENS)), CaptureRequest(maps=maps, score=score, **settings))


def assert_capture(cap: Capture, layer: int, s_SNN: np.ndarray, o_SNE: np.ndarray) -> None:
    """Every number of a layer against the reference on its score maps and outputs."""
    close = np.testing.assert_allclose
    edges = ref.tile_edges(TOKENS, 5)
    for head, s_NN in enumerate(s_SNN):
        close(cap.maps[(layer, head)].scores, s_NN, atol=2e-5, rtol=1e-4)
        mean, extreme = ref.tiled(s_NN, edges, edges)
        close(cap.pooled[layer, head], mean, atol=2e-5, rtol=1e-4)
        close(np.abs(cap.pooled_extreme[layer, head]), np.abs(extreme), atol=2e-5, rtol=1e-4)
    expected = ref.row_statistics(s_SNN, threshold=0.01, spans={"needle": (2, 6)})
    ref.assert_strongest(cap.strongest[layer], s_SNN, expected.pop("argmax"), 2e-5)
    for name, values in expected.items():
        close(cap.stats[name][layer], values, atol=1e-4, rtol=1e-4, err_msg=name)
    close(cap.similarity["cosine"][layer], ref.cosine_similarity(s_SNN), atol=1e-5)
    close(cap.similarity["js"][layer], ref.js_similarity(s_SNN), atol=1e-5)
    close(cap.similarity["cka"][layer], ref.cka(o_SNE), atol=1e-4)


@pytest.mark.parametrize("score", ["signed", "contribution"])
@pytest.mark.parametrize("name", STANDARD)
def test_variant_captures_equal_the_reference(name, score):
    view = pair_of(name).variant
    cap = captured(view, score)
    for call in calls_of(view, prompt(TOKENS)):
        a_HNN, v_GNE = call.probabilities()[0].detach().double().numpy(), call.inputs.v_BGME[0].double().numpy()
        w_d, lam = call.operator.w_d.double().numpy(), float(call.operator.lam())
        selected = np.isin(np.arange(len(a_HNN)), call.operator.heads)
        if score == "signed":
            s_HNN = ref.signed(a_HNN, ref.dex_gains(v_GNE, w_d, lam, selected)[0])
        else:
            s_HNN = ref.contribution(a_HNN, ref.dex_values(v_GNE, w_d, lam, selected))
        o_HNE = ref.outputs(a_HNN, v_GNE)
        adapted_HNE = ref.dex_outputs(o_HNE, w_d, lam, selected)
        assert_capture(cap, call.layer, s_HNN, adapted_HNE)
        np.testing.assert_allclose(cap.delta_norm[call.layer], ref.delta_norm(o_HNE, adapted_HNE), atol=1e-5, rtol=1e-4)
        np.testing.assert_array_equal(cap.selected[call.layer], selected)


@pytest.mark.parametrize("score", ["signed", "contribution"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_capture_hands_on_what_a_plain_forward_computes(name, score):
    """A capture computes attention outputs itself: the last token's logits are those of a plain pass."""
    for view in (pair_of(name).base, pair_of(name).variant):
        mine, plain = (
            last_logits(view, lambda view=view: captured(view, score)),
            last_logits(view, lambda view=view: plainly(view)),
        )
        torch.testing.assert_close(mine, plain, atol=3e-5, rtol=1e-4)


def plainly(view: View) -> None:
    with torch.inference_mode(), view.active():
        view.model(prompt(TOKENS), use_cache=False)


def last_logits(view: View, run: Callable[[], object]) -> torch.Tensor:
    """The last token's logits [1, V] of the model's one pass inside `run`."""
    seen: list[torch.Tensor] = []
    hook = view.model.register_forward_hook(lambda m, args, out: seen.append(out.logits[:, -1]))
    try:
        run()
    finally:
        hook.remove()
    (logits,) = seen
    return logits


@pytest.mark.parametrize("score", ["attention", "signed", "contribution"])
@pytest.mark.parametrize("name", STANDARD)
def test_at_strength_zero_base_and_variant_are_captured_bit_for_bit(name, score):
    adapter = random_adapter(name)
    for operator in adapter.operators.values():
        operator.lambda_learn.data.zero_()
    pair = make_pair(wrap_model(build(name), name=name), adapter=adapter)
    base, variant = captured(pair.base, score), captured(pair.variant, score)
    logits, expected = (last_logits(view, lambda view=view: captured(view, score)) for view in (pair.variant, pair.base))
    assert torch.equal(logits, expected)
    mine, other = arrays_of(variant), arrays_of(base)
    added = {path for path in mine if path.endswith((".gain", ".residue")) or path.startswith(".delta_")}
    assert set(mine) - set(other) <= added
    for path in set(other) - {".selected"}:
        assert mine[path].tobytes() == other[path].tobytes(), path


@pytest.mark.parametrize("score", ["attention", "signed", "contribution"])
def test_diff_captures_equal_the_reference(score):
    view, values = pair_of(DIFF).base, {}
    attentions = [layer.self_attn for layer in view.model.model.layers]
    hooks = [
        module.v_proj.register_forward_hook(lambda m, args, out, layer=layer: values.setdefault(layer, out[0]))
        for layer, module in enumerate(attentions)
    ]
    calls = calls_of(view, prompt(TOKENS))
    for hook in hooks:
        hook.remove()
    cap = captured(view, score)
    for layer, module in enumerate(attentions):
        a_HNN = calls[2 * layer].probabilities()[0].double().numpy()
        v_GND = values[layer].unflatten(-1, (FAMILIES[DIFF].kv_heads, -1)).transpose(0, 1).detach().double().numpy()
        vectors = [getattr(module, f"lambda_{part}").detach().double().numpy() for part in ("q1", "k1", "q2", "k2")]
        lam = ref.diff_lambda(*vectors, float(module.lambda_init))
        assert cap.lam[layer] == pytest.approx(lam, rel=1e-5)
        s_PNN, v_PNE = ref.diff_signed(a_HNN, lam), ref.diff_values(v_GND, FAMILIES[DIFF].heads)
        o_PNE = np.stack([s @ v for s, v in zip(s_PNN, v_PNE, strict=True)])
        if score == "signed":
            assert_capture(cap, layer, s_PNN, o_PNE)
            np.testing.assert_allclose(cap.stats["net"][layer], 1 - lam, atol=1e-5)
            np.testing.assert_allclose(cap.maps[(layer, 1)].terms, a_HNN[[1, 1 + len(a_HNN) // 2]], atol=1e-6)
        elif score == "contribution":
            assert_capture(cap, layer, ref.contribution(s_PNN, v_PNE), o_PNE)
        else:
            np.testing.assert_allclose([cap.maps[(layer, h)].scores for h in range(len(a_HNN))], a_HNN, atol=1e-6)


@pytest.mark.parametrize("name", DIRECT)
def test_dex_equals_a_hook_on_the_stock_output_projection_and_its_merge(name):
    """Independent of the seam: the stock model's W_O is fed with O', or replaced by the merged W_O."""
    family, pair, ids = FAMILIES[name], pair_of(name), prompt(TOKENS, batch=2)
    hooked, merged = build(name), build(name)
    names = {id(module): path for path, module in pair.base.model.named_modules()}
    for layer, target in pair.base.layout.projections.items():
        operator = pair.variant.adapter.operator(layer)
        w_d, lam = operator.w_d.double().numpy(), float(operator.lam())
        selected = np.isin(np.arange(family.heads), operator.heads)

        def feed(module, args, w_d=w_d, lam=lam, selected=selected):
            o_BNHE = args[0].unflatten(-1, (family.heads, -1)).double().numpy()
            changed = [ref.dex_outputs(o.swapaxes(0, 1), w_d, lam, selected).swapaxes(0, 1) for o in o_BNHE]
            return (torch.from_numpy(np.stack(changed)).float().flatten(2),)

        hooked.get_submodule(names[id(target)]).register_forward_pre_hook(feed)
        weight = merged.get_submodule(names[id(target)]).weight
        transposed = isinstance(target, torch.nn.Linear)
        w_o = (weight.T if transposed else weight).detach().double().numpy()
        new = ref.merged_output_projection(w_o.reshape(family.heads, family.value_width, -1), w_d, lam, selected)
        new = torch.from_numpy(new.reshape(w_o.shape)).float()
        weight.data.copy_(new.T if transposed else new)
    with torch.no_grad(), pair.variant.active():
        variant = pair.variant.model(ids, use_cache=False).logits
    with torch.no_grad():
        for stock in (hooked, merged):
            torch.testing.assert_close(variant, stock(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DIRECT)
def test_residual_gains_equal_the_reference(name):
    view = pair_of(name).variant
    cap = captured(view, "signed", space="residual")
    for call in calls_of(view, prompt(TOKENS)):
        target = view.layout.projections[call.layer]
        w_o = (target.weight.T if isinstance(target, torch.nn.Linear) else target.weight).detach().double().numpy()
        w_o_HEM = w_o.reshape(call.inputs.heads, FAMILIES[name].value_width, -1)
        selected = np.isin(np.arange(call.inputs.heads), call.operator.heads)
        v_GNE = call.inputs.v_BGME[0].double().numpy()
        rho, epsilon = ref.dex_gains(v_GNE, call.operator.w_d.double().numpy(), float(call.operator.lam()), selected, w_o_HEM)
        for head in np.flatnonzero(selected):
            mine = cap.maps[(call.layer, head)]
            np.testing.assert_allclose(mine.gain, rho[head], atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(mine.residue, epsilon[head], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NO_MERGE)
def test_residual_space_is_refused_where_something_lies_in_between(name):
    with pytest.raises(CaptureError, match=r"output projection directly follows.*value space"):
        captured(pair_of(name).variant, "signed", space="residual")


def test_dex_on_a_diff_model_is_refused():
    with pytest.raises(AdapterError, match="differential"):
        make_pair(wrap_model(build(DIFF)), adapter=random_adapter(DIFF))


@pytest.mark.parametrize("name", [DIFF, "gpt_oss", "deepseek_v3"])
def test_captures_of_all_kinds_survive_their_snapshot(name):
    cap = captured(pair_of(name).variant, "signed")
    assert_same(read_snapshot_bytes(snapshot_bytes(cap)), cap)
