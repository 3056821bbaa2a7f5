"""Twins of the eager softmax, statistics, tiles and Gram matrix that hand a block's memory to compiled loops.

Threads share Python's lock, which every torch operator gives back and takes again, be it but a view: two threads that make
views for each block wait for each other most of the time. So views are NumPy's, and a block costs two products in torch and
one loop a consumer.

What the loops do not serve (float64, other devices) goes to the eager twins. Axes: see `dexviz.kernels.terms`; G key/value
heads, X query rows of all heads of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dexviz.kernels import rows as eager, similarity, terms, tiles
from dexviz.kernels.compiled import loops
from dexviz.kernels.rows import RowSums
from dexviz.kernels.softmax import AttentionInputs, RowBlock, Scratch, logits_rows
from dexviz.kernels.terms import ScoreBlock, ScoreMap


@dataclass(frozen=True)
class PreparedMap(ScoreMap):
    """A score map of one term with at most a gain for each key, and what its blocks read, as NumPy arrays."""

    q_GIND: np.ndarray
    """I query heads of each group."""
    k_GDM: np.ndarray
    v_GME: np.ndarray
    low_N: np.ndarray
    high_N: np.ndarray
    sinks_H: np.ndarray
    gain_HM: np.ndarray
    known_H: np.ndarray
    """Heads without a gain."""


class UnservedMap(ScoreMap):
    """A score map whose logits may be NaN or infinite, which only the eager twins hand on as the model does."""


def prepared(score: ScoreMap) -> ScoreMap:
    """The same map with its operands laid out; the promoted map where the loops do not serve it."""
    score = terms.promoted(score)
    if not _finite(score.inputs):
        return UnservedMap(score.inputs, score.terms)
    x, (term, *others) = score.inputs, score.terms
    ranges, gain_SMK = x.mask.ranges(x.q_BHND.device), term.w_SMK
    special = others or term.u_SNK is not None or term.heads_S != tuple(range(x.heads)) or not _served(x.q_BHND)
    if special or x.softcap is not None or x.bias_BHNM is not None or ranges is None:
        return score
    if gain_SMK is not None and gain_SMK.shape[-1] > 1:
        return score
    gain_HM = np.empty((0, 0), dtype=np.float32) if gain_SMK is None else gain_SMK[..., 0].float().contiguous().numpy()
    return PreparedMap(
        x,
        score.terms,
        q_GIND=x.q_BHND[0].unflatten(0, (-1, x.groups)).numpy(),
        k_GDM=x.k_BGMD[0].transpose(-1, -2).numpy(),
        v_GME=x.v_BGME[0].numpy(),
        low_N=ranges[0].numpy(),
        high_N=ranges[1].numpy(),
        sinks_H=_sinks(x),
        gain_HM=gain_HM,
        known_H=(gain_HM == 1).all(axis=1) if len(gain_HM) else np.ones(x.heads, dtype=np.bool_),
    )


def _sinks(x: AttentionInputs) -> np.ndarray:
    if x.sinks_H is None:
        return np.full(x.heads, -np.inf, dtype=np.float32)
    return x.sinks_H.detach().float().numpy()


def score_rows(
    score: ScoreMap, start: int, stop: int, out_HNE: Tensor | None = None, scratch: Scratch | None = None
) -> ScoreBlock:
    """Twin of `dexviz.kernels.terms.score_rows`."""
    if isinstance(score, PreparedMap):
        return _prepared_rows(score, start, stop, out_HNE, scratch or Scratch())
    if isinstance(score, UnservedMap) or not _served(score.inputs.q_BHND):
        return terms.score_rows(score, start, stop, out_HNE)
    return terms.weighted(score, softmax_rows(score.inputs, start, stop, scratch), out_HNE)


def _prepared_rows(score: PreparedMap, start: int, stop: int, out_HNE: Tensor | None, scratch: Scratch) -> ScoreBlock:
    """Views are NumPy's: torch would give Python's lock back for each."""
    heads, columns = score.inputs.heads, score.inputs.mask.columns(start, stop, torch.device("cpu"))
    assert columns is not None, "columns come with ranges"
    c0, c1 = columns
    shape = (heads, stop - start, c1 - c0)
    groups, members, _, depth = score.q_GIND.shape
    q_GXD = np.ascontiguousarray(score.q_GIND[:, :, start:stop]).reshape(groups, -1, depth)
    a_HRC = scratch.array("maps", shape)
    a_GXC = torch.from_numpy(a_HRC.reshape(groups, members * shape[1], shape[2]))
    torch.bmm(torch.from_numpy(q_GXD), torch.from_numpy(score.k_GDM[:, :, c0:c1]), out=a_GXC)
    s_HRC = scratch.array("scores", shape) if len(score.gain_HM) else a_HRC
    plogp_HR = np.empty(shape[:2], dtype=np.float32)
    low_R, high_R = score.low_N[start:stop], score.high_N[start:stop]
    loops.softmax(a_HRC, low_R, high_R, c0, score.sinks_H, score.gain_HM, s_HRC, plogp_HR)
    if out_HNE is not None:
        o_GXE = torch.bmm(a_GXC, torch.from_numpy(score.v_GME[:, c0:c1]))
        if out_HNE.dtype == torch.float32:
            out_HNE.numpy()[:, start:stop] = o_GXE.numpy().reshape(*shape[:2], -1)
        else:
            out_HNE[:, start:stop] = o_GXE.view(*shape[:2], -1)
    s_SRC, a_SRC, plogp_SR = map(torch.from_numpy, (s_HRC, a_HRC, plogp_HR))
    return ScoreBlock(s_SRC, (a_SRC,), start, stop, c0, c1, plogp_SR, tuple(score.known_H.tolist()))


def softmax_rows(x: AttentionInputs, start: int, stop: int, scratch: Scratch | None = None) -> RowBlock:
    """Twin of `dexviz.kernels.softmax.softmax_rows` for all heads of one prompt."""
    ranges = x.mask.ranges(x.q_BHND.device)
    logits_BHRC, c0, c1 = logits_rows(x, start, stop, masked=ranges is None, scratch=scratch)
    h, r = logits_BHRC.shape[1:3]
    if ranges is None:
        low_R, high_R = np.zeros(r, dtype=np.int32), np.full(r, c1, dtype=np.int32)
    else:
        low_R, high_R = (edge[start:stop].numpy() for edge in ranges)
    z_HRC, none = logits_BHRC[0].contiguous(), np.empty((0, 0), dtype=np.float32)
    loops.softmax(z_HRC.numpy(), low_R, high_R, c0, _sinks(x), none, z_HRC.numpy(), np.empty((h, r), dtype=np.float32))
    return RowBlock(z_HRC[None], start, stop, c0, c1)


def row_sums(
    block: ScoreBlock, *, offset: int, sink: int, local: int, threshold: float, spans: Mapping[str, tuple[int, int]]
) -> RowSums:
    """Twin of `dexviz.kernels.rows.row_sums`."""
    if not _served(block.s_SRC):
        return eager.row_sums(block, offset=offset, sink=sink, local=local, threshold=threshold, spans=spans)
    s_SRC, first = block.s_SRC.contiguous().numpy(), block.start + offset
    ranges_Q2 = np.array([(0, sink), *spans.values()], dtype=np.int64) - block.c0
    sums_ASR = np.empty((loops.SUMS, *s_SRC.shape[:2]), dtype=np.float32)
    argmax_SR = np.empty(s_SRC.shape[:2], dtype=np.int64)
    spans_QSR = np.empty((len(ranges_Q2), *s_SRC.shape[:2]), dtype=np.float32)
    known_S = np.array(block.known_S or (False,) * len(s_SRC))
    loops.row_sums(s_SRC, first - block.c0, local, np.float32(threshold), ranges_Q2, known_S, sums_ASR, argmax_SR, spans_QSR)
    if block.plogp_SR is not None:
        sums_ASR[1, known_S] = block.plogp_SR.numpy()[known_S]
    argmax_SR += block.c0
    total, plogp, net, largest, above, near = map(torch.from_numpy, sums_ASR)
    on_sink, *on_spans = map(torch.from_numpy, spans_QSR)
    return RowSums(
        first=first,
        total_SR=total,
        plogp_SR=plogp,
        net_SR=net,
        max_SR=largest,
        argmax_SR=torch.from_numpy(argmax_SR),
        above_SR=above,
        sink_SR=on_sink,
        local_SR=near,
        spans=dict(zip(spans, on_spans, strict=True)),
    )


class Tiles(tiles.Tiles):
    """Twin of `dexviz.kernels.tiles.Tiles`: the same sums, filled by compiled loops."""

    def add(self, block: ScoreBlock) -> None:
        """Take in one row block; rows outside the edges are passed over."""
        if not (_served(block.s_SRC) and _served(self.sum_SPP)):
            super().add(block)
            return
        columns_3C = np.zeros((3, block.c1 - block.c0), dtype=np.float32)
        sums, highs, lows = (part.numpy() for part in (self.sum_SPP, self.high_SPP, self.low_SPP))
        rows, columns = self.row_edges.numpy(), self.col_edges.numpy() - block.c0
        s_SRC, signed, first = block.s_SRC.contiguous().numpy(), not all(block.known_S or (False,)), block.start + self.offset
        loops.tiles(s_SRC, signed, first, rows, columns, columns_3C, sums, highs, lows)


class Gram(similarity.Gram):
    """Twin of `dexviz.kernels.similarity.Gram`: sums of the upper triangle, mirrored in the end."""

    def add(self, block: ScoreBlock) -> None:
        """Take in one row block."""
        if _served(block.s_SRC):
            loops.gram(block.s_SRC.contiguous().numpy(), self.gram_SS.numpy())
        else:
            self.gram_SS += similarity.inner_products(block).triu()

    def cosine(self) -> Tensor:
        """See the twin."""
        whole = similarity.Gram(len(self.gram_SS), self.gram_SS.device)
        whole.gram_SS += self.gram_SS + self.gram_SS.triu(1).T
        return whole.cosine()


def _finite(x: AttentionInputs) -> bool:
    """Whether no operand of the logits holds NaN or infinity, either of which a sum keeps."""
    return all(bool(part.sum().isfinite()) for part in (x.q_BHND, x.k_BGMD, x.bias_BHNM) if part is not None)


def _served(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32 and not values.requires_grad
