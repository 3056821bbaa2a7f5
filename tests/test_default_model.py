"""The default model, base and DEX, against a computation that shares nothing with dexviz (tests/stock_reference.py)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dexviz import attention
from dexviz.dex import DexAdapter, DexConfig
from dexviz.fetching import resolve_model
from dexviz.headmaps import head_map
from dexviz.models import ModelPair, View, load_model, make_pair
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest, Tokens
from dexviz.scores import LayerRecord
from dexviz.snapshot import read_snapshot_bytes, snapshot_bytes
from tests import reference as ref
from tests.captures import assert_same
from tests.stock_reference import Dex, StockLayer, run_stock

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"
TEXT = "The cat the dog saw the cat. Où est la bibliothèque? 猫が好き 🙂 def f(x): return x ** 2  # the cat the dog saw"
LAYERS, HEADS, WIDTH = 30, 9, 64
SPANS = {"needle": (4, 9)}
POOL = 8


@pytest.fixture(scope="module")
def adapter() -> DexAdapter:
    """A strong random adapter: λ of both signs and up to 2.4, so that some gains are negative; two layers have none."""
    generator = torch.Generator().manual_seed(5)
    chosen = tuple(() if layer in (3, 17) else tuple({layer % 9, (layer * 2 + 1) % 9, 4, 8}) for layer in range(LAYERS))
    made = DexAdapter(DexConfig(heads=chosen, width=WIDTH, query_heads=HEADS))
    for operator in made.operators.values():
        operator.w_d.data.normal_(0, 0.08, generator=generator)
        operator.w_d.data += 0.5 * torch.eye(WIDTH)
        operator.lambda_learn.data.fill_(0.15 * (operator.layer % 7) - 0.2 if operator.layer != 29 else 2.4)
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def pair(adapter: DexAdapter) -> ModelPair:
    return make_pair(load_model(MODEL, device="cpu", dtype="float32"), adapter=adapter)


@pytest.fixture(scope="module")
def tokens(pair: ModelPair) -> Tokens:
    return pair.tokenize(TEXT)


@pytest.fixture(scope="module")
def stock(tokens: Tokens, adapter: DexAdapter) -> dict[str, tuple[np.ndarray, list[StockLayer]]]:
    """View → logits and layers of the stock model."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), attn_implementation="eager", dtype=torch.float32).eval()
    ids = torch.from_numpy(tokens.ids)[None]
    operators = [adapter.operator(layer) for layer in range(LAYERS)]
    dex = Dex(
        [np.zeros((WIDTH, WIDTH)) if op is None else op.w_d.double().numpy() for op in operators],
        [0.0 if op is None else float(op.lambda_learn) for op in operators],
        [np.isin(np.arange(HEADS), heads) for heads in adapter.config.heads],
    )
    return {"base": run_stock(model, ids), "variant": run_stock(model, ids, dex)}


def view_of(pair: ModelPair, name: str) -> View:
    return pair.base if name == "base" else pair.variant


def everything(pair: ModelPair, tokens: Tokens, view: str, score: str, space: str = "value") -> Capture:
    request = CaptureRequest(
        maps=tuple(product(range(LAYERS), range(HEADS))),
        pool=POOL,
        similarity=("cosine", "cka", "js"),
        spans=SPANS,
        score=score,
        space=space,
        threshold=0.01,
    )
    return capture(view_of(pair, view), tokens, request)


def test_base_maps_equal_stock_eager_attentions(pair, tokens, stock):
    cap = everything(pair, tokens, "base", "attention")
    for (layer, head), mine in cap.maps.items():
        np.testing.assert_allclose(mine.scores, stock["base"][1][layer].eager_HNN[head], atol=1e-4, rtol=0)
        np.testing.assert_array_equal(mine.scores, mine.attention)


@pytest.mark.parametrize("view", ["base", "variant"])
def test_the_independent_computation_is_the_stock_model(stock, view):
    for layer in stock[view][1]:
        np.testing.assert_allclose(layer.a_HNN, layer.eager_HNN, atol=1e-4, rtol=0)


@pytest.mark.parametrize("view", ["base", "variant"])
def test_next_tokens_equal_the_stock_model(pair, tokens, stock, view):
    logits = stock[view][0]
    prob = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    top = capture(view_of(pair, view), tokens).logits_top
    assert top.ids.tolist() == np.argsort(-prob)[: len(top.ids)].tolist()
    np.testing.assert_allclose(top.prob, prob[top.ids], rtol=2e-3)


CASES = [
    ("base", "signed", "value"),
    ("base", "contribution", "value"),
    ("variant", "attention", "value"),
    ("variant", "signed", "value"),
    ("variant", "signed", "residual"),
    ("variant", "contribution", "value"),
]


@pytest.mark.parametrize(("view", "score", "space"), CASES)
def test_scores_statistics_and_similarity_equal_the_reference(pair, tokens, stock, view, score, space):
    cap = everything(pair, tokens, view, score, space)
    layers = stock[view][1]
    for index, layer in enumerate(layers):
        s_HNN = layer.scores(score, space)
        assert_maps(cap, layer, index, s_HNN)
        assert_statistics(cap, index, s_HNN)
        assert_tiles(cap, index, s_HNN)
        assert_similarity(cap, layer, index, s_HNN)
    if (view, score) == ("variant", "signed"):
        assert_gains(cap, layers, space)


def assert_maps(cap: Capture, layer: StockLayer, index: int, s_HNN: np.ndarray) -> None:
    for head in range(HEADS):
        mine = cap.maps[(index, head)]
        np.testing.assert_allclose(mine.attention, layer.a_HNN[head], atol=3e-5, rtol=0)
        np.testing.assert_allclose(mine.scores, s_HNN[head], atol=5e-5, rtol=1e-4)
    if cap.request.score == "contribution":
        np.testing.assert_allclose(cap.stats["net"][index], 1, atol=1e-5)


def assert_statistics(cap: Capture, index: int, s_HNN: np.ndarray) -> None:
    expected = ref.row_statistics(s_HNN, threshold=cap.request.threshold, spans=SPANS)
    ref.assert_strongest(cap.strongest[index], s_HNN, expected.pop("argmax"), 5e-5)
    assert cap.stats.keys() == expected.keys()
    for name, values in expected.items():
        if name == "sparsity":
            entries = np.abs(cap.stats[name][index] - values) * np.arange(1, values.shape[1] + 1)
            assert entries.max() < 1.01, "only an entry at the threshold itself may fall on the other side"
        else:
            np.testing.assert_allclose(cap.stats[name][index], values, atol=1e-4, rtol=1e-4, err_msg=name)


def assert_tiles(cap: Capture, index: int, s_HNN: np.ndarray) -> None:
    edges = ref.tile_edges(s_HNN.shape[1], POOL)
    for head in range(HEADS):
        mean, extreme = ref.tiled(s_HNN[head], edges, edges)
        np.testing.assert_allclose(cap.pooled[index, head], mean, atol=3e-5, rtol=1e-4)
        np.testing.assert_allclose(np.abs(cap.pooled_extreme[index, head]), np.abs(extreme), atol=5e-5, rtol=1e-4)


def assert_similarity(cap: Capture, layer: StockLayer, index: int, s_HNN: np.ndarray) -> None:
    """CKA centres outputs that hardly vary where a head looks at the first token only: rounding weighs more there."""
    np.testing.assert_allclose(cap.similarity["cosine"][index], ref.cosine_similarity(s_HNN), atol=1e-5)
    np.testing.assert_allclose(cap.similarity["cka"][index], ref.cka(layer.adapted_HNE), atol=1e-3)
    if index in (0, 14, 29):
        np.testing.assert_allclose(cap.similarity["js"][index], ref.js_similarity(s_HNN), atol=1e-5)


def assert_gains(cap: Capture, layers: list[StockLayer], space: str) -> None:
    negative = 0
    for index, layer in enumerate(layers):
        rho, epsilon = layer.gains(space)
        for head in range(HEADS):
            mine = cap.maps[(index, head)]
            assert (mine.gain is None) == (mine.residue is None) == (not layer.selected[head])
            if mine.gain is not None:
                np.testing.assert_allclose(mine.gain, rho[head], atol=2e-5, rtol=1e-5)
                np.testing.assert_allclose(mine.residue, epsilon[head], atol=2e-5, rtol=1e-5)
                negative += int((mine.gain < 0).sum())
        np.testing.assert_allclose(cap.delta_norm[index], ref.delta_norm(layer.o_HNE, layer.adapted_HNE), atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(cap.delta_cosine[index], ref.delta_cosine(layer.o_HNE, layer.adapted_HNE), atol=1e-5)
    assert negative > 0
    np.testing.assert_array_equal(cap.selected, [layer.selected for layer in layers])
    np.testing.assert_allclose(cap.lam, [layer.lam for layer in layers], rtol=1e-6)


def test_a_kept_layer_gives_the_same_maps_windows_and_tiles(pair, tokens):
    kept: dict[int, LayerRecord] = {}
    request = CaptureRequest(maps=((12, 8),))
    cap = capture(pair.variant, tokens, request, keep=lambda record: kept.setdefault(record.layer, record))
    whole, n = cap.maps[(12, 8)], len(tokens)
    again = head_map(kept[12], 8)
    np.testing.assert_allclose(again.scores, whole.scores, atol=1e-6)
    np.testing.assert_array_equal(again.gain, whole.gain)
    part = head_map(kept[12], 8, window=(n // 2, n, 3, n - 2))
    np.testing.assert_allclose(part.scores, whole.scores[n // 2 :, 3 : n - 2], atol=1e-6)
    tiles = head_map(kept[12], 8, window=(n // 2, n, 3, n - 2), pool=5)
    mean, extreme = ref.tiled(whole.scores.astype(np.float64), tiles.row_edges, tiles.col_edges)
    np.testing.assert_allclose(tiles.scores, mean, atol=1e-6)
    np.testing.assert_allclose(tiles.extreme, extreme, atol=1e-6)


def test_without_strength_both_views_are_the_same_bit_for_bit(pair, tokens, adapter):
    request = CaptureRequest(pool=POOL, similarity=True)
    strengths = [operator.lambda_learn.clone() for operator in adapter.operators.values()]
    try:
        for operator in adapter.operators.values():
            operator.lambda_learn.zero_()
        base, variant = (capture(view, tokens, request) for view in (pair.base, pair.variant))
    finally:
        for operator, strength in zip(adapter.operators.values(), strengths, strict=True):
            operator.lambda_learn.copy_(strength)
    for name, values in base.stats.items():
        assert values.tobytes() == variant.stats[name].tobytes(), name
    assert base.pooled.tobytes() == variant.pooled.tobytes()
    assert base.similarity["cka"].tobytes() == variant.similarity["cka"].tobytes()
    assert base.logits_top.prob.tobytes() == variant.logits_top.prob.tobytes()


def test_generation_runs_in_the_variant_and_in_the_base_where_asked(pair, tokens):
    """Outside a request the variant is on."""
    ids = torch.from_numpy(tokens.ids)[None]
    with torch.no_grad():
        outside = pair.base.model(ids).logits
        with attention.active(pair.variant.adapter):
            variant = pair.base.model(ids).logits
        with attention.active(None):
            base = pair.base.model(ids).logits
    assert torch.equal(outside, variant)
    assert not torch.allclose(outside, base, atol=1e-2)


def test_a_real_capture_survives_its_snapshot(pair, tokens):
    cap = capture(pair.variant, tokens, CaptureRequest(maps=((0, 0), (12, 8)), pool=POOL, similarity=True, spans=SPANS))
    assert_same(read_snapshot_bytes(snapshot_bytes(cap)), cap)
