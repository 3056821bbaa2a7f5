"""Random attention inputs of one layer with score terms of every kind, for the kernels and dense in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs, MaskSpec, row_blocks
from dexviz.kernels.terms import ScoreBlock, ScoreMap, ScoreTerm, score_rows
from tests import reference as ref

KINDS = ("attention", "gain", "contribution", "two terms", "two contributions", "row gain")
LAMBDA = 0.6


@dataclass(frozen=True)
class Case:
    """Random attention inputs of one layer, and what S is made of."""

    tokens: int
    kv_heads: int = 2
    groups: int = 1
    width: int = 8
    value_width: int = 5
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kind: str = "attention"
    block: int = 37
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    def __str__(self) -> str:
        special = f"w{self.window}-cap{self.softcap}-{'sinks' if self.sinks else 'plain'}"
        return f"{self.tokens}-{self.groups}-{self.kind}-{special}".replace(" ", "_")


@dataclass(frozen=True)
class Layer:
    """A case worked out: the inputs for the kernels, and the same things dense in numpy."""

    score: ScoreMap
    a_HNN: np.ndarray
    s_SNN: np.ndarray
    o_HNE: np.ndarray

    def blocks(self, rows: int) -> Iterator[ScoreBlock]:
        for start, stop in row_blocks(self.s_SNN.shape[1], rows):
            yield score_rows(self.score, start, stop)


@cache
def layer(case: Case) -> Layer:
    random, n = np.random.default_rng(case.seed), case.tokens
    q = random.normal(size=(case.heads, n, case.width))
    k, v = (random.normal(size=(case.kv_heads, n, width)) for width in (case.width, case.value_width))
    sinks = random.normal(size=case.heads) if case.sinks else None
    scale, mask = 0.7, ref.causal_mask(n, case.window)
    visible = torch.from_numpy(mask)[None, None]
    block = None if case.window is None else lambda r0, r1, c0, c1: visible[:, :, r0:r1, c0:c1]
    inputs = AttentionInputs(
        *(torch.from_numpy(x)[None] for x in (q, k, v)),
        scale,
        MaskSpec(n, n, block),
        case.softcap,
        None if sinks is None else torch.from_numpy(sinks),
    )
    a = ref.attention(q, k, scale, mask, case.softcap, sinks)
    terms = terms_of(case.kind, a, ref.per_query_head(v, case.heads), random)
    s = sum(a[list(t.heads_S)] * low_rank(t, n) for t in terms)
    return Layer(ScoreMap(inputs, terms), a, s, ref.outputs(a, v))


def terms_of(kind: str, a_HNN: np.ndarray, v_HNE: np.ndarray, random: np.random.Generator) -> tuple[ScoreTerm, ...]:
    """Score terms as DESIGN's table has them; gains of both signs."""
    heads, n = a_HNN.shape[:2]
    every, half = tuple(range(heads)), heads // 2
    if kind == "gain":
        return (ScoreTerm(every, w_SMK=torch.from_numpy(random.normal(size=(heads, n, 1)))),)
    if kind == "row gain":
        return (ScoreTerm(every, u_SNK=torch.from_numpy(random.normal(size=(heads, n, 1)))),)
    if kind == "contribution":
        return (ScoreTerm(every, along(np.einsum("hij,hje->hie", a_HNN, v_HNE)), torch.from_numpy(v_HNE)),)
    if kind == "attention" or not half:
        return (ScoreTerm(every),)
    plus, minus = every[:half], every[half : 2 * half]
    if kind == "two terms":
        return ScoreTerm(plus), ScoreTerm(minus, torch.full((half, n, 1), -LAMBDA, dtype=torch.float64))
    signed = a_HNN[list(plus)] - LAMBDA * a_HNN[list(minus)]
    u, v = along(np.einsum("hij,hje->hie", signed, v_HNE[:half])), torch.from_numpy(v_HNE[:half])
    return ScoreTerm(plus, u, v), ScoreTerm(minus, -LAMBDA * u, v)


def along(o_SNE: np.ndarray) -> Tensor:
    return torch.from_numpy(o_SNE / (o_SNE**2).sum(axis=-1, keepdims=True))


def low_rank(term: ScoreTerm, n: int) -> np.ndarray:
    """U Wᵀ, [S, N, N]; ones where U or W is left out."""
    given = [x for x in (term.u_SNK, term.w_SMK) if x is not None]
    ones = np.ones((len(term.heads_S), n, given[0].shape[-1] if given else 1))
    u, w = (ones if x is None else x.numpy() for x in (term.u_SNK, term.w_SMK))
    return u @ w.swapaxes(1, 2) if given else ones
