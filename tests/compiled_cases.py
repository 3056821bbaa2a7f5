"""What the tests of the compiled twins share: poisoned memory, comparisons, and one check an operator.

What a twin leaves unwritten is NaN: scratch memory, outputs and NumPy's empty arrays are filled with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dexviz.kernels.compiled.rows import Gram, Tiles, prepared, row_sums, score_rows
from dexviz.kernels.rows import RowSums
from dexviz.kernels.softmax import Scratch
from dexviz.kernels.terms import ScoreBlock, ScoreMap
from dexviz.kernels.tiles import tile_edges
from tests import reference as ref

TOLERANCE = 5e-6
"""Absolute where numbers are at most 1, as probabilities are. A logit of size 8, a sum of 8 products in float32, is off by
up to 1e-6, and that is the relative error of its exponential; the polynomial adds less than 3e-6."""
FALLING_AND_RISING = (40, 7, 1, 64, 3, 150, 200)
"""Rows of blocks, in turn: scratch memory shrinks and grows."""
ASKED = {"sink": 2, "local": 5, "threshold": 0.01}


class Poisoned(Scratch):
    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        held = super().array(name, shape)
        held.fill(np.nan)
        return held


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken from NumPy unfilled is NaN, or −7 where it counts."""
    empty = np.empty

    def filled(shape, dtype=float, **kwargs):
        made = empty(shape, dtype=dtype, **kwargs)
        made.fill(np.nan if np.issubdtype(made.dtype, np.floating) else -7)
        return made

    monkeypatch.setattr(np, "empty", filled)


def single(score: ScoreMap) -> ScoreMap:
    """The same maps in float32, as a model gives them."""

    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float()

    x = score.inputs
    parts = {name: cast(getattr(x, name)) for name in ("q_BHND", "k_BGMD", "v_BGME", "sinks_H", "bias_BHNM")}
    inputs = replace(x, **parts)
    return ScoreMap(inputs, tuple(replace(t, u_SNK=cast(t.u_SNK), w_SMK=cast(t.w_SMK)) for t in score.terms))


def close(mine: Tensor, expected: np.ndarray | Tensor, tolerance: float = TOLERANCE, name: str = "") -> None:
    """Equal within a tolerance relative to the largest entry, or to 1 where that is less; NaN where NaN is expected."""
    expected = np.asarray(expected, dtype=np.float64)
    largest = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(mine.double(), expected, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def edges_of(sizes: Sequence[int], n: int) -> list[tuple[int, int]]:
    """Blocks of these sizes, over and over, until n rows are covered."""
    blocks: list[tuple[int, int]] = []
    while not blocks or blocks[-1][1] < n:
        start = blocks[-1][1] if blocks else 0
        blocks.append((start, min(start + sizes[len(blocks) % len(sizes)], n)))
    return blocks


def empty_output(score: ScoreMap) -> Tensor:
    x = score.inputs
    return torch.full((x.heads, x.mask.queries, x.v_BGME.shape[-1]), torch.nan)


def streamed(
    score: ScoreMap, blocks: Sequence[tuple[int, int]], take: Callable[[ScoreBlock], None], out_HNE: Tensor | None = None
) -> None:
    scratch = Poisoned()
    for start, stop in blocks:
        take(score_rows(score, start, stop, out_HNE, scratch))


# ---------------------------------------------------------------- one check an operator


def check_scores(score: ScoreMap, a_HNN: np.ndarray, s_SNN: np.ndarray, o_HNE: np.ndarray) -> None:
    blocks = edges_of(FALLING_AND_RISING, s_SNN.shape[1])
    for made in (score, prepared(score)):
        for out_HNE in (None, empty_output(score)):
            found, maps = np.zeros(s_SNN.shape), np.zeros((len(score.terms), *s_SNN.shape))

            def take(block: ScoreBlock, found=found, maps=maps) -> None:
                part = slice(None), slice(block.start, block.stop), slice(block.c0, block.c1)
                found[part] = block.s_SRC
                for index, a_SRC in enumerate(block.a_TSRC):
                    maps[index][part] = a_SRC

            streamed(made, blocks, take, out_HNE)
            close(torch.from_numpy(found), s_SNN)
            for index, term in enumerate(score.terms):
                close(torch.from_numpy(maps[index]), a_HNN[list(term.heads_S)])
            if out_HNE is not None:
                close(out_HNE, o_HNE)


def check_statistics(score: ScoreMap, s_SNN: np.ndarray) -> None:
    n = s_SNN.shape[1]
    asked = {**ASKED, "spans": {"all": (0, n), "needle": (n // 3, n // 3 + 1), "end": (n - 1, n)}}
    expected = ref.row_statistics(s_SNN, **asked)
    strongest = expected.pop("argmax")
    for made in (score, prepared(score)):
        parts: list[RowSums] = []
        streamed(made, edges_of(FALLING_AND_RISING, n), lambda b, parts=parts: parts.append(row_sums(b, offset=0, **asked)))
        mine = RowSums.joined(parts).statistics()
        found = mine.pop("argmax").nan_to_num(nan=-1).long().numpy()
        ref.assert_strongest(found, s_SNN, strongest, TOLERANCE * max(1.0, np.abs(s_SNN).max()))
        assert mine.keys() == expected.keys()
        for name, values in expected.items():
            close(mine[name], values, 4 * TOLERANCE if name == "entropy" else TOLERANCE, name)


def check_tiles(score: ScoreMap, s_SNN: np.ndarray) -> None:
    n = s_SNN.shape[1]
    for row_edges, col_edges in (
        (tile_edges(0, n, min(7, n)), tile_edges(0, n, min(5, n))),
        (tile_edges(n // 3, n, 1), tile_edges(0, n - n // 4, 1)),
        (tile_edges(0, n, min(16, n)), tile_edges(0, n, min(16, n))),
    ):
        dense = [ref.tiled(s, row_edges.numpy(), col_edges.numpy()) for s in s_SNN]
        for made in (score, prepared(score)):
            pair = [Tiles(score.heads, row_edges, col_edges, 0, torch.zeros(())) for _ in range(2)]
            streamed(made, edges_of(FALLING_AND_RISING, n), lambda block, pair=pair: pair[block.start % 2].add(block))
            pair[0].merge(pair[1])
            close(pair[0].means(), np.stack([mean for mean, _ in dense]))
            close(pair[0].extremes().abs(), np.abs(np.stack([extreme for _, extreme in dense])))


def check_gram(score: ScoreMap, s_SNN: np.ndarray) -> None:
    flat = s_SNN.reshape(len(s_SNN), -1)
    for made in (score, prepared(score)):
        pair = [Gram(score.heads, torch.device("cpu")) for _ in range(2)]
        streamed(made, edges_of(FALLING_AND_RISING, s_SNN.shape[1]), lambda block, pair=pair: pair[block.start % 2].add(block))
        pair[0].merge(pair[1])
        close(pair[0].gram_SS, np.triu(flat @ flat.T))
        close(pair[0].cosine(), ref.cosine_similarity(s_SNN))


def check(score: ScoreMap, a_HNN: np.ndarray, s_SNN: np.ndarray, o_HNE: np.ndarray) -> None:
    check_scores(score, a_HNN, s_SNN, o_HNE)
    check_statistics(score, s_SNN)
    check_tiles(score, s_SNN)
    check_gram(score, s_SNN)
