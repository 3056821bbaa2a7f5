"""What the tests of Triton kernels share: the device, poisoned memory, comparisons, and one check an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dexviz.kernels.softmax import row_blocks
from dexviz.kernels.terms import ScoreMap
from dexviz.kernels.tiles import tile_edges
from dexviz.kernels.triton.divergence import JensenShannon
from dexviz.kernels.triton.gram import Gram
from dexviz.kernels.triton.rows import row_sums
from dexviz.kernels.triton.softmax import attention_output, head_rows, score_rows
from dexviz.kernels.triton.tiles import Tiles
from tests import reference as ref
from tests.score_cases import Layer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-5
BLOCK = 150
"""Query rows a launch: more than a tile of rows has, and no multiple of one."""


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is NaN."""
    for name in ("empty", "empty_like"):
        made = getattr(torch, name)

        def filled(*args, made: Callable[..., Tensor] = made, **kwargs) -> Tensor:
            out = made(*args, **kwargs)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        monkeypatch.setattr(torch, name, filled)


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
    """Equal within a tolerance relative to the largest entry, or to 1 where that is less; NaN where NaN is expected."""
    expected = np.asarray(expected, dtype=np.float64)
    largest = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(mine.detach().double().cpu(), expected, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def check_output(case: Layer) -> None:
    close(attention_output(moved(case.score).inputs)[0], case.o_HNE)


def check_statistics(case: Layer) -> None:
    n = case.s_SNN.shape[1]
    asked = {"sink": 2, "local": 5, "threshold": 0.01, "spans": {"all": (0, n), "needle": (n // 3, n // 3 + 1)}}
    score = moved(case.score)
    parts = [row_sums(score_rows(score, a, b), offset=0, **asked).statistics() for a, b in row_blocks(n, BLOCK)]
    expected = ref.row_statistics(case.s_SNN, **asked)
    assert expected.keys() == parts[0].keys()
    for name, values in expected.items():
        close(torch.cat([part[name] for part in parts], dim=-1), values, name=name)


def check_tiles(case: Layer) -> None:
    n, score = case.s_SNN.shape[1], moved(case.score)
    for row_edges, col_edges in (
        (tile_edges(0, n, min(3, n)), tile_edges(0, n, min(2, n))),
        (tile_edges(n // 3, n, 1), tile_edges(0, n - n // 4, 1)),
    ):
        first, other = (Tiles(score.heads, row_edges, col_edges, 0, torch.zeros((), device=DEVICE)) for _ in range(2))
        for index, (a, b) in enumerate(row_blocks(n, BLOCK)):
            (first, other)[index % 2].add(score_rows(score, a, b))
        first.merge(other)
        dense = [ref.tiled(s, row_edges.numpy(), col_edges.numpy()) for s in case.s_SNN]
        close(first.means(), np.stack([mean for mean, _ in dense]))
        close(first.extremes(), np.stack([extreme for _, extreme in dense]))


def check_gram(case: Layer) -> None:
    score = moved(case.score)
    first, other = Gram(score.heads, DEVICE), Gram(score.heads, DEVICE)
    for index, (a, b) in enumerate(row_blocks(case.s_SNN.shape[1], BLOCK)):
        (first, other)[index % 2].add(score_rows(score, a, b))
    first.merge(other)
    flat = case.s_SNN.reshape(len(case.s_SNN), -1)
    close(first.gram_SS, flat @ flat.T)
    close(first.cosine(), ref.cosine_similarity(case.s_SNN))


def check_divergence(case: Layer) -> None:
    score = moved(case.score)
    first, other = JensenShannon(score.heads, DEVICE), JensenShannon(score.heads, DEVICE)
    for index, (a, b) in enumerate(row_blocks(case.s_SNN.shape[1], BLOCK)):
        (first, other)[index % 2].add(score_rows(score, a, b))
    first.merge(other)
    close(first.similarity(), ref.js_similarity(case.s_SNN))


def check_maps(case: Layer) -> None:
    n, score, last = case.s_SNN.shape[1], moved(case.score), case.score.heads - 1
    for a, b in row_blocks(n, BLOCK):
        block, rows = head_rows(score, last, a, b), score_rows(score, a, b)
        close(block.s_SRC[0], case.s_SNN[last, a:b, block.c0 : block.c1])
        for term, a_SRC in zip(case.score.terms, block.a_TSRC, strict=True):
            close(a_SRC[0], case.a_HNN[term.heads_S[last], a:b, block.c0 : block.c1])
        window = (rows.c1 - rows.c0) // 3, rows.c1 - rows.c0
        close(rows.head(last, window)[0], case.s_SNN[last, a:b, rows.c0 + window[0] : rows.c1])


CHECKS = (check_output, check_statistics, check_tiles, check_gram, check_divergence, check_maps)
