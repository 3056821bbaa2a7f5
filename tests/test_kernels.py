"""Every operator of `dexviz.kernels` against the dense float64 reference, in row blocks that do not divide the prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dexviz.dex import gains
from dexviz.kernels.dex import dex_output
from dexviz.kernels.output import attention_output
from dexviz.kernels.rows import RowSums, row_sums
from dexviz.kernels.similarity import Gram, JensenShannon, linear_cka
from dexviz.kernels.softmax import MaskSpec, row_blocks, softmax_rows
from dexviz.kernels.terms import ScoreBlock, ScoreMap, head_rows, score_rows
from dexviz.kernels.tiles import Tiles, causal_counts, tile_edges
from tests import reference as ref
from tests.score_cases import KINDS, Case, layer

EXACT = {False: 1e-10, True: 1e-6}
"""Tolerances; a share of counts (sparsity) is a float32 in any case."""


# ---------------------------------------------------------------- one check an operator


def check_softmax(case: Case) -> None:
    a_HNN, inputs = np.zeros_like(layer(case).a_HNN), layer(case).score.inputs
    for start, stop in row_blocks(case.tokens, case.block):
        block = softmax_rows(inputs, start, stop)
        a_HNN[:, start:stop, block.c0 : block.c1] = block.a_BHRC[0]
        one = softmax_rows(inputs, start, stop, head=case.heads - 1)
        close(one.a_BHRC[0, 0], block.a_BHRC[0, -1])
    close(a_HNN, layer(case).a_HNN)


def check_output(case: Case) -> None:
    close(attention_output(layer(case).score.inputs)[0], layer(case).o_HNE)


def check_scores(case: Case) -> None:
    expected = layer(case).s_SNN
    s_SNN = np.zeros_like(expected)
    for block in layer(case).blocks(case.block):
        s_SNN[:, block.start : block.stop, block.c0 : block.c1] = block.s_SRC
        one = head_rows(layer(case).score, len(expected) - 1, block.start, block.stop)
        close(one.s_SRC[0], block.s_SRC[-1])
    close(s_SNN, expected)
    if "contribution" in case.kind and case.sinks is False:
        close(s_SNN.sum(axis=2), np.ones(s_SNN.shape[:2]), tolerance=1e-7)


def check_statistics(case: Case) -> None:
    asked = {"sink": 2, "local": 5, "threshold": 0.01}
    spans = {"all": (0, case.tokens), "needle": (case.tokens // 3, case.tokens // 3 + 1)}
    stats = RowSums.joined([row_sums(b, offset=0, spans=spans, **asked) for b in layer(case).blocks(case.block)]).statistics()
    expected = ref.row_statistics(layer(case).s_SNN, spans=spans, **asked)
    assert stats.keys() == expected.keys()
    for name, values in expected.items():
        close(stats[name], values, EXACT[name == "sparsity"], name)


def check_tiles(case: Case) -> None:
    n = case.tokens
    for row_edges, col_edges in (
        (tile_edges(0, n, min(7, n)), tile_edges(0, n, min(5, n))),
        (tile_edges(n // 3, n, 1), tile_edges(0, n - n // 4, 1)),
        (tile_edges(0, n, min(16, n)), tile_edges(0, n, min(16, n))),
    ):
        tiles = Tiles(len(layer(case).s_SNN), row_edges, col_edges, 0, torch.zeros((), dtype=torch.float64))
        for block in layer(case).blocks(case.block):
            tiles.add(block)
        dense = [ref.tiled(s, row_edges.numpy(), col_edges.numpy()) for s in layer(case).s_SNN]
        close(tiles.means(), np.stack([mean for mean, _ in dense]))
        close(tiles.extremes(), np.stack([extreme for _, extreme in dense]))


def check_similarity(case: Case) -> None:
    heads = len(layer(case).s_SNN)
    gram, divergence = Gram(heads, torch.device("cpu")), JensenShannon(heads, torch.device("cpu"))
    for block in layer(case).blocks(case.block):
        gram.add(block)
        divergence.add(block)
    close(gram.cosine(), ref.cosine_similarity(layer(case).s_SNN), tolerance=1e-9)
    close(divergence.similarity(), ref.js_similarity(layer(case).s_SNN), tolerance=1e-9)
    o_HNE = layer(case).o_HNE
    close(linear_cka(torch.from_numpy(o_HNE)), ref.cka(o_HNE), tolerance=1e-9)


CHECKS = (check_softmax, check_output, check_scores, check_statistics, check_tiles, check_similarity)


def close(mine: Tensor | np.ndarray, expected: Tensor | np.ndarray, tolerance: float = 1e-10, name: str = "") -> None:
    np.testing.assert_allclose(np.asarray(mine), np.asarray(expected), rtol=tolerance, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------- cases

SIZES = [
    Case(n, groups=groups, kind=kind)
    for n in (1, 2, 63, 100)
    for groups, kind in ((1, "attention"), (3, "gain"), (4, "contribution"))
]
LARGE = [Case(257, groups=groups, kind=kind) for groups, kind in ((1, "gain"), (3, "two contributions"))]
SPECIAL = ({"window": 9}, {"softcap": 1.5}, {"sinks": True}, {"window": 1}, {"window": 20, "softcap": 3.0, "sinks": True})
MODELS = [replace(Case(63, groups=2, kind=kind), **special) for kind in KINDS for special in SPECIAL]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", SIZES + LARGE + MODELS, ids=str)
def test_operator_equals_dense_reference(case, check):
    check(case)


@settings(max_examples=30, deadline=None)
@given(
    case=st.builds(
        Case,
        tokens=st.integers(1, 24),
        kv_heads=st.integers(1, 3),
        groups=st.integers(1, 4),
        width=st.integers(1, 6),
        value_width=st.integers(2, 6),
        window=st.none() | st.integers(1, 26),
        softcap=st.none() | st.floats(0.5, 50),
        sinks=st.booleans(),
        kind=st.sampled_from(KINDS),
        block=st.integers(1, 30),
        seed=st.integers(0, 2**16),
    )
)
def test_operators_equal_dense_reference_on_any_shape(case):
    for check in CHECKS:
        check(case)


@pytest.mark.parametrize("queries", [1, 5, 19])
def test_fewer_queries_than_keys_sit_at_the_end(queries):
    case = Case(20, groups=3, kind="gain")
    offset, whole = case.tokens - queries, layer(case).score
    inputs = replace(whole.inputs, q_BHND=whole.inputs.q_BHND[:, :, offset:], mask=MaskSpec(queries, case.tokens))
    score = ScoreMap(inputs, whole.terms)
    edges = torch.tensor([offset, case.tokens])
    tiles = Tiles(case.heads, edges, torch.tensor([0, case.tokens]), offset, torch.zeros((), dtype=torch.float64))
    rows = []
    for start, stop in row_blocks(queries, 4):
        block = score_rows(score, start, stop)
        tiles.add(block)
        close(block.s_SRC, layer(case).s_SNN[:, offset + start : offset + stop, : block.c1])
        rows.append(row_sums(block, offset=offset, sink=1, local=3, threshold=0.01, spans={}))
    stats = RowSums.joined(rows).statistics()
    for name, expected in ref.row_statistics(layer(case).s_SNN, local=3, threshold=0.01).items():
        close(stats[name], expected[:, offset:], EXACT[name == "sparsity"], name)
    dense = [ref.tiled(s, edges.numpy(), np.array([0, case.tokens])) for s in layer(case).s_SNN]
    close(tiles.means(), np.stack([mean for mean, _ in dense]))
    close(attention_output(inputs)[0], layer(case).o_HNE[:, offset:])


def test_rows_without_mass_are_blank_and_heads_without_scores_have_no_similarity():
    s = torch.zeros(2, 3, 3, dtype=torch.float64)
    s[0] = torch.eye(3)
    block = ScoreBlock(s, (s,), 0, 3, 0, 3)
    stats = row_sums(block, offset=0, sink=1, local=2, threshold=0.01, spans={"a": (0, 1)}).statistics()
    for name, expected in ref.row_statistics(s.numpy(), local=2, threshold=0.01, spans={"a": (0, 1)}).items():
        close(stats[name], expected, EXACT[name == "sparsity"], name)
    gram, divergence = Gram(2, s.device), JensenShannon(2, s.device)
    gram.add(block)
    divergence.add(block)
    for matrix in (gram.cosine(), divergence.similarity(), linear_cka(s)):
        close(matrix, [[1, np.nan], [np.nan, np.nan]])


@pytest.mark.parametrize("edges", [(0, 10, 3, 0, 10, 4), (2, 9, 2, 5, 10, 5), (0, 4, 2, 6, 10, 2)])
def test_causal_counts_are_what_a_loop_counts(edges):
    rows, cols = tile_edges(*edges[:3]), tile_edges(*edges[3:])
    counted = [
        [sum(j <= i for i in range(r0, r1) for j in range(c0, c1)) for c0, c1 in pairwise(cols)] for r0, r1 in pairwise(rows)
    ]
    assert causal_counts(rows, cols).tolist() == counted


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (10, 3), (257, 256), (100, 7)])
def test_tile_edges_follow_the_formula(tokens, tiles):
    assert tile_edges(0, tokens, tiles).tolist() == ref.tile_edges(tokens, tiles).tolist()


@pytest.mark.parametrize("selected", [(0,), (1, 3), (0, 1, 2, 3)])
def test_dex_output_equals_reference_and_has_right_gradients(selected):
    random = np.random.default_rng(3)
    o, w = random.normal(size=(4, 9, 5)), random.normal(size=(5, 5))
    chosen = np.isin(np.arange(4), selected)
    operands = [torch.from_numpy(x).requires_grad_() for x in (o[None], w, np.array(0.3))]
    heads = torch.tensor(selected)
    close(dex_output(*operands, heads)[0].detach(), ref.dex_outputs(o, w, 0.3, chosen))
    assert torch.equal(dex_output(operands[0], operands[1], torch.zeros(()), heads), operands[0])
    assert torch.autograd.gradcheck(lambda *x: dex_output(*x, heads), operands)


@pytest.mark.parametrize("residual", [False, True])
def test_gains_equal_reference(residual):
    random = np.random.default_rng(4)
    v, w, w_o = random.normal(size=(2, 9, 5)), random.normal(size=(5, 5)), random.normal(size=(4, 5, 11))
    v[0, 3] = 0
    metric = torch.from_numpy(w_o @ w_o.swapaxes(1, 2)) if residual else None
    mine = gains(torch.from_numpy(ref.per_query_head(v, 4)), torch.from_numpy(w), 3.0, metric)
    expected = ref.dex_gains(v, w, 3.0, np.ones(4, bool), w_o if residual else None)
    for values, reference in zip(mine, expected, strict=True):
        close(values, reference)
    assert (mine[0] < 0).any()
