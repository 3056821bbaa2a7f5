"""Plain data that crosses every boundary: numpy, no torch, nothing that needs a device.

Axes: L layers, H query heads, N tokens, K top tokens, P screen tiles, R rows and C columns of a map.
Layers, heads and positions are 0-based; spans are half-open. Formulas: README, "What is computed".
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from dexviz.errors import CaptureError

Score = Literal["signed", "attention", "contribution"]
Space = Literal["value", "residual"]
ViewName = Literal["base", "variant"]
SCORES: tuple[str, ...] = get_args(Score)
SPACES: tuple[str, ...] = get_args(Space)
VIEWS: tuple[str, ...] = get_args(ViewName)
PROJECTIONS = ("W_Q", "W_K", "W_V", "W_O")
"""Weights of attention, by which an adapter says what it changes beside DEX."""
SIMILARITIES = ("cosine", "cka", "js")
MAX_POOL = 1024


@dataclass(frozen=True)
class Statistic:
    """What a per-head statistic means, with the defaults of `CaptureRequest`: for tooltips, captions and table headers."""

    name: str
    label: str
    unit: str
    definition: str
    signed: bool = False


STATISTICS: dict[str, Statistic] = {
    s.name: s
    for s in (
        Statistic(
            "entropy", "Entropy", "nats", "Entropy of the row's shares |S| / Σ|S|; exp of it is the number of keys in use."
        ),
        Statistic("sink", "Sink mass", "share", "Share of |S| on the first token of the prompt."),
        Statistic("local", "Local mass", "share", "Share of |S| on the last 8 tokens, the query itself among them."),
        Statistic("sparsity", "Sparsity", "share", "Share of causal entries (key ≤ query) with |S| < 0.001."),
        Statistic("negative", "Negative share", "share", "Share of |S| that is negative."),
        Statistic("net", "Net signed mass", "sum of S", "Sum of the row's signed scores; 1 for plain attention.", signed=True),
        Statistic("max", "Largest score", "|S|", "Largest |S| of the row."),
    )
}


@dataclass(frozen=True)
class Tokens:
    """A prompt as the model reads it.

    `ids` int64 [N]; `labels` N readable strings, one a column; `text` the text that was tokenised (after the chat
    template, if one was applied); `offsets` int64 [N, 2], the characters of `text` that a token covers; `special` bool [N].
    """

    ids: np.ndarray
    labels: tuple[str, ...]
    text: str
    offsets: np.ndarray
    special: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def span_of(self, start: int, stop: int) -> tuple[int, int]:
        """Half-open token span that covers the characters [start, stop) of `text`.

        Raises:
            CaptureError: no token covers any of these characters.
        """
        inside = np.flatnonzero((self.offsets[:, 0] < stop) & (self.offsets[:, 1] > start))
        if not len(inside):
            raise CaptureError(f"characters within 0..{len(self.text)}", f"{start}..{stop}", "Mark text that is in the prompt.")
        return int(inside[0]), int(inside[-1]) + 1


@dataclass(frozen=True)
class CaptureRequest:
    """What to compute about every head in one pass; the defaults give the statistics alone."""

    maps: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs whose full N × N map is wanted; each costs 8·N² bytes."""
    pool: int | None = None
    """Screen resolution P of the tile means, 1 to 1,024; None for none."""
    similarity: bool | tuple[str, ...] = False
    """True for cosine and CKA between the heads of a layer; or names out of cosine, cka, js."""
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Named half-open token spans; each adds the statistic "span:<name>", its share of |S|."""
    score: Score = "signed"
    """Which score map S stands for."""
    space: Space = "value"
    """Where DEX gains ρ are measured: in value space, or in residual space (vectors taken through W_O)."""
    sink: int = 1
    """How many first tokens count as the sink."""
    local: int = 8
    """How many last tokens up to the query count as local."""
    threshold: float = 1e-3
    """τ: scores below it in magnitude count as sparse."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "maps", tuple((int(layer), int(head)) for layer, head in self.maps))
            object.__setattr__(self, "spans", {str(k): (int(a), int(b)) for k, (a, b) in dict(self.spans).items()})
            if not isinstance(self.similarity, bool):
                object.__setattr__(self, "similarity", tuple(self.similarity))
            whole = [None if value is None else operator.index(value) for value in (self.pool, self.sink, self.local)]
            object.__setattr__(self, "threshold", float(self.threshold))
        except (TypeError, ValueError) as error:
            raise CaptureError(
                "maps of (layer, head), spans of name → (start, stop), whole numbers for pool, sink and local",
                str(error),
                "Correct the request.",
            ) from error
        for name, value in zip(("pool", "sink", "local"), whole, strict=True):
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        def refuse(name: str, expected: str, got: object) -> None:
            raise CaptureError(f"`{name}` to be {expected}", repr(got), f"Change `{name}` in the request.")

        if self.score not in SCORES:
            refuse("score", f"one of {', '.join(SCORES)}", self.score)
        if self.space not in SPACES:
            refuse("space", f"one of {', '.join(SPACES)}", self.space)
        if self.pool is not None and not 1 <= self.pool <= MAX_POOL:
            refuse("pool", f"between 1 and {MAX_POOL}", self.pool)
        if unknown := set(self.similarities) - set(SIMILARITIES):
            refuse("similarity", f"names out of {', '.join(SIMILARITIES)}", sorted(unknown))
        if self.sink < 1 or self.local < 1:
            refuse("sink, local", "at least 1", (self.sink, self.local))
        if not 0 < self.threshold < 1:
            refuse("threshold", "between 0 and 1", self.threshold)

    @property
    def similarities(self) -> tuple[str, ...]:
        """Names of the similarity matrices that are wanted."""
        if isinstance(self.similarity, bool):
            return ("cosine", "cka") if self.similarity else ()
        return self.similarity

    def check_against(self, layers: int, heads: int, tokens: int) -> None:
        """Raise a CaptureError where maps or spans lie outside the model or the prompt."""
        for layer, head in self.maps:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise CaptureError(
                    f"maps within layers 0..{layers - 1} and heads 0..{heads - 1}",
                    f"L{layer}·H{head}",
                    "Choose a head the model has.",
                )
        for name, (start, stop) in self.spans.items():
            if not 0 <= start < stop <= tokens:
                raise CaptureError(
                    f"span {name!r} half-open within 0..{tokens}",
                    f"({start}, {stop})",
                    "Choose a span of tokens inside the prompt.",
                )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; `from_json` inverts it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureRequest:
        """Inverse of `to_json`."""
        return cls(**data)


@dataclass(frozen=True)
class HeadMap:
    """One head's score map, or a window or tiling of it.

    `scores` float32 [R, C] is S; `attention` float32 [R, C] is A (DIFF: A₁). `row_edges` int64 [R + 1] and `col_edges`
    int64 [C + 1] are token positions: row r covers queries row_edges[r] to row_edges[r + 1] − 1. Steps of one mean exact
    entries; wider steps mean tiles, whose value is the mean of S over their causal entries (NaN where there are none).
    `extreme` [R, C] is then the entry of largest magnitude. `gain` float32 [N] is ρ of DEX on a selected head, else None;
    `residue` float32 [N] is ε. `terms` holds the softmax maps that S is made of where there are several.
    """

    layer: int
    head: int
    score: str
    scores: np.ndarray
    attention: np.ndarray
    row_edges: np.ndarray
    col_edges: np.ndarray
    extreme: np.ndarray | None = None
    gain: np.ndarray | None = None
    residue: np.ndarray | None = None
    terms: tuple[np.ndarray, ...] = ()

    @property
    def exact(self) -> bool:
        """True where every entry is one (query, key) pair."""
        return bool((np.diff(self.row_edges) == 1).all() and (np.diff(self.col_edges) == 1).all())


@dataclass(frozen=True)
class TopTokens:
    """Most probable next tokens after the last position: `ids` int64 [K], `labels`, `prob` float32 [K]."""

    ids: np.ndarray
    labels: tuple[str, ...]
    prob: np.ndarray


@dataclass(frozen=True)
class Capture:
    """Everything one pass measured about one view of a model on one prompt."""

    tokens: Tokens
    request: CaptureRequest
    stats: Mapping[str, np.ndarray]
    """Statistic name → float32 [L, H, N], one value a query row; NaN where its denominator is zero."""
    lam: np.ndarray
    """λ per layer, float32 [L]; zeros without DEX or DIFF."""
    selected: np.ndarray
    """bool [L, H]: heads that DEX adapts."""
    logits_top: TopTokens
    provenance: Mapping[str, Any]
    """Model and its fingerprint, view, adapter with a digest of its weights, dtype, device, versions, date: with `tokens` and
    `request`, enough to do it again."""
    maps: Mapping[tuple[int, int], HeadMap] = field(default_factory=dict)
    pooled: np.ndarray | None = None
    """float32 [L, H, P, P]: mean of S over the causal entries of each tile; NaN where a tile has none."""
    pooled_extreme: np.ndarray | None = None
    """float32 [L, H, P, P]: the entry of largest magnitude in each tile."""
    similarity: Mapping[str, np.ndarray] = field(default_factory=dict)
    """"cosine", "cka", "js" → float32 [L, H, H]; 1 = the same; NaN where a head's scores or outputs are all zero."""
    strongest: np.ndarray | None = None
    """int32 [L, H, N]: key of largest |S| of each query row, the first one of equals; −1 where a row has no mass."""
    delta_norm: np.ndarray | None = None
    """‖O' − O‖ / ‖O‖ per head, Frobenius over tokens, float32 [L, H]; None where there is no DEX."""
    delta_cosine: np.ndarray | None = None
    """cos(O, O') per head over tokens, float32 [L, H]; None where there is no DEX."""

    @property
    def layers(self) -> int:
        return self.stats["entropy"].shape[0]

    @property
    def heads(self) -> int:
        return self.stats["entropy"].shape[1]

    def mean(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Statistic averaged over the chosen query rows, ignoring blanks: float32 [L, H], NaN where all are blank.

        Raises:
            CaptureError: the capture does not hold that statistic.
        """
        if name not in self.stats:
            raise CaptureError(f"a statistic out of {', '.join(self.stats)}", repr(name), "Ask for one of these.")
        values = self.stats[name][:, :, rows]
        known = np.isfinite(values)
        count = known.sum(axis=-1)
        total = np.where(known, values, 0).sum(axis=-1, dtype=np.float64)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


@dataclass(frozen=True)
class ProbeResult:
    """A probe's answer with its labels: `values` has one axis for each of `axes`, `labels[axis]` names its entries."""

    title: str
    unit: str
    definition: str
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    values: np.ndarray
    signed: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)


def head_name(layer: int, head: int) -> str:
    """The way a head is written everywhere: L12·H3."""
    return f"L{layer}·H{head}"
