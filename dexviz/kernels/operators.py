"""The operators that stream a layer's score maps, eager or Triton, under one set of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dexviz.kernels import rows, similarity, terms, tiles
from dexviz.kernels.backend import attempt

T = TypeVar("T")
_BLOCK_ELEMENTS = 1 << 20


def rows_per_block(heads: int, n: int) -> int:
    """Query rows a block, so that one block of all heads' maps stays around 4 MB."""
    return int(min(max(_BLOCK_ELEMENTS // max(heads * n, 1), 16), 512))


@dataclass(frozen=True)
class Operators:
    """Twins share signatures; what `score_rows` returns is what the consumers of the same set take in."""

    rows_per_block: Callable[[int, int], int] = rows_per_block
    score_rows: Callable[..., Any] = terms.score_rows
    head_rows: Callable[..., terms.ScoreBlock] = terms.head_rows
    row_statistics: Callable[..., dict[str, torch.Tensor]] = rows.row_statistics
    tiles: type[tiles.Tiles] = tiles.Tiles
    gram: type[similarity.Gram] = similarity.Gram
    jensen_shannon: type[similarity.JensenShannon] = similarity.JensenShannon


EAGER = Operators()


def with_operators(device: torch.device, work: Callable[[Operators], T]) -> T:
    """What `work` makes with the device's operators; it is done again from the start, eagerly, where Triton fails."""
    return attempt(device, lambda: _finished(device, work(_triton())), lambda: work(EAGER))


def _finished(device: torch.device, result: T) -> T:
    """Kernels run behind the caller's back: wait, so that one that fails is noticed here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result


def _triton() -> Operators:
    from dexviz.kernels.triton import divergence, gram, rows, softmax, source, tiles

    return Operators(
        source.rows_per_block,
        softmax.score_rows,
        softmax.head_rows,
        rows.row_statistics,
        tiles.Tiles,
        gram.Gram,
        divergence.JensenShannon,
    )
