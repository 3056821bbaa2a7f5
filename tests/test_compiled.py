"""The compiled twins against the dense float64 reference, and against the eager twins on any shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from dexviz.kernels import rows as eager_rows, similarity, terms, tiles
from dexviz.kernels.compiled.rows import Gram, PreparedMap, Tiles, UnservedMap, prepared, row_sums, score_rows
from dexviz.kernels.softmax import AttentionInputs, MaskSpec
from dexviz.kernels.terms import ScoreBlock, ScoreMap, ScoreTerm
from tests import reference as ref
from tests.compiled_cases import ASKED, TOLERANCE, Poisoned, check, close, edges_of, empty_output, poison, single, streamed
from tests.score_cases import KINDS, LAMBDA, Case, layer

SIZES = (1, 2, 63, 100, 257, 1025)
SPECIAL = (
    {"window": 9},
    {"window": 1},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 20, "sinks": True},
    {"window": 20, "softcap": 3.0, "sinks": True},
)
PROPERTIES = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


# ---------------------------------------------------------------- cases

KINDS_OF_GROUPS = {1: "attention", 3: "gain", 4: "contribution"}
CASES = [
    *(Case(n, kv_heads=1 if n > 200 else 2, groups=g, kind=kind) for n in SIZES for g, kind in KINDS_OF_GROUPS.items()),
    Case(1025, kv_heads=1, groups=3, kind="gain", window=50),
    Case(1025, kv_heads=1, groups=2, kind="two terms"),
    *(replace(Case(63, groups=2, kind=kind), **special) for kind in KINDS for special in SPECIAL),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twins_equal_the_dense_reference(case):
    made = layer(case) if case.tokens < 1000 else layer.__wrapped__(case)
    check(single(made.score), made.a_HNN, made.s_SNN, made.o_HNE)


@pytest.mark.parametrize(
    ("kind", "special", "served"),
    [
        ("attention", {}, True),
        ("gain", {"window": 9, "sinks": True}, True),
        ("gain", {"softcap": 1.5}, False),
        ("row gain", {}, False),
        ("contribution", {}, False),
        ("two terms", {}, False),
    ],
)
def test_one_term_with_gains_is_prepared_and_the_rest_goes_the_general_way(kind, special, served):
    score = layer(replace(Case(63, groups=2, kind=kind), **special)).score
    assert isinstance(prepared(single(score)), PreparedMap) == served
    assert not isinstance(prepared(score), PreparedMap), "float64 is not for the loops"


@pytest.mark.parametrize("kind", ["contribution", "two contributions"])
def test_rows_get_their_weights_from_the_output_of_the_same_block(kind):
    case = layer(Case(70, kv_heads=1, groups=4, kind=kind, window=30))
    score = single(case.score)

    def along(o_HRE: Tensor, start: int, stop: int) -> Tensor:
        o_SRE = o_HRE if kind == "contribution" else o_HRE[:2] - LAMBDA * o_HRE[2:]
        return o_SRE / o_SRE.square().sum(dim=-1, keepdim=True)

    fused = ScoreMap(
        score.inputs,
        tuple(
            replace(t, u_SNK=lambda o, a, b, sign=sign: sign * along(o, a, b))
            for t, sign in zip(score.terms, (1.0, -LAMBDA), strict=False)
        ),
    )
    out_HNE = empty_output(score)
    found = np.zeros(case.s_SNN.shape)

    def take(block: ScoreBlock) -> None:
        found[:, block.start : block.stop, block.c0 : block.c1] = block.s_SRC

    streamed(prepared(fused), [(0, 33), (33, 34), (34, 70)], take, out_HNE)
    close(out_HNE, case.o_HNE)
    close(torch.from_numpy(found), case.s_SNN, 10 * TOLERANCE)


# ---------------------------------------------------------------- gains


def test_gains_of_every_sign_and_heads_without_one():
    """Heads with a gain of 1 throughout are known to be positive; negative and zero gains are not."""
    case = layer(Case(100, kv_heads=1, groups=4))
    gain_HN = np.ones((4, 100))
    gain_HN[1, ::3], gain_HN[1, 1::3] = -1.7, 0.0
    gain_HN[2] = 0.0
    gain_HN[3] = -0.25
    score = ScoreMap(case.score.inputs, (ScoreTerm((0, 1, 2, 3), w_SMK=torch.from_numpy(gain_HN)[..., None]),))
    ready = prepared(single(score))
    assert isinstance(ready, PreparedMap)
    assert ready.known_H.tolist() == [True, False, False, False]
    check(single(score), case.a_HNN, ref.signed(case.a_HNN, gain_HN), case.o_HNE)


# ---------------------------------------------------------------- masks and extreme logits


def spec_of(mask: Tensor) -> MaskSpec:
    return MaskSpec(*mask.shape[-2:], lambda r0, r1, c0, c1: mask[..., r0:r1, c0:c1])


@cache
def operands(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(8)
    return tuple(random.normal(size=(h, n, 6)).astype(np.float32) for h in (4, 2, 2))


def masked_check(mask: Tensor, seen_NN: np.ndarray, sinks: bool = False) -> None:
    """Four heads in two groups under a mask; rows that see nothing are zero."""
    q, k, v = operands(len(seen_NN))
    sinks_H = np.array([0.5, -1.0, 3.0, -20.0]) if sinks else None
    inputs = AttentionInputs(
        *(torch.from_numpy(x)[None] for x in (q, k, v)),
        0.5,
        spec_of(mask),
        sinks_H=None if sinks_H is None else torch.from_numpy(sinks_H).float(),
    )
    with np.errstate(invalid="ignore"):
        a_HNN = np.nan_to_num(ref.attention(q, k, 0.5, seen_NN, sinks_H=sinks_H))
    check(ScoreMap(inputs, (ScoreTerm((0, 1, 2, 3)),)), a_HNN, a_HNN, ref.outputs(a_HNN, v))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["left padding", "gaps", "nothing seen", "window"])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_every_kind(kind, additive, sinks):
    seen = ref.causal_mask(67, 12 if kind == "window" else None)
    if kind == "left padding":
        seen[:, :9] = False
    if kind == "gaps":
        seen &= np.random.default_rng(9).random(seen.shape) < 0.6
    if kind == "nothing seen":
        seen[[0, 5, 66]] = False
    shown = torch.from_numpy(seen)[None, None]
    mask = torch.zeros(shown.shape).masked_fill(~shown, -torch.inf) if additive else shown
    masked_check(mask, seen, sinks)


def test_a_mask_that_hides_all_leaves_zeros():
    seen = np.zeros((20, 20), dtype=bool)
    for sinks in (False, True):
        masked_check(torch.from_numpy(seen)[None, None], seen, sinks)


def test_heads_may_have_masks_of_their_own_and_biases_are_added():
    random = np.random.default_rng(10)
    seen = torch.from_numpy(np.stack([ref.causal_mask(30, w) for w in (3, 30, 7, 1)]))[None]
    bias = torch.from_numpy(random.normal(size=(1, 4, 30, 30))).float()
    q, k, v = (torch.from_numpy(x[:, :30])[None] for x in operands(67))
    score = ScoreMap(AttentionInputs(q, k, v, 0.5, spec_of(seen), bias_BHNM=bias), (ScoreTerm((0, 1, 2, 3)),))
    exact = replace(score.inputs, q_BHND=q.double(), k_BGMD=k.double(), v_BGME=v.double())
    expected, out_HNE = terms.score_rows(ScoreMap(exact, score.terms), 0, 30).s_SRC, empty_output(score)
    close(score_rows(prepared(score), 0, 30, out_HNE, Poisoned()).s_SRC, expected)
    close(out_HNE, expected @ v[0].double().repeat_interleave(2, dim=0))


def logits_of(z_N: Sequence[float]) -> ScoreMap:
    """One head whose logits are the same in every row and exact in float32; values are the keys' positions."""
    n = len(z_N)
    k = torch.tensor(z_N, dtype=torch.float32)[None, None, :, None]
    v = torch.arange(n, dtype=torch.float32)[None, None, :, None] / n
    return ScoreMap(AttentionInputs(torch.ones(1, 1, n, 1), k, v, 1.0, MaskSpec(n, n)), (ScoreTerm((0,)),))


@pytest.mark.parametrize(
    "z_N",
    [
        [80.0, -80.0] * 20,
        [-80.0] * 33,
        [0.0] * 20 + [80.0] + [0.0] * 20,
        [-80.0 + 4 * k for k in range(41)],
        [3e4, -3e4, 2.9e4, 0.0],
        [1e30, -1e30, 1e30],
        [0.0, -87.25, -87.5, -103.0, -104.0],
    ],
)
def test_extreme_logits(z_N):
    score, n = logits_of(z_N), len(z_N)
    with np.errstate(under="ignore"):
        a_HNN = ref.attention(np.ones((1, n, 1)), np.array(z_N, np.float32)[None, :, None], 1.0, ref.causal_mask(n))
    check(score, a_HNN, a_HNN, a_HNN @ score.inputs.v_BGME[0].double().numpy())


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["q_BHND", "k_BGMD"])
def test_operands_that_are_no_numbers_stay_visible(part, value):
    """A model that breaks down gives NaN, with a capture as without one."""
    score = single(layer(Case(40, groups=2)).score)
    broken = getattr(score.inputs, part).clone()
    broken[0, 1, 20] = value
    score = replace(score, inputs=replace(score.inputs, **{part: broken}))
    ready = prepared(score)
    assert isinstance(ready, UnservedMap)
    mine, other = empty_output(score), empty_output(score)
    found, expected = score_rows(ready, 0, 40, mine, Poisoned()), terms.score_rows(score, 0, 40, other)
    assert found.s_SRC.isnan().any()
    torch.testing.assert_close(found.s_SRC, expected.s_SRC, equal_nan=True)
    torch.testing.assert_close(mine, other, equal_nan=True)


# ---------------------------------------------------------------- any shape


@PROPERTIES
@given(
    case=st.builds(
        Case,
        tokens=st.integers(1, 60),
        kv_heads=st.integers(1, 3),
        groups=st.integers(1, 4),
        width=st.integers(1, 17),
        value_width=st.integers(2, 9),
        window=st.none() | st.integers(1, 62),
        softcap=st.none() | st.floats(0.5, 50),
        sinks=st.booleans(),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 2**16),
    ),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    cuts=st.tuples(*[st.lists(st.integers(0, 60), min_size=2, max_size=6)] * 2),
    gains=st.none() | st.sampled_from([-3.0, 0.0, 1.0]),
)
def test_twins_equal_eager_ones_on_any_shape(case, sizes, cuts, gains):
    score, n = single(layer.__wrapped__(case).score), case.tokens
    if gains is not None:
        w = torch.full((case.heads, n, 1), gains)
        w[:, ::2] = 1
        score = ScoreMap(score.inputs, (ScoreTerm(tuple(range(case.heads)), w_SMK=w),))
    edges = [torch.tensor(sorted({0, *(min(c, n) for c in cut), n})) for cut in cuts]
    mine, other = Tiles(score.heads, *edges, 0, torch.zeros(())), tiles.Tiles(score.heads, *edges, 0, torch.zeros(()))
    gram, eager_gram = Gram(score.heads, torch.device("cpu")), similarity.Gram(score.heads, torch.device("cpu"))
    out_HNE, expected_HNE, scratch, ready = empty_output(score), empty_output(score), Poisoned(), prepared(score)
    asked = {**ASKED, "offset": 0, "spans": {"some": (n // 2, n)}}
    for start, stop in edges_of(sizes, n):
        found = score_rows(ready, start, stop, out_HNE, scratch)
        expected = terms.score_rows(score, start, stop, expected_HNE)
        assert (found.c0, found.c1) == (expected.c0, expected.c1)
        close(found.s_SRC, expected.s_SRC, 2 * TOLERANCE)
        sums, eager_sums = row_sums(found, **asked).statistics(), eager_rows.row_sums(found, **asked).statistics()
        for name, values in eager_sums.items():
            close(sums[name], values, 4 * TOLERANCE, name)
        for consumer in (mine, other, gram, eager_gram):
            consumer.add(found)
    close(out_HNE, expected_HNE, 2 * TOLERANCE)
    close(mine.means(), other.means())
    close(mine.extremes().abs(), other.extremes().abs())
    close(gram.cosine(), eager_gram.cosine())
