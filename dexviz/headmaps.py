"""One head's map from a layer's kept Q, K and V: whole, a window of it, or tiled down to screen resolution."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dexviz.errors import CaptureError
from dexviz.kernels.operators import Operators, with_operators
from dexviz.kernels.softmax import row_blocks
from dexviz.kernels.terms import ScoreBlock
from dexviz.kernels.tiles import Tiles, tile_edges
from dexviz.records import SCORES, SPACES, HeadMap
from dexviz.room import check_room
from dexviz.scores import LayerRecord, column_gains, score_map

_BLOCK_ROWS = 256
Window = tuple[int, int, int, int]


class MapWriter:
    """Streams row blocks of a layer's score maps into one head's exact map, or a window of it.

    Args:
        head: score head (DIFF: logical head, unless the score is attention).
        n: tokens.
        terms: softmax maps that S is made of.
        window: (row start, row stop, column start, column stop); None for all.
    """

    def __init__(
        self, record: LayerRecord, score: str, space: str, head: int, n: int, terms: int, window: Window | None = None
    ) -> None:
        self.record, self.score, self.space, self.head = record, score, space, head
        self.r0, self.r1, self.c0, self.c1 = window or (0, n, 0, n)
        self.shape = (self.r1 - self.r0, self.c1 - self.c0)
        self.scores = np.zeros(self.shape, dtype=np.float32)
        self.terms = [np.zeros(self.shape, dtype=np.float32) for _ in range(terms)]

    def add(self, block: ScoreBlock, index: int | None = None) -> None:
        """Take in one row block; `index` is the head's place in the block, where that holds fewer heads than the layer."""
        index = self.head if index is None else index
        s_RC, a_TRC = block.head(index)
        self._place(self.scores, block, s_RC)
        for target, a_RC in zip(self.terms, a_TRC, strict=True):
            self._place(target, block, a_RC)

    def _place(self, target: np.ndarray, block: ScoreBlock, part_RC: Tensor) -> None:
        rows = slice(max(block.start, self.r0), min(block.stop, self.r1))
        cols = slice(max(block.c0, self.c0), min(block.c1, self.c1))
        if rows.start >= rows.stop or cols.start >= cols.stop:
            return
        cut = part_RC[rows.start - block.start : rows.stop - block.start, cols.start - block.c0 : cols.stop - block.c0]
        target[rows.start - self.r0 : rows.stop - self.r0, cols.start - self.c0 : cols.stop - self.c0] = (
            cut.float().cpu().numpy()
        )

    def finish(self) -> HeadMap:
        """The map, once all rows are in."""
        gain, residue = _gain(self.record, self.score, self.space, self.head)
        return HeadMap(
            layer=self.record.layer,
            head=self.head,
            score=self.score,
            scores=self.scores,
            attention=self.terms[0],
            row_edges=np.arange(self.r0, self.r1 + 1),
            col_edges=np.arange(self.c0, self.c1 + 1),
            gain=gain,
            residue=residue,
            terms=tuple(self.terms) if len(self.terms) > 1 else (),
        )


@torch.inference_mode()
def head_map(
    record: LayerRecord,
    head: int,
    *,
    score: str = "signed",
    space: str = "value",
    window: Window | None = None,
    pool: int | None = None,
) -> HeadMap:
    """One head's map, from the Q, K and V that a capture kept.

    Args:
        window: (row start, row stop, column start, column stop) in tokens; None for all.
        pool: tile the window down to at most this many rows and columns; None for exact entries.

    Raises:
        CaptureError: the head or the window lies outside the model or the prompt; no such score or space.
        BudgetError: the exact map does not fit into memory.
    """
    n = record.inputs.q_BHND.shape[2]
    if score not in SCORES or space not in SPACES or (pool is not None and pool < 1):
        got = f"score {score!r}, space {space!r}, pool {pool!r}"
        raise CaptureError(
            f"a score out of {', '.join(SCORES)}, a space out of {', '.join(SPACES)}, pool ≥ 1", got, "Correct it."
        )
    scores = score_map(record, score, space)
    if not 0 <= head < scores.heads:
        raise CaptureError(f"a head within 0..{scores.heads - 1}", str(head), "Choose a head the model has.")
    r0, r1, c0, c1 = window or (0, n, 0, n)
    if not (0 <= r0 < r1 <= n and 0 <= c0 < c1 <= n):
        raise CaptureError(f"a window within 0..{n}", str(window), "Choose tokens inside the prompt.")
    edges = (r0, r1, c0, c1)
    whole = pool is None or pool >= max(r1 - r0, c1 - c0)
    if whole:
        check_room((r1 - r0) * (c1 - c0))

    def drawn(ops: Operators) -> HeadMap:
        blocks = (ops.head_rows(scores, head, r0 + a, r0 + b) for a, b in row_blocks(r1 - r0, _BLOCK_ROWS))
        if pool is None or whole:
            return _exact(record, score, space, head, blocks, edges, len(scores.terms))
        return _tiled(record, score, space, head, blocks, edges, pool)

    return with_operators(record.inputs.q_BHND.device, drawn)


def _exact(
    record: LayerRecord, score: str, space: str, head: int, blocks: Iterable[ScoreBlock], window: Window, terms: int
) -> HeadMap:
    writer = MapWriter(record, score, space, head, record.inputs.q_BHND.shape[2], terms, window)
    for block in blocks:
        writer.add(block, index=0)
    return writer.finish()


def _tiled(
    record: LayerRecord, score: str, space: str, head: int, blocks: Iterable[ScoreBlock], window: Window, pool: int
) -> HeadMap:
    r0, r1, c0, c1 = window
    rows, cols = tile_edges(r0, r1, min(pool, r1 - r0)), tile_edges(c0, c1, min(pool, c1 - c0))
    like = record.inputs.q_BHND.new_empty((), dtype=record.inputs.dtype)
    tiles, terms = Tiles(1, rows, cols, 0, like), list[Tiles]()
    for block in blocks:
        terms = terms or [Tiles(1, rows, cols, 0, like) for _ in block.a_TSRC]
        tiles.add(block)
        for part, a_SRC in zip(terms, block.a_TSRC, strict=True):
            part.add(ScoreBlock(a_SRC, (), block.start, block.stop, block.c0, block.c1))
    means = [part.means()[0].float().cpu().numpy() for part in terms]
    gain, residue = _gain(record, score, space, head)
    return HeadMap(
        layer=record.layer,
        head=head,
        score=score,
        scores=tiles.means()[0].float().cpu().numpy(),
        attention=means[0],
        row_edges=rows.numpy(),
        col_edges=cols.numpy(),
        extreme=tiles.extremes()[0].float().cpu().numpy(),
        gain=gain,
        residue=residue,
        terms=tuple(means) if len(means) > 1 else (),
    )


def _gain(record: LayerRecord, score: str, space: str, head: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """ρ and ε of a selected head, for signed scores."""
    operator = record.operator
    if score != "signed" or operator is None or head not in operator.heads.tolist():
        return None, None
    gains = column_gains(record, space)
    assert gains is not None
    rho, residue = (part[head].float().cpu().numpy() for part in gains)
    return rho, residue
