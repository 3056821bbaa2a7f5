"""Every Triton kernel against the dense float64 reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dexviz.kernels import dex as eager_dex, terms
from dexviz.kernels.softmax import AttentionInputs, MaskSpec, row_blocks
from dexviz.kernels.terms import ScoreMap
from dexviz.kernels.tiles import tile_edges
from dexviz.kernels.triton import dex
from dexviz.kernels.triton.divergence import JensenShannon
from dexviz.kernels.triton.gram import Gram
from dexviz.kernels.triton.rows import row_statistics
from dexviz.kernels.triton.softmax import attention_output, head_rows, score_rows
from dexviz.kernels.triton.tiles import Tiles
from tests import reference as ref
from tests.score_cases import Case, Layer, layer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5
BLOCK = 70

CASES = (
    Case(1, kv_heads=1),
    Case(2, kv_heads=1, groups=3, kind="gain"),
    Case(63, kv_heads=1, groups=4, kind="contribution", value_width=37),
    Case(63, kv_heads=2, kind="gain", window=9, softcap=1.5, sinks=True),
    Case(63, kv_heads=1, groups=2, kind="two terms", sinks=True, width=17, value_width=20),
    Case(100, kv_heads=2, kind="two contributions", window=20),
    Case(257, kv_heads=1, kind="row gain"),
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel leaves unwritten is NaN."""
    empty = torch.empty

    def filled(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


def moved(score: ScoreMap, dtype: torch.dtype = torch.float32) -> ScoreMap:
    """The same maps on the device under test."""

    def move(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return None if x is None else x.to(DEVICE, dtype)

    x = score.inputs
    block = x.mask.block
    inputs = replace(
        x,
        q_BHND=move(x.q_BHND, dtype),
        k_BGMD=move(x.k_BGMD, dtype),
        v_BGME=move(x.v_BGME, dtype),
        sinks_H=move(x.sinks_H),
        mask=x.mask if block is None else replace(x.mask, block=lambda *edges: block(*edges).to(DEVICE)),
    )
    return ScoreMap(inputs, tuple(replace(t, u_SNK=move(t.u_SNK), w_SMK=move(t.w_SMK)) for t in score.terms))


def close(mine: Tensor, expected: np.ndarray | Tensor, tolerance: float = TOLERANCE, name: str = "") -> None:
    np.testing.assert_allclose(mine.detach().cpu(), np.asarray(expected), rtol=tolerance, atol=tolerance, err_msg=name)


def check_output(case: Layer) -> None:
    close(attention_output(moved(case.score).inputs)[0], case.o_HNE)


def check_statistics(case: Layer) -> None:
    n = case.s_SNN.shape[1]
    asked = {"sink": 2, "local": 5, "threshold": 0.01, "spans": {"all": (0, n), "needle": (n // 3, n // 3 + 1)}}
    score = moved(case.score)
    parts = [row_statistics(score_rows(score, a, b), offset=0, **asked) for a, b in row_blocks(n, BLOCK)]
    for name, values in ref.row_statistics(case.s_SNN, **asked).items():
        close(torch.cat([part[name] for part in parts], dim=-1), values, name=name)


def check_tiles(case: Layer) -> None:
    n, score = case.s_SNN.shape[1], moved(case.score)
    rows, cols = tile_edges(0, n, min(3, n)), tile_edges(0, n, min(2, n))
    tiles = Tiles(score.heads, rows, cols, 0, torch.zeros((), device=DEVICE))
    for a, b in row_blocks(n, BLOCK):
        tiles.add(score_rows(score, a, b))
    dense = [ref.tiled(s, rows.numpy(), cols.numpy()) for s in case.s_SNN]
    close(tiles.means(), np.stack([mean for mean, _ in dense]))
    close(tiles.extremes(), np.stack([extreme for _, extreme in dense]))


def check_similarity(case: Layer) -> None:
    n, score = case.s_SNN.shape[1], moved(case.score)
    gram, divergence = Gram(score.heads, DEVICE), JensenShannon(score.heads, DEVICE)
    for a, b in row_blocks(n, BLOCK):
        rows = score_rows(score, a, b)
        gram.add(rows)
        divergence.add(rows)
    close(gram.cosine(), ref.cosine_similarity(case.s_SNN))
    close(divergence.similarity(), ref.js_similarity(case.s_SNN))


def check_maps(case: Layer) -> None:
    n, score, last = case.s_SNN.shape[1], moved(case.score), case.score.heads - 1
    for a, b in row_blocks(n, BLOCK):
        block, rows = head_rows(score, last, a, b), score_rows(score, a, b)
        close(block.s_SRC[0], case.s_SNN[last, a:b, block.c0 : block.c1])
        for term, a_SRC in zip(case.score.terms, block.a_TSRC, strict=True):
            close(a_SRC[0], case.a_HNN[term.heads_S[last], a:b, block.c0 : block.c1])
        window = (rows.c1 - rows.c0) // 3, rows.c1 - rows.c0
        close(rows.head(last, window)[0], case.s_SNN[last, a:b, rows.c0 + window[0] : rows.c1])


@pytest.mark.parametrize("check", [check_output, check_statistics, check_tiles, check_similarity, check_maps])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_dense_reference(case, check):
    check(layer(case))


def test_more_heads_than_a_group_of_the_gram_kernel():
    case = layer(Case(20, kv_heads=3, groups=6, kind="gain"))
    gram = Gram(18, DEVICE)
    gram.add(score_rows(moved(case.score), 0, 20))
    close(gram.cosine(), ref.cosine_similarity(case.s_SNN))


def test_bfloat16_operands_are_summed_in_float32():
    case = layer(Case(63, kv_heads=1, groups=2, kind="gain", width=16, value_width=16))
    score = moved(case.score, torch.bfloat16)
    exact = replace(score.inputs, q_BHND=score.inputs.q_BHND.double(), k_BGMD=score.inputs.k_BGMD.double())
    expected = terms.score_rows(ScoreMap(exact, score.terms), 0, 63)
    close(score_rows(score, 0, 63).head(1)[0], expected.s_SRC[1].cpu(), 1e-4)
    output = attention_output(score.inputs)[0]
    assert output.dtype == torch.bfloat16
    close(output.float(), (expected.a_TSRC[0] @ score.inputs.v_BGME[0].double()).cpu(), 1e-2)


@pytest.mark.parametrize("additive", [False, True])
def test_rows_that_see_nothing_additive_masks_and_biases(additive):
    random = np.random.default_rng(5)
    q, k, v = (torch.from_numpy(random.normal(size=(1, 2, 9, 4))).float().to(DEVICE) for _ in range(3))
    seen = torch.from_numpy(random.random((1, 1, 9, 9)) < 0.6).to(DEVICE)
    seen[..., 3, :] = False
    mask = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf) if additive else seen
    bias = torch.from_numpy(random.normal(size=(1, 2, 9, 9))).float().to(DEVICE)
    spec = MaskSpec(9, 9, lambda r0, r1, c0, c1: mask[:, :, r0:r1, c0:c1])
    score = ScoreMap(AttentionInputs(q, k, v, 0.5, spec, bias_BHNM=bias), (terms.ScoreTerm((0, 1)),))
    mine, expected = score_rows(score, 0, 9), terms.score_rows(score, 0, 9)
    for head in range(2):
        close(mine.head(head)[0], expected.s_SRC[head].cpu())
    close(attention_output(score.inputs)[0], (expected.s_SRC @ v[0]).cpu())


@pytest.mark.parametrize(("tokens", "width"), [(1, 5), (2, 16), (100, 70)])
def test_dex_equals_its_twin_with_gradients(tokens, width):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, tokens, width), (width, width), ())
    operands = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    heads = torch.tensor([0, 2], device=DEVICE)
    mine, expected = dex.dex_output(*operands, heads), eager_dex._eager(*operands, heads)
    close(mine, expected.detach().cpu(), 1e-4)
    direction = torch.randn(expected.shape, generator=generator).to(DEVICE)
    for name, one, other in zip(
        ["o", "w", "λ"], *(torch.autograd.grad(x, operands, direction) for x in (mine, expected)), strict=True
    ):
        close(one, other.cpu(), 1e-3, name)


def test_dex_at_strength_zero_is_the_identity_bit_for_bit():
    o = torch.randn(1, 2, 7, 5, device=DEVICE).bfloat16()
    assert torch.equal(
        dex.dex_output(o, torch.randn(5, 5, device=DEVICE), torch.zeros((), device=DEVICE), torch.tensor([1])), o
    )
