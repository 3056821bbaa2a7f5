"""Every Triton kernel against the dense float64 reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from dexviz.kernels import terms
from dexviz.kernels.terms import ScoreMap
from dexviz.kernels.triton.gram import Gram
from dexviz.kernels.triton.softmax import attention_output, score_rows
from tests import reference as ref
from tests.score_cases import KINDS, LAMBDA, Case, layer
from tests.triton_cases import (
    CHECKS,
    DEVICE,
    check_divergence,
    check_gram,
    check_output,
    check_statistics,
    check_tiles,
    close,
    moved,
    poison,
)

CASES = (
    Case(1, kv_heads=1),
    Case(1, kv_heads=1, groups=4, kind="gain"),
    Case(2, kv_heads=1, groups=3, kind="gain"),
    Case(2, kv_heads=2, kind="two contributions", sinks=True),
    Case(63, kv_heads=1, groups=4, kind="contribution", value_width=37),
    Case(63, kv_heads=2, kind="gain", window=9, softcap=1.5, sinks=True),
    Case(63, kv_heads=1, groups=2, kind="two terms", sinks=True, width=17, value_width=20),
    Case(100, kv_heads=1, groups=3, kind="attention", softcap=3.0),
    Case(100, kv_heads=2, kind="two contributions", window=20),
    Case(257, kv_heads=1, kind="row gain", window=70),
    Case(257, kv_heads=1, kind="contribution"),
)
LARGE = Case(1025, kv_heads=1, kind="gain", width=16)
NARROW = replace(LARGE, window=50)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_dense_reference(case, check):
    check(layer(case))


@pytest.mark.parametrize(
    ("case", "check"),
    [(LARGE, check_output), (LARGE, check_statistics), (NARROW, check_tiles), (NARROW, check_gram), (NARROW, check_divergence)],
    ids=lambda part: part.__name__ if callable(part) else str(part),
)
def test_kernel_equals_dense_reference_at_many_tiles(case, check):
    check(layer(case))


@settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    case=st.builds(
        Case,
        tokens=st.integers(1, 40),
        kv_heads=st.integers(1, 2),
        groups=st.integers(1, 3),
        width=st.integers(1, 33),
        value_width=st.integers(2, 20),
        window=st.none() | st.integers(1, 45),
        softcap=st.none() | st.floats(0.5, 50),
        sinks=st.booleans(),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 2**16),
    )
)
def test_kernels_equal_dense_reference_on_any_shape(case):
    for check in CHECKS:
        check(layer(case))


def test_more_heads_than_a_group_of_the_gram_kernel():
    case = layer(Case(20, kv_heads=3, groups=6, kind="gain"))
    gram = Gram(18, DEVICE)
    gram.add(score_rows(moved(case.score), 0, 20))
    close(gram.cosine(), ref.cosine_similarity(case.s_SNN))


@pytest.mark.parametrize(("kind", "dtype"), [("contribution", torch.float32), ("two contributions", torch.float64)])
def test_the_first_pass_yields_the_output_from_which_rows_get_their_weights(kind, dtype):
    case = layer(Case(70, kv_heads=1, groups=4, kind=kind, window=30))
    score, seen = moved(case.score), []

    def along(o_HRE, start, stop):
        seen.append((start, stop))
        o_SRE = o_HRE if kind == "contribution" else o_HRE[:2] - LAMBDA * o_HRE[2:]
        return o_SRE / o_SRE.square().sum(dim=-1, keepdim=True)

    signs = (1.0, -LAMBDA)
    made = tuple(
        replace(t, u_SNK=lambda o, a, b, sign=sign: sign * along(o, a, b)) for t, sign in zip(score.terms, signs, strict=False)
    )
    out_HNE = torch.empty(70, 4, 5, dtype=dtype, device=DEVICE).transpose(0, 1)
    for a, b in ((0, 33), (33, 70)):
        rows = score_rows(ScoreMap(score.inputs, made), a, b, out_HNE)
        for head in range(score.heads):
            close(rows.head(head)[0], case.s_SNN[head, a:b, rows.c0 : rows.c1], 1e-4)
    close(out_HNE, case.o_HNE)
    assert set(seen) == {(0, 33), (33, 70)}
    assert len(seen) == 2 * len(made)


def test_an_output_whose_columns_are_apart_is_written_too():
    case = layer(Case(9, kv_heads=1, groups=2))
    out_HNE = torch.empty(5, 9, 2, device=DEVICE).permute(2, 1, 0)
    score_rows(moved(case.score), 0, 9, out_HNE)
    close(out_HNE, case.o_HNE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_operands_are_summed_in_float32(dtype):
    case = layer(Case(63, kv_heads=1, groups=2, kind="gain", width=16, value_width=16))
    score = moved(case.score, dtype)
    exact = replace(score.inputs, q_BHND=score.inputs.q_BHND.double(), k_BGMD=score.inputs.k_BGMD.double())
    expected = terms.score_rows(ScoreMap(exact, score.terms), 0, 63)
    close(score_rows(score, 0, 63).head(1)[0], expected.s_SRC[1].cpu(), 1e-4)
    output = attention_output(score.inputs)[0]
    assert output.dtype == dtype
    close(output, (expected.a_TSRC[0] @ score.inputs.v_BGME[0].double()).cpu(), 1e-2)
