"""Signed score maps as sums of softmax maps times low-rank matrices: S = Σ_t A_t ∘ (U_t W_tᵀ)  (README, "What is computed").

Attention is one term with U = W = 1; DEX has a gain per key (U = 1, W = ρ); DIFF has two terms; contribution scores have
U = o / ‖o‖², W = v. Everything downstream takes S in this form.

Axes: S score heads (query heads, or logical heads of DIFF), N queries, M keys, K rank of a term, R rows and C columns
of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs, RowBlock, Scratch, grouped_matmul, softmax_rows

Along = Callable[[Tensor, int, int], Tensor]
"""Makes U [S, R, K] of the rows [start, stop) from their attention output [H, R, E]."""


@dataclass(frozen=True)
class ScoreTerm:
    """One softmax map a score head, times U Wᵀ. `None` for U or W stands for a column of ones."""

    heads_S: tuple[int, ...]
    """Softmax head that each score head reads."""
    u_SNK: Tensor | Along | None = None
    """A function where U depends on the attention output, which the pass itself computes."""
    w_SMK: Tensor | None = None

    def of(self, head: int) -> ScoreTerm:
        """The same term for one score head."""
        pick = slice(head, head + 1)
        assert not callable(self.u_SNK), "one head's map takes its U from an output that is known"
        return ScoreTerm(
            self.heads_S[pick],
            None if self.u_SNK is None else self.u_SNK[pick],
            None if self.w_SMK is None else self.w_SMK[pick],
        )


@dataclass(frozen=True)
class ScoreMap:
    """A layer's score maps: where the softmax maps come from, and the terms that make S of them."""

    inputs: AttentionInputs
    terms: tuple[ScoreTerm, ...]

    @property
    def heads(self) -> int:
        """Score heads S."""
        return len(self.terms[0].heads_S)


@dataclass(frozen=True)
class ScoreBlock:
    """S of the query rows [start, stop) over the keys [c0, c1); `a_TSRC` holds the softmax map of each term."""

    s_SRC: Tensor
    a_TSRC: tuple[Tensor, ...]
    start: int
    stop: int
    c0: int
    c1: int
    plogp_SR: Tensor | None = None
    """Σ|S| ln |S| of the rows of `known_S`."""
    known_S: tuple[bool, ...] = ()
    """Score heads whose S is a softmax map as it is, which is positive and whose Σ|S| ln |S| is known."""

    def head(self, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One head's part: (S [R, C], the softmax map of each term)."""
        return self.s_SRC[index], tuple(a_SRC[index] for a_SRC in self.a_TSRC)


_LEAST_ELEMENTS, _MOST_ELEMENTS = 100_000, 800_000
"""Entries of all heads' maps in a block: at most 3.2 MB."""
_SHARES = 4
"""Blocks a thread, at least, so that all threads end at about the same time."""
_ROW_STEP, _MOST_ROWS = 16, 256


def row_blocks(score: ScoreMap) -> list[tuple[int, int]]:
    """Half-open ranges of query rows whose visible parts hold about as many entries.

    A row sees at most one key more than the row before: r rows from one with w keys on take up to r (w + r) entries a head.
    """
    mask, device = score.inputs.mask, score.inputs.q_BHND.device
    share = score.heads * mask.queries * mask.keys // 2 // (_SHARES * torch.get_num_threads())
    elements = min(max(share, _LEAST_ELEMENTS), _MOST_ELEMENTS)
    blocks, start = [], 0
    while start < mask.queries:
        first, last = mask.columns(start, start + 1, device) or (0, mask.keys)
        half = (last - first) / 2
        fitting = int(math.sqrt(half**2 + elements / score.heads) - half) // _ROW_STEP * _ROW_STEP
        stop = min(start + min(max(fitting, _ROW_STEP), _MOST_ROWS), mask.queries)
        blocks.append((start, stop))
        start = stop
    return blocks


def promoted(score: ScoreMap) -> ScoreMap:
    """The same map from inputs that many blocks can read without converting them again."""
    return replace(score, inputs=score.inputs.promoted())


def score_rows(
    score: ScoreMap, start: int, stop: int, out_HNE: Tensor | None = None, scratch: Scratch | None = None
) -> ScoreBlock:
    """S of all score heads for the rows [start, stop). One prompt (batch of one).

    Args:
        out_HNE: receives the attention output O of these rows where it is given.
        scratch: memory that twins may use for the block, which then lives until the next one.
    """
    return weighted(score, softmax_rows(score.inputs, start, stop), out_HNE)


def weighted(score: ScoreMap, block: RowBlock, out_HNE: Tensor | None) -> ScoreBlock:
    """S, and O where it is asked for, from the probabilities of a block of rows."""
    start, stop = block.start, block.stop
    if out_HNE is not None:
        v_BGCE = score.inputs.v_BGME[:, :, block.c0 : block.c1].to(block.a_BHRC.dtype)
        out_HNE[:, start:stop] = grouped_matmul(block.a_BHRC, v_BGCE)[0]
    terms = tuple(resolved(term, start, stop, out_HNE) for term in score.terms)
    every = tuple(range(score.inputs.heads))
    a_TSRC = tuple(block.a_BHRC[0] if term.heads_S == every else block.a_BHRC[0, list(term.heads_S)] for term in terms)
    s_SRC = _summed(terms, a_TSRC, slice(block.c0, block.c1))
    return ScoreBlock(s_SRC, a_TSRC, start, stop, block.c0, block.c1)


def resolved(term: ScoreTerm, start: int, stop: int, out_HNE: Tensor | None) -> ScoreTerm:
    """The term with U of the rows [start, stop) alone."""
    if not callable(term.u_SNK):
        return term if term.u_SNK is None else replace(term, u_SNK=term.u_SNK[:, start:stop])
    assert out_HNE is not None, "U of these scores is made from the attention output"
    return replace(term, u_SNK=term.u_SNK(out_HNE[:, start:stop], start, stop))


def head_rows(score: ScoreMap, head: int, start: int, stop: int) -> ScoreBlock:
    """S of one score head for the rows [start, stop): the same numbers as `score_rows`, at one head's cost."""
    terms = tuple(resolved(term.of(head), start, stop, None) for term in score.terms)
    blocks = [softmax_rows(score.inputs, start, stop, head=term.heads_S[0]) for term in terms]
    a_TSRC = tuple(block.a_BHRC[0] for block in blocks)
    c0, c1 = blocks[0].c0, blocks[0].c1
    return ScoreBlock(_summed(terms, a_TSRC, slice(c0, c1)), a_TSRC, start, stop, c0, c1)


def _summed(terms: tuple[ScoreTerm, ...], a_TSRC: tuple[Tensor, ...], cols: slice) -> Tensor:
    parts = [_weighted(term, a_SRC, cols) for term, a_SRC in zip(terms, a_TSRC, strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


def _weighted(term: ScoreTerm, a_SRC: Tensor, cols: slice) -> Tensor:
    assert not callable(term.u_SNK)
    u_SRK = None if term.u_SNK is None else term.u_SNK.to(a_SRC.dtype)
    w_SKC = None if term.w_SMK is None else term.w_SMK[:, cols].to(a_SRC.dtype).transpose(-1, -2)
    if u_SRK is None and w_SKC is None:
        return a_SRC
    if u_SRK is None:
        assert w_SKC is not None
        return a_SRC * w_SKC.sum(dim=-2, keepdim=True)
    if w_SKC is None:
        return a_SRC * u_SRK.sum(dim=-1, keepdim=True)
    return a_SRC * (u_SRK @ w_SKC)
