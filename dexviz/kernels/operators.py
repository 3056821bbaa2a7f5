"""The operators that stream a layer's score maps, under one set of names: eager, compiled for the CPU, or Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dexviz.kernels import rows, similarity, terms, tiles
from dexviz.kernels.backend import attempt, chosen
from dexviz.kernels.softmax import row_blocks as equal_blocks

T = TypeVar("T")


def threads(score: terms.ScoreMap, blocks: int) -> int:
    """How many threads share the blocks: one a core on the CPU."""
    return min(torch.get_num_threads(), blocks) if score.inputs.q_BHND.device.type == "cpu" else 1


@dataclass(frozen=True)
class Operators:
    """Twins share signatures; what `score_rows` returns is what the consumers of the same set take in."""

    prepared: Callable[[terms.ScoreMap], terms.ScoreMap] = terms.promoted
    blocks: Callable[[terms.ScoreMap], list[tuple[int, int]]] = terms.row_blocks
    threads: Callable[[terms.ScoreMap, int], int] = threads
    score_rows: Callable[..., Any] = terms.score_rows
    head_rows: Callable[..., terms.ScoreBlock] = terms.head_rows
    row_sums: Callable[..., rows.RowSums] = rows.row_sums
    tiles: type[tiles.Tiles] = tiles.Tiles
    gram: type[similarity.Gram] = similarity.Gram
    jensen_shannon: type[similarity.JensenShannon] = similarity.JensenShannon


EAGER = Operators()


def with_operators(device: torch.device, work: Callable[[Operators], T]) -> T:
    """What `work` makes with the device's operators; it is done again from the start, eagerly, where these fail."""
    made = _compiled if chosen(device).name == "compiled" else _triton
    return attempt(device, lambda: _finished(device, work(made())), lambda: work(EAGER))


def _finished(device: torch.device, result: T) -> T:
    """Kernels run behind the caller's back: wait, so that one that fails is noticed here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result


def _compiled() -> Operators:
    from dexviz.kernels.compiled import rows

    return Operators(
        rows.prepared,
        score_rows=rows.score_rows,
        row_sums=rows.row_sums,
        tiles=rows.Tiles,
        gram=rows.Gram,
    )


def _triton() -> Operators:
    from dexviz.kernels.triton import divergence, gram, rows, softmax, source, tiles

    return Operators(
        lambda score: score,
        lambda score: list(equal_blocks(score.inputs.mask.queries, source.rows_per_block(score.heads, score.inputs.mask.keys))),
        lambda score, blocks: 1,
        softmax.score_rows,
        softmax.head_rows,
        rows.row_sums,
        tiles.Tiles,
        gram.Gram,
        divergence.JensenShannon,
    )
