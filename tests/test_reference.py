"""The reference against identities that hold whatever the numbers are; it must not be trusted blindly either."""

from __future__ import annotations

import numpy as np
import pytest

from tests import reference as ref

HEADS, KV_HEADS, TOKENS, WIDTH, HIDDEN = 6, 2, 13, 5, 11


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def qkv(random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(random.normal(size=(heads, TOKENS, WIDTH)) for heads in (HEADS, KV_HEADS, KV_HEADS))


@pytest.fixture
def maps(qkv) -> np.ndarray:
    return ref.attention(qkv[0], qkv[1], 0.7, ref.causal_mask(TOKENS))


@pytest.fixture
def operator(random) -> tuple[np.ndarray, float, np.ndarray]:
    return random.normal(size=(WIDTH, WIDTH)), 0.3, np.array([True, False, True, True, False, False])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 1.5)])
def test_rows_of_attention_sum_to_one_and_stay_below_the_diagonal(qkv, window, softcap):
    mask = ref.causal_mask(TOKENS, window)
    a = ref.attention(qkv[0], qkv[1], 0.7, mask, softcap)
    np.testing.assert_allclose(a.sum(axis=2), 1, atol=1e-12)
    assert (a[:, ~mask] == 0).all()
    assert (a[:, mask] > 0).all()


def test_a_sink_takes_its_share_of_every_row(qkv):
    sinks = np.linspace(-1, 2, HEADS)
    with_sink = ref.attention(qkv[0], qkv[1], 0.7, ref.causal_mask(TOKENS), sinks_H=sinks)
    z = 0.7 * qkv[0][0, 0] @ qkv[1][0, 0]
    assert with_sink[0, 0, 0] == pytest.approx(np.exp(z) / (np.exp(z) + np.exp(-1)))
    assert (with_sink.sum(axis=2) < 1).all()


def test_grouped_heads_read_the_key_head_of_their_group(qkv, maps):
    alone = ref.attention(qkv[0][3:4], qkv[1][1:2], 0.7, ref.causal_mask(TOKENS))
    np.testing.assert_allclose(maps[3], alone[0])


def test_contribution_rows_sum_to_one_in_base_and_in_dex(qkv, maps, operator):
    w_d, lam, selected = operator
    for v_HNE in (ref.per_query_head(qkv[2], HEADS), ref.dex_values(qkv[2], w_d, lam, selected)):
        np.testing.assert_allclose(ref.contribution(maps, v_HNE).sum(axis=2), 1, atol=1e-9)


def test_contribution_of_a_zero_output_is_zero(maps):
    assert (ref.contribution(maps, np.zeros((HEADS, TOKENS, WIDTH))) == 0).all()


def test_adapting_values_adapts_outputs(qkv, maps, operator):
    w_d, lam, selected = operator
    after = ref.dex_outputs(ref.outputs(maps, qkv[2]), w_d, lam, selected)
    through_values = np.stack([a @ v for a, v in zip(maps, ref.dex_values(qkv[2], w_d, lam, selected), strict=True)])
    np.testing.assert_allclose(after, through_values, atol=1e-12)


def test_zero_strength_changes_nothing(qkv, maps, operator):
    w_d, _, selected = operator
    o = ref.outputs(maps, qkv[2])
    rho, epsilon = ref.dex_gains(qkv[2], w_d, 0.0, selected)
    assert np.array_equal(ref.dex_outputs(o, w_d, 0.0, selected), o)
    assert np.array_equal(ref.signed(maps, rho), maps)
    assert (epsilon < 1e-12).all()


def test_gain_is_the_formula_and_the_best_scalar(qkv, operator):
    w_d, lam, selected = operator
    rho, epsilon = ref.dex_gains(qkv[2], w_d, lam, selected)
    v = qkv[2][0]
    np.testing.assert_allclose(rho[0], 1 - lam * np.einsum("jd,de,je->j", v, w_d, v) / (v * v).sum(axis=1))
    for off in (-0.01, 0.01):
        after = ref.adapted(v, w_d, lam)
        worse = np.linalg.norm(after - (rho[0] + off)[:, None] * v, axis=1) / np.linalg.norm(after, axis=1)
        assert (worse > epsilon[0]).all()
    assert (rho[1] == 1).all()
    assert (epsilon[1] == 0).all()


def test_identity_projection_makes_residual_space_value_space(qkv, operator):
    identity = np.stack([np.eye(WIDTH)] * HEADS)
    for plain, through in zip(ref.dex_gains(qkv[2], *operator), ref.dex_gains(qkv[2], *operator, identity), strict=True):
        np.testing.assert_allclose(through, plain, atol=1e-12)


def test_merged_projection_reproduces_the_adapted_outputs(random, qkv, maps, operator):
    w_o = random.normal(size=(HEADS, WIDTH, HIDDEN))
    o = ref.outputs(maps, qkv[2])
    merged = ref.merged_output_projection(w_o, *operator)
    np.testing.assert_allclose(ref.projected(o, merged), ref.projected(ref.dex_outputs(o, *operator), w_o), atol=1e-12)


def test_diff_rows_sum_to_one_minus_lambda_and_contributions_to_one(random):
    q, kv = random.normal(size=(8, TOKENS, WIDTH)), random.normal(size=(4, TOKENS, WIDTH))
    a = ref.attention(q, kv, 0.5, ref.causal_mask(TOKENS))
    s = ref.diff_signed(a, 0.4)
    np.testing.assert_allclose(s.sum(axis=2), 1 - 0.4, atol=1e-12)
    np.testing.assert_allclose(ref.contribution(s, ref.diff_values(kv, 8)).sum(axis=2), 1, atol=1e-9)


def test_lambda_schedule_starts_at_zero_and_ends_learned():
    assert ref.lambda_at(0, 10, 3, 0.25) == 0
    assert ref.lambda_at(10, 10, 3, 0.25) == ref.lambda_at(99, 10, 3, 0.25) == 0.25
    assert ref.lambda_init(0) == pytest.approx(0.2)


def test_statistics_of_rows_known_by_hand():
    s = np.array([[[1.0, 0, 0], [0.5, -0.5, 0], [0, 0, 0]]])
    stats = ref.row_statistics(s, sink=1, local=1, spans={"first": (0, 1)})
    np.testing.assert_allclose(stats["entropy"], [[0, np.log(2), np.nan]])
    np.testing.assert_allclose(stats["sink"], [[1, 0.5, np.nan]])
    np.testing.assert_allclose(stats["local"], [[1, 0.5, np.nan]])
    np.testing.assert_allclose(stats["span:first"], stats["sink"])
    np.testing.assert_allclose(stats["negative"], [[0, 0.5, np.nan]])
    np.testing.assert_allclose(stats["sparsity"], [[0, 0, 1]])
    np.testing.assert_allclose(stats["net"], [[1, 0, 0]])
    np.testing.assert_allclose(stats["max"], [[1, 0.5, 0]])


def test_tiles_average_causal_entries_only():
    s = np.array([[1.0, 9, 9], [2, -4, 9], [3, 5, 6]])
    mean, extreme = ref.tiled(s, ref.tile_edges(3, 2), ref.tile_edges(3, 2))
    np.testing.assert_allclose(mean, [[1, np.nan], [2.5, (-4 + 5 + 6) / 3]])
    np.testing.assert_allclose(extreme, [[1, np.nan], [3, 6]])


@pytest.mark.parametrize("similarity", [ref.cosine_similarity, ref.js_similarity])
def test_a_map_resembles_itself_fully_and_others_symmetrically(maps, similarity):
    matrix = similarity(maps)
    np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-12)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    assert (matrix <= 1 + 1e-12).all()


def test_disjoint_rows_have_no_js_similarity():
    s = np.zeros((2, 1, 2))
    s[0, 0, 0] = s[1, 0, 1] = 1
    assert ref.js_similarity(s)[0, 1] == pytest.approx(0)


def test_cka_ignores_rotation_scale_and_shift(random, qkv, maps):
    o = ref.outputs(maps, qkv[2])[0]
    rotation = np.linalg.qr(random.normal(size=(WIDTH, WIDTH)))[0]
    assert ref.cka(np.stack([o, 3 * o @ rotation + 1]))[0, 1] == pytest.approx(1)
    assert np.isnan(ref.cka(np.zeros((1, TOKENS, WIDTH)))).all()


def test_unchanged_outputs_have_no_delta(qkv, maps):
    o = ref.outputs(maps, qkv[2])
    assert (ref.delta_norm(o, o) == 0).all()
    np.testing.assert_allclose(ref.delta_cosine(o, -2 * o), -1)
