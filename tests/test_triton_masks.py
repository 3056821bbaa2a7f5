"""Masks in the Triton kernels: ranges of keys without any dense mask, and everything that is no range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dexviz.kernels import terms
from dexviz.kernels.softmax import AttentionInputs, MaskSpec
from dexviz.kernels.terms import ScoreMap, ScoreTerm
from dexviz.kernels.triton.rows import row_sums
from dexviz.kernels.triton.softmax import attention_output, head_rows, score_rows
from tests import reference as ref
from tests.triton_cases import DEVICE, close, poison


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


def inputs(spec: MaskSpec, heads: int = 2, prompts: int = 1, **special) -> AttentionInputs:
    random = np.random.default_rng(5)
    shapes = ((prompts, heads, spec.queries, 4), (prompts, heads, spec.keys, 4), (prompts, heads, spec.keys, 4))
    return AttentionInputs(*(torch.from_numpy(random.normal(size=s)).float().to(DEVICE) for s in shapes), 0.5, spec, **special)


def spec_of(seen: torch.Tensor) -> MaskSpec:
    seen = seen.to(DEVICE)
    return MaskSpec(*seen.shape[-2:], lambda r0, r1, c0, c1: seen[..., r0:r1, c0:c1])


def uses_mask(score: ScoreMap) -> bool:
    return score_rows(score, 0, score.inputs.mask.queries).launch.logits[0]


def check(x: AttentionInputs, seen_NM: np.ndarray, prompt: int = 0) -> None:
    """Maps and outputs of each head against the reference; rows that see nothing are zero."""
    q, k, v = (t[prompt].cpu().numpy() for t in (x.q_BHND, x.k_BGMD, x.v_BGME))
    with np.errstate(invalid="ignore"):
        a_HNM = np.nan_to_num(ref.attention(q, k, x.scale, seen_NM))
    close(attention_output(x)[prompt], a_HNM @ v)
    if prompt == 0:
        score = ScoreMap(x, (ScoreTerm(tuple(range(x.heads))),))
        for head in range(x.heads):
            block = head_rows(score, head, 0, len(seen_NM))
            close(block.s_SRC[0], a_HNM[head][:, block.c0 : block.c1])


def test_a_window_needs_no_mask_and_tiles_that_it_hides_are_not_computed():
    n, window, hidden = 200, 9, 64
    seen = ref.causal_mask(n, window)
    x = inputs(spec_of(torch.from_numpy(seen)[None, None]))
    assert not uses_mask(ScoreMap(x, (ScoreTerm((0, 1)),)))
    check(x, seen)
    x.v_BGME[:, :, :hidden] = torch.nan
    assert attention_output(x)[0, :, 2 * hidden :].isfinite().all(), "0 · NaN is NaN in a tile that is computed"


def test_left_padding_is_a_range_and_padded_rows_have_no_mass():
    seen = ref.causal_mask(30)
    seen[:, :7] = False
    x = inputs(spec_of(torch.from_numpy(seen)[None, None]))
    score = ScoreMap(x, (ScoreTerm((0, 1)),))
    assert not uses_mask(score)
    check(x, seen)
    stats = row_sums(score_rows(score, 0, 30), offset=0, sink=1, local=3, threshold=1e-3, spans={}).statistics()
    assert stats["entropy"][:, :7].isnan().all()
    assert stats["argmax"][:, :7].isnan().all()
    assert stats["argmax"][:, 7].eq(7).all()


def test_fewer_queries_than_keys_sit_at_the_end():
    x = inputs(MaskSpec(5, 90))
    check(x, ref.causal_mask(90)[85:])
    stats = row_sums(
        score_rows(ScoreMap(x, (ScoreTerm((0, 1)),)), 0, 5), offset=85, sink=1, local=3, threshold=0.01, spans={}
    ).statistics()
    q, k = (t[0].cpu().numpy() for t in (x.q_BHND, x.k_BGMD))
    a = np.concatenate([np.zeros((2, 85, 90)), ref.attention(q, k, x.scale, ref.causal_mask(90)[85:])], axis=1)
    for name, expected in ref.row_statistics(a, local=3, threshold=0.01).items():
        close(stats[name], expected[:, 85:], name=name)


def test_what_sees_everything_is_a_range():
    x = inputs(MaskSpec(20, 33, causal=False))
    assert not uses_mask(ScoreMap(x, (ScoreTerm((0, 1)),)))
    check(x, np.ones((20, 33), bool))


def test_prompts_of_one_batch_have_masks_of_their_own():
    seen = np.stack([ref.causal_mask(12), ref.causal_mask(12, 4)])
    x = inputs(spec_of(torch.from_numpy(seen)[:, None]), prompts=2)
    check(x, seen[0])
    check(x, seen[1], prompt=1)


def test_heads_may_have_masks_of_their_own():
    seen = torch.from_numpy(np.stack([ref.causal_mask(12), ref.causal_mask(12, 4)]))[None]
    score = ScoreMap(inputs(spec_of(seen)), (ScoreTerm((0, 1)),))
    assert uses_mask(score)
    expected = terms.score_rows(score, 0, 12).s_SRC
    for head in range(2):
        close(head_rows(score, head, 0, 12).s_SRC[0], expected[head].cpu())


@pytest.mark.parametrize("additive", [False, True])
def test_rows_that_see_nothing_gaps_additive_masks_and_biases(additive):
    random = np.random.default_rng(6)
    seen = torch.from_numpy(random.random((1, 1, 9, 9)) < 0.6)
    seen[..., 3, :] = False
    mask = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf) if additive else seen
    bias = torch.from_numpy(random.normal(size=(1, 2, 9, 9))).float().to(DEVICE)
    score = ScoreMap(inputs(spec_of(mask), bias_BHNM=bias), (ScoreTerm((0, 1)),))
    assert uses_mask(score) is not additive
    mine, expected = score_rows(score, 0, 9), terms.score_rows(score, 0, 9)
    for head in range(2):
        close(mine.head(head)[0], expected.s_SRC[head].cpu())
    close(attention_output(score.inputs)[0], (expected.s_SRC @ score.inputs.v_BGME[0]).cpu())
