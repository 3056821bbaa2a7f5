"""Signed score maps as sums of softmax maps times low-rank matrices: S = Σ_t A_t ∘ (U_t W_tᵀ)  (README, "What is computed").

Attention is one term with U = W = 1; DEX has a gain per key (U = 1, W = ρ); DIFF has two terms; contribution scores have
U = o / ‖o‖², W = v. Everything downstream takes S in this form.

Axes: S score heads (query heads, or logical heads of DIFF), N queries, M keys, K rank of a term, R rows and C columns
of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs, softmax_rows


@dataclass(frozen=True)
class ScoreTerm:
    """One softmax map a score head, times U Wᵀ. `None` for U or W stands for a column of ones."""

    heads_S: tuple[int, ...]
    """Softmax head that each score head reads."""
    u_SNK: Tensor | None = None
    w_SMK: Tensor | None = None

    def of(self, head: int) -> ScoreTerm:
        """The same term for one score head."""
        pick = slice(head, head + 1)
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

    def head(self, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One head's part: (S [R, C], the softmax map of each term)."""
        return self.s_SRC[index], tuple(a_SRC[index] for a_SRC in self.a_TSRC)


def score_rows(score: ScoreMap, start: int, stop: int) -> ScoreBlock:
    """S of all score heads for the rows [start, stop). One prompt (batch of one)."""
    block = softmax_rows(score.inputs, start, stop)
    every = tuple(range(score.inputs.heads))
    a_TSRC = tuple(block.a_BHRC[0] if term.heads_S == every else block.a_BHRC[0, list(term.heads_S)] for term in score.terms)
    s_SRC = _summed(score.terms, a_TSRC, slice(start, stop), slice(block.c0, block.c1))
    return ScoreBlock(s_SRC, a_TSRC, start, stop, block.c0, block.c1)


def head_rows(score: ScoreMap, head: int, start: int, stop: int) -> ScoreBlock:
    """S of one score head for the rows [start, stop): the same numbers as `score_rows`, at one head's cost."""
    terms = tuple(term.of(head) for term in score.terms)
    blocks = [softmax_rows(score.inputs, start, stop, head=term.heads_S[0]) for term in terms]
    a_TSRC = tuple(block.a_BHRC[0] for block in blocks)
    c0, c1 = blocks[0].c0, blocks[0].c1
    return ScoreBlock(_summed(terms, a_TSRC, slice(start, stop), slice(c0, c1)), a_TSRC, start, stop, c0, c1)


def _summed(terms: tuple[ScoreTerm, ...], a_TSRC: tuple[Tensor, ...], rows: slice, cols: slice) -> Tensor:
    parts = [_weighted(term, a_SRC, rows, cols) for term, a_SRC in zip(terms, a_TSRC, strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


def _weighted(term: ScoreTerm, a_SRC: Tensor, rows: slice, cols: slice) -> Tensor:
    u_SRK = None if term.u_SNK is None else term.u_SNK[:, rows].to(a_SRC.dtype)
    w_SKC = None if term.w_SMK is None else term.w_SMK[:, cols].to(a_SRC.dtype).transpose(-1, -2)
    if u_SRK is None and w_SKC is None:
        return a_SRC
    if u_SRK is None:
        assert w_SKC is not None
        return a_SRC * w_SKC.sum(dim=-2, keepdim=True)
    if w_SKC is None:
        return a_SRC * u_SRK.sum(dim=-1, keepdim=True)
    return a_SRC * (u_SRK @ w_SKC)
