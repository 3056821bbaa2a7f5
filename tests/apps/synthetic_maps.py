"""Random maps with known values, for tests of the attention map: no model behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from app.components.attention_map import EXACT_LIMIT, MapEvent, pool_for
from dexviz.records import HeadMap, Tokens

HOSTILE = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "&lt;b&gt;",
    "\u202eevil",
    "مرحبا",
    "你好",
    "👩‍👩‍👧",
    "\x00\x07\x1b",
    "\"quote'",
    "\\n",
    "${7*7}",
    "a" * 300,
)


@dataclass(frozen=True)
class Case:
    """What to make: labels (repeated up to `count` of them), signed or not, and how far the variant is from the base."""

    labels: tuple[str, ...]
    count: int
    signed: bool = True
    effect: float = 0.3
    alone: bool = False


CASES = {
    "signed": Case(("The", "·quick", "·brown", "·fox", "·jumps", "·over", "·the", "·lazy", "·dog", "."), 12),
    "attention": Case(("The", "·quick", "·brown", "·fox"), 24, signed=False, effect=0.01),
    "repeats": Case(("the", "·cat", "the", "·dog"), 4),
    "hostile": Case(HOSTILE, len(HOSTILE)),
    "one": Case(("Hello",), 1, signed=False),
    "equal": Case(("a", "b", "c"), 6, effect=0.0),
    "alone": Case(("a", "b", "c"), 6, alone=True),
    "middle": Case(("word", "·of", "·text"), 90, signed=False),
    "limit": Case(("word", "·of", "·longer", "·text"), EXACT_LIMIT),
    "tiled": Case(("word", "·of", "·text", ","), 1500, signed=False),
    "long": Case(("word", "·of", "·text", ","), 3000, signed=False),
}


@dataclass(frozen=True)
class SyntheticMaps:
    """What the component takes, and the dense exact scores behind it."""

    base: HeadMap
    variant: HeadMap | None
    tokens: Tokens
    strips: tuple[tuple[HeadMap, HeadMap | None], ...]
    dense: tuple[np.ndarray, np.ndarray]


def make_tokens(labels: tuple[str, ...], count: int) -> Tokens:
    """`count` tokens whose labels repeat."""
    names = tuple(labels[i % len(labels)] for i in range(count))
    zeros = np.zeros((count, 2), np.int64)
    return Tokens(ids=np.arange(count), labels=names, text="", offsets=zeros, special=np.zeros(count, bool))


def dense_scores(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Causal rows that sum to one in the base, with a sink and locality; the variant differs by gains per key."""
    rng = np.random.default_rng(seed)
    n = case.count
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    logits = rng.normal(size=(n, n)).astype(np.float32) * 1.5 - distance / 40
    logits[:, 0] += 3
    logits[distance < 0] = -np.inf
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    gains = 1 - case.effect * rng.uniform(0, 1, n).astype(np.float32)
    if case.signed:
        gains = np.where(rng.random(n) < 0.3, -gains, gains)
    base = scores * (np.where(rng.random((n, n)) < 0.3, -1, 1) if case.signed else 1)
    return base.astype(np.float32), (base * (gains if case.effect else 1)).astype(np.float32)


def cut(scores: np.ndarray, window: tuple[int, int, int, int] | None = None, pool: int | None = None) -> HeadMap:
    """A HeadMap of dense scores, as the engine would cut or tile it."""
    n = len(scores)
    r0, r1, c0, c1 = window or (0, n, 0, n)
    rows, cols = (np.unique(np.linspace(a, b, min(pool or b - a, b - a) + 1).astype(np.int64)) for a, b in ((r0, r1), (c0, c1)))
    causal = np.tril(np.ones((n, n), bool))
    summed, count = (tiles(np.where(causal, x, 0), rows, cols) for x in (scores.astype(np.float64), np.ones((n, n))))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (summed / count).astype(np.float32)
    exact = pool is None
    values = scores[r0:r1, c0:c1] if exact else means
    extreme = None if exact else largest(np.where(causal, scores, 0), rows, cols)
    return HeadMap(3, 0, "signed", values, np.abs(values), row_edges=rows, col_edges=cols, extreme=extreme)


def tiles(values: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Sums over tiles."""
    return np.add.reduceat(np.add.reduceat(values[: rows[-1], : cols[-1]], rows[:-1], 0), cols[:-1], 1)


def largest(values: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """The entry of largest magnitude in each tile."""
    high, low = (f.reduceat(f.reduceat(values, rows[:-1], 0), cols[:-1], 1) for f in (np.maximum, np.minimum))
    return np.where(high >= -low, high, low)


def synthetic_maps(case: Case, seed: int = 0, event: MapEvent | None = None) -> SyntheticMaps:
    """The maps of a case; the seed is also the head: exact or tiled by size, windowed by the event, with strips for a lock."""
    event = event or MapEvent()
    dense = dense_scores(case, seed)
    window = event.window(case.count)
    pool = None if window else pool_for(case.count)
    score = "signed" if case.signed else "attention"
    base, variant = (replace(cut(scores, window, pool), head=seed, score=score) for scores in dense)
    strip = event.strip_window(case.count)
    strips = (tuple(cut(scores, strip) for scores in dense),) if strip and pool_for(case.count) else ()
    tokens = make_tokens(case.labels, case.count)
    return SyntheticMaps(base, None if case.alone else variant, tokens, strips, dense)
