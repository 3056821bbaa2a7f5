"""One layer's score maps, streamed: blocks of query rows go through all that was asked for, on a thread for each core.

No more than one block of maps a thread exists at a time, apart from the exact maps that were asked for. Threads take blocks in
a fixed order and keep sums of their own, which are added in a fixed order: the same threads give the same numbers, bit for bit.

Axes: see `dexviz.records`; S score heads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from torch import Tensor

from dexviz.errors import Cancelled
from dexviz.headmaps import MapWriter
from dexviz.kernels.operators import Operators
from dexviz.kernels.rows import RowSums
from dexviz.kernels.softmax import Scratch
from dexviz.kernels.terms import ScoreMap
from dexviz.kernels.tiles import tile_edges
from dexviz.kernels.workers import on_one_core, spread
from dexviz.records import CaptureRequest


@dataclass
class Streamed:
    """What a layer's score maps come to; axes without L."""

    stats: dict[str, Tensor]
    """float [S, N] each."""
    strongest: Tensor
    """Key of largest |S| of each row, int64 [S, N]; −1 where a row has no mass."""
    writers: Sequence[MapWriter]
    pooled: Tensor | None = None
    extreme: Tensor | None = None
    similarity: dict[str, Tensor] = field(default_factory=dict)


def stream(
    score: ScoreMap,
    request: CaptureRequest,
    ops: Operators,
    writers: Sequence[MapWriter] = (),
    cancel: Event | None = None,
    out_HNE: Tensor | None = None,
) -> Streamed:
    """One pass over the layer's rows; changes nothing but what it returns, the writers' maps and `out_HNE`.

    Args:
        writers: receive the rows of the exact maps that were asked for.
        cancel: set it from another thread to stop at the next block.
        out_HNE: receives the attention output O.

    Raises:
        Cancelled: `cancel` was set.
    """
    score = ops.prepared(score)
    blocks = ops.blocks(score)
    threads = ops.threads(score, len(blocks))

    def work(index: int) -> _Share:
        share = _Share(score, request, ops, writers)
        for start, stop in blocks[index::threads]:
            if cancel is not None and cancel.is_set():
                raise Cancelled
            share.take(start, stop, out_HNE)
        return share

    first, *others = spread(work, threads)

    def added() -> Streamed:
        for other in others:
            first.merge(other)
        return first.result()

    return on_one_core(added, threads)


_own = threading.local()


def _scratch() -> Scratch:
    """This thread's memory for blocks, kept from layer to layer: pages that are given back must be filled with zeros again."""
    if not hasattr(_own, "scratch"):
        _own.scratch = Scratch()
    return _own.scratch


class _Share:
    """What one thread makes of its blocks."""

    def __init__(self, score: ScoreMap, request: CaptureRequest, ops: Operators, writers: Sequence[MapWriter]) -> None:
        self.score, self.request, self.ops, self.writers = score, request, ops, writers
        heads, names = score.heads, request.similarities
        like = score.inputs.q_BHND.new_empty((), dtype=score.inputs.dtype)
        edges = tile_edges(0, score.inputs.mask.queries, min(request.pool or 1, score.inputs.mask.queries))
        self.gram = ops.gram(heads, like.device) if "cosine" in names else None
        self.divergence = ops.jensen_shannon(heads, like.device) if "js" in names else None
        self.tiles = ops.tiles(heads, edges, edges, 0, like) if request.pool else None
        self.sums: dict[int, RowSums] = {}
        self.scratch = _scratch()

    def take(self, start: int, stop: int, out_HNE: Tensor | None) -> None:
        """Work through the rows [start, stop)."""
        request = self.request
        block: Any = self.ops.score_rows(self.score, start, stop, out_HNE, self.scratch)
        self.sums[start] = self.ops.row_sums(
            block, offset=0, sink=request.sink, local=request.local, threshold=request.threshold, spans=request.spans
        )
        for consumer in (self.gram, self.divergence, self.tiles, *self.writers):
            if consumer is not None:
                consumer.add(block)

    def merge(self, other: _Share) -> None:
        """Take in what another thread has made of other rows."""
        self.sums.update(other.sums)
        if self.gram is not None and other.gram is not None:
            self.gram.merge(other.gram)
        if self.divergence is not None and other.divergence is not None:
            self.divergence.merge(other.divergence)
        if self.tiles is not None and other.tiles is not None:
            self.tiles.merge(other.tiles)

    def result(self) -> Streamed:
        stats = RowSums.joined([self.sums[start] for start in sorted(self.sums)]).statistics()
        strongest = stats.pop("argmax").nan_to_num(nan=-1).long()
        streamed = Streamed(stats, strongest, self.writers)
        if self.tiles is not None:
            streamed.pooled, streamed.extreme = self.tiles.means(), self.tiles.extremes()
        if self.gram is not None:
            streamed.similarity["cosine"] = self.gram.cosine()
        if self.divergence is not None:
            streamed.similarity["js"] = self.divergence.similarity()
        return streamed
