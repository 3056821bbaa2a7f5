"""Second pass: statistics of each row from recomputed tiles. Sums on key spans are a product with the spans' indicators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import no_type_check

import torch
import triton
import triton.language as tl

from dexviz.kernels.rows import RowSums
from dexviz.kernels.triton.launch import STAGES, padded
from dexviz.kernels.triton.source import LazyRows
from dexviz.kernels.triton.tile import column_range, score_tile, seen_columns

_SUMS = 7
"""Σ|S|, Σ|S| ln |S|, Σ S, max |S|, the first column that has it, how many |S| ≥ τ, Σ|S| of the last keys."""


def row_sums(
    block: LazyRows, *, offset: int, sink: int, local: int, threshold: float, spans: Mapping[str, tuple[int, int]]
) -> RowSums:
    """Twin of `dexviz.kernels.rows.row_sums`."""
    launch, rows = block.launch, block.stop - block.start
    edges = [(0, sink), *spans.values()]
    ranges = torch.tensor(edges, dtype=torch.int32, device=launch.device).sub_(block.c0).contiguous()
    sums_ASR, spans_PSR = block.empty(_SUMS, block.scores, rows), block.empty(len(edges), block.scores, rows)
    grid = (triton.cdiv(rows, launch.side), block.scores)
    measures = (block.start + offset - block.c0, local, threshold, len(edges))
    widths = (launch.side, min(launch.side, 32), launch.depth, block.rank, padded(len(edges)))
    _statistics[grid](launch.source, ranges, sums_ASR, spans_PSR, *measures, *widths, *block.settings, num_stages=STAGES)
    total, plogp, net, largest, argmax, above, near = sums_ASR
    block.kept.update(total=total, plogp=plogp)
    return RowSums(
        first=block.start + offset,
        total_SR=total,
        plogp_SR=plogp,
        net_SR=net,
        max_SR=largest,
        argmax_SR=argmax + block.c0,
        above_SR=above,
        sink_SR=spans_PSR[0],
        local_SR=near,
        spans=dict(zip(spans, spans_PSR[1:], strict=True)),
    )


@no_type_check
@triton.jit
def _statistics(
    x, ranges, sums, spans, position, local, threshold, count,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One block of rows of one score head; `position` is that of row 0, counted from the block's first column."""
    s = tl.program_id(1).to(tl.int64)
    r0 = tl.program_id(0) * BM
    flat = r0 + tl.arange(0, BM)
    row, d, k, p = flat[:, None], tl.arange(0, BD), tl.arange(0, BK), tl.arange(0, BP)
    low = tl.load(ranges + 2 * p, mask=p < count, other=0)[None, :]
    high = tl.load(ranges + 2 * p + 1, mask=p < count, other=0)[None, :]
    total, plogp, net = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    largest, above, near = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    argmax = tl.zeros([BM], tl.int32)
    on_spans = tl.zeros([BM, BP], tl.float32)
    left, right = seen_columns(x, row)
    start, stop = column_range(x, left, right, BN)
    for c in range(start, stop, BN):
        cols = c + tl.arange(0, BN)
        col, down = cols[None, :], cols[:, None]
        tile = score_tile(x, s, row, col, left, right, d, k, MASK, BIAS, CAP, PRECISION, UPCAST, GAIN, TERMS)
        mass = tl.abs(tile)
        total += tl.sum(mass, axis=1)
        net += tl.sum(tile, axis=1)
        plogp += tl.sum(mass * tl.log(tl.maximum(mass, 1.1754944e-38)), axis=1)
        most, column = tl.max(mass, axis=1, return_indices=True)
        argmax = tl.where(most > largest, c + column, argmax)
        largest = tl.maximum(largest, most)
        above += tl.sum(tl.where((mass >= threshold) & (col < x.cols), 1.0, 0.0), axis=1)
        behind = row + position - col
        near += tl.sum(tl.where((behind >= 0) & (behind < local), mass, 0.0), axis=1)
        on_spans += tl.dot(mass, tl.where((down >= low) & (down < high), 1.0, 0.0), input_precision=PRECISION)
    inside, plane = flat < x.rows, x.scores * x.rows
    out = sums + s * x.rows + flat
    tl.store(out, total, mask=inside)
    tl.store(out + plane, plogp, mask=inside)
    tl.store(out + 2 * plane, net, mask=inside)
    tl.store(out + 3 * plane, largest, mask=inside)
    tl.store(out + 4 * plane, argmax.to(tl.float32), mask=inside)
    tl.store(out + 5 * plane, above, mask=inside)
    tl.store(out + 6 * plane, near, mask=inside)
    tl.store(spans + p[None, :] * plane + s * x.rows + row, on_spans, mask=(row < x.rows) & (p[None, :] < count))
