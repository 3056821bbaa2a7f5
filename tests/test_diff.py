"""DIFF Transformers of all conventions: captures against dense float64, and S V against what the layers feed to W_O."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from dexviz import attention, diff
from dexviz.errors import CaptureError, ModelError
from dexviz.models import View, make_pair, wrap_model
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest, Tokens
from dexviz.selfcheck import check
from tests import reference as ref
from tests.diff_models import LateTokenwiseAttention, NeighbourAttention, TokenwiseAttention, build_diff
from tests.families import build, prompt

TOKENS = 23
MODELS = {
    "halves": lambda: build("diffllama"),
    "neighbours": lambda: build_diff(NeighbourAttention),
    "neighbours, all heads keys": lambda: build_diff(NeighbourAttention, key_heads=8),
    "neighbours, few keys": lambda: build_diff(NeighbourAttention, key_heads=2),
    "V2": lambda: build_diff(TokenwiseAttention),
    "V2, one key head": lambda: build_diff(TokenwiseAttention, key_heads=1),
    "V2, late": lambda: build_diff(LateTokenwiseAttention),
}
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def view_of(name: str) -> View:
    return make_pair(wrap_model(MODELS[name](), name=name)).base


def tokens_of(ids: torch.Tensor) -> Tokens:
    flat = ids[0].numpy()
    return Tokens(flat, tuple(map(str, flat)), "", np.zeros((len(flat), 2), np.int64), np.zeros(len(flat), bool))


def captured(view: View, score: str) -> Capture:
    heads = view.layout.heads if score == "attention" else view.layout.heads // 2
    maps = tuple((layer, head) for layer in range(view.layout.layers) for head in range(heads))
    request = CaptureRequest(maps=maps, pool=5, similarity=("cosine", "cka", "js"), score=score)
    return capture(view, tokens_of(prompt(TOKENS)), request)


@torch.no_grad()
def stock(name: str) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
    """Of a stock eager model, a layer: maps [H, N, N], and what its value, λ and output projections take in and put out."""
    model, seen = MODELS[name](), []
    for block in model.model.layers:
        notes: dict[str, np.ndarray] = {}
        seen.append(notes)
        hooked = {"v": ("v_proj", True), "fed": ("o_proj", False), "gate": ("lambda_proj", True)}
        for key, (path, out) in hooked.items():
            if hasattr(block.self_attn, path):
                block.self_attn.get_submodule(path).register_forward_hook(
                    lambda m, args, result, notes=notes, key=key, out=out: notes.__setitem__(
                        key, (result if out else args[0])[0].double().numpy()
                    )
                )
    maps = eager_maps(model)
    return maps, seen


def eager_maps(model: nn.Module) -> list[np.ndarray]:
    """Softmax maps [H, N, N] of each layer, float64, in a pass of the model's own eager attention."""
    maps: list[np.ndarray] = []

    def spy(module, query, key, value, mask, scaling, **kwargs):
        if len(maps) == module.layer_idx:
            q, k = query[0].double().numpy(), key[0].double().numpy()
            maps.append(ref.attention(q, k, scaling, ref.causal_mask(q.shape[1])))
        return eager(module, query, key, value, mask, scaling=scaling, **kwargs)

    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward as eager

    AttentionInterface.register("spy", spy)
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionMaskInterface.register("spy", eager_mask)
    model.set_attn_implementation("spy")
    model(prompt(TOKENS), use_cache=False)
    return maps


def expected(name: str, layer: int, a_HNN: np.ndarray, notes: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """S [P, N, N], values [P, N, E] and λ [P, N] from the formulas, each convention written out."""
    module = MODELS[name]().model.layers[layer].self_attn
    heads, tokens = len(a_HNN), a_HNN.shape[1]
    if name.startswith("V2"):
        lam_PN = (1 / (1 + np.exp(-notes["gate"]))).T
        v_GNE = notes["v"].reshape(tokens, -1, 8).swapaxes(0, 1)
        v_PNE = np.stack([v_GNE[2 * p * len(v_GNE) // heads] for p in range(heads // 2)])
        s = np.stack([a_HNN[2 * p] - lam_PN[p][:, None] * a_HNN[2 * p + 1] for p in range(heads // 2)])
        return s, v_PNE, lam_PN
    vectors = [getattr(module, f"lambda_{part}").detach().double().numpy() for part in ("q1", "k1", "q2", "k2")]
    lam = ref.diff_lambda(*vectors, float(module.lambda_init))
    lam_PN = np.full((heads // 2, tokens), lam)
    if name == "halves":
        v_GND = notes["v"].reshape(tokens, -1, 8).swapaxes(0, 1)
        return ref.diff_signed(a_HNN, lam), ref.diff_values(v_GND, heads), lam_PN
    v_GNE = notes["v"].reshape(tokens, -1, 16).swapaxes(0, 1)
    v_PNE = np.stack([v_GNE[p * len(v_GNE) // (heads // 2)] for p in range(heads // 2)])
    return np.stack([a_HNN[2 * p] - lam * a_HNN[2 * p + 1] for p in range(heads // 2)]), v_PNE, lam_PN


def normalised(name: str, layer: int, o_PNE: np.ndarray) -> np.ndarray:
    """(1 − λ_init) RMSNorm(o), with the norm's weights where it has some; V2: o. [N, P · E]."""
    if not name.startswith("V2"):
        module = MODELS[name]().model.layers[layer].self_attn
        norm = module.groupnorm if name == "halves" else module.subln
        weight = 1.0 if norm.weight is None else norm.weight.detach().double().numpy()
        o_PNE = o_PNE / np.sqrt((o_PNE**2).mean(axis=-1, keepdims=True) + norm.eps) * weight * (1 - module.lambda_init)
    return o_PNE.swapaxes(0, 1).reshape(o_PNE.shape[1], -1)


@every_model
def test_signed_scores_applied_to_the_values_are_what_the_layer_feeds_to_its_output_projection(name):
    """The maps of our capture, dense float64 from there on, against the stock model's own W_O input."""
    view = view_of(name)
    cap, (maps, seen) = captured(view, "signed"), stock(name)
    for layer, (a_HNN, notes) in enumerate(zip(maps, seen, strict=True)):
        s_PNN, v_PNE, _ = expected(name, layer, a_HNN, notes)
        mine_PNN = np.stack([cap.maps[(layer, p)].scores for p in range(len(s_PNN))]).astype(np.float64)
        np.testing.assert_allclose(normalised(name, layer, mine_PNN @ v_PNE), notes["fed"], atol=1e-5, rtol=1e-5)
    assert view.layout.checks["projected"] < 1e-5


@every_model
@pytest.mark.parametrize("score", ["attention", "signed", "contribution"])
def test_captures_equal_the_formulas(name, score):
    view = view_of(name)
    cap, (maps, seen) = captured(view, score), stock(name)
    for layer, (a_HNN, notes) in enumerate(zip(maps, seen, strict=True)):
        s_PNN, v_PNE, lam_PN = expected(name, layer, a_HNN, notes)
        shown = {"attention": a_HNN, "signed": s_PNN, "contribution": ref.contribution(s_PNN, v_PNE)}[score]
        mine = np.stack([cap.maps[(layer, head)].scores for head in range(len(shown))])
        np.testing.assert_allclose(mine, shown, atol=3e-5, rtol=1e-4)
        for statistic in ("entropy", "negative", "net", "max", "sink"):
            values = ref.row_statistics(shown)[statistic]
            np.testing.assert_allclose(cap.stats[statistic][layer], values, atol=2e-4, rtol=1e-4, err_msg=statistic)
        np.testing.assert_allclose(cap.similarity["cosine"][layer], ref.cosine_similarity(shown), atol=1e-4)
        assert cap.lam[layer] == pytest.approx(lam_PN.mean(), rel=1e-5)
        if score == "signed":
            np.testing.assert_allclose(cap.stats["net"][layer], 1 - lam_PN, atol=1e-5)
            plus, minus = view.layout.differential.pairs(len(a_HNN))
            for p in range(len(s_PNN)):
                np.testing.assert_allclose(cap.maps[(layer, p)].terms, a_HNN[[plus[p], minus[p]]], atol=1e-6)
            o_PNE = s_PNN @ v_PNE
            np.testing.assert_allclose(cap.similarity["cka"][layer], ref.cka(o_PNE), atol=1e-4)


@every_model
def test_the_pairing_is_stated(name):
    view = view_of(name)
    assert view.layout.differential.name == name.partition(",")[0]
    assert captured(view, "signed").provenance["pairing"] == ("p, p + H/2" if name == "halves" else "2p, 2p + 1")


def test_pairs_hold_every_softmax_head_once():
    assert diff.HALVES.pairs(6) == ((0, 1, 2), (3, 4, 5))
    assert diff.NEIGHBOURS.pairs(6) == diff.TOKENWISE.pairs(6) == ((0, 2, 4), (1, 3, 5))


def test_two_passes_at_once_see_their_own_lambda():
    """The hook on a λ projection reads the context: a recorded pass inside another one does not disturb it."""
    view, ids = view_of("V2"), prompt(TOKENS)
    alone = captured(view, "signed")
    inner = []

    def nested(done: int, total: int) -> None:
        inner.append(capture(view, tokens_of(prompt(9, seed=5))))

    both = capture(view, tokens_of(ids), alone.request, progress=nested)
    np.testing.assert_array_equal(both.stats["net"], alone.stats["net"])
    np.testing.assert_array_equal(both.lam, alone.lam)
    assert len(inner) == 2
    assert not np.allclose(inner[0].lam, alone.lam)


def test_hooks_are_set_once():
    model = build_diff(TokenwiseAttention)
    check(model)
    check(model)
    assert [len(block.self_attn.lambda_proj._forward_hooks) for block in model.model.layers] == [1, 1]


class Halved(NeighbourAttention):
    """Carries the names of the first paper, and subtracts other pairs than its one call suggests."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        o_BNHE = self.attend(hidden_states, position_embeddings, attention_mask, 2, None)
        plus, minus = o_BNHE.chunk(2, dim=2)
        return self.o_proj(((1 - self.lambda_init) * self.subln(plus - self.lam() * minus)).flatten(2)), None


class Unlike(TokenwiseAttention):
    """Gives the two heads of a pair different values."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.num_key_value_groups = 1
        self.k_proj = nn.Linear(config.hidden_size, self.heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.heads * self.width, bias=False)


class Mute(TokenwiseAttention):
    """Never calls its λ projection as a module."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        o_BNHE = self.attend(hidden_states, position_embeddings, attention_mask, 1, None)
        gate_BNP = hidden_states @ self.lambda_proj.weight.T
        return self.o_proj((o_BNHE[:, :, 0::2] - torch.sigmoid(gate_BNP)[..., None] * o_BNHE[:, :, 1::2]).flatten(2)), None


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Halved, r"differential attention as neighbours has it, 2p, 2p \+ 1, got a deviation of"),
        (Unlike, r"the same values for both heads of a pair \(2p, 2p \+ 1\), got others in layer 0"),
        (Mute, "a λ projection that runs with its layer, got none in layer 0"),
    ],
)
def test_modules_that_only_look_like_a_convention_are_refused(module, message):
    with pytest.raises(ModelError, match=message):
        check(build_diff(module))


def test_a_diff_model_without_lambda_is_refused():
    model = build("diffllama")
    for block in model.model.layers:
        block.self_attn.__class__ = type("Nameless", (type(block.self_attn),), {})
        del block.self_attn.lambda_k2
        block.self_attn.forward = lambda *args, module=block.self_attn, **kwargs: twice(module, *args, **kwargs)
    with pytest.raises(ModelError, match="Nameless without lambda_k2"):
        check(model)


def twice(module, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """Two attention calls on the same Q and K, without any λ."""
    q, k, v = (
        proj(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (module.q_proj, module.k_proj, module.v_proj)
    )
    attend = attention_of(module)
    first, second = (attend(module, q, k, value, attention_mask, dropout=0.0, scaling=1.0)[0] for value in (v, 2 * v))
    return module.o_proj((first + second).flatten(2)), None


def attention_of(module):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]


def test_an_odd_number_of_heads_is_refused():
    model = build("llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=24)
    for block in model.model.layers:
        block.self_attn.lambda_proj = nn.Linear(24, 1)
    with pytest.raises(ModelError, match="an even number of heads in a DIFF Transformer, which pairs them, got 3"):
        check(model)


@pytest.mark.parametrize("name", ["halves", "V2"])
def test_residual_space_is_refused(name):
    with pytest.raises(CaptureError, match="value space for a DIFF Transformer"):
        capture(view_of(name), tokens_of(prompt(5)), CaptureRequest(space="residual"))


@every_model
def test_a_capture_leaves_the_models_output_alone(name):
    view, ids = view_of(name), prompt(TOKENS)
    with torch.no_grad():
        expected_logits = MODELS[name]()(ids, use_cache=False).logits
        with attention.active(None):
            mine = view.model(ids, use_cache=False).logits
    torch.testing.assert_close(mine, expected_logits, atol=3e-5, rtol=1e-4)
    top = captured(view, "contribution").logits_top
    probabilities = expected_logits[0, -1].softmax(-1)
    np.testing.assert_allclose(top.prob, probabilities[top.ids].numpy(), atol=1e-5)
