"""Noise measured: what is marked in a prompt, what a head's rows put on it and beside it, and a battery of such prompts.

    signal = mass per needle token        noise = mass per other token        SNR = signal / noise

Mass is |S| / Σ|S| of a row. Sink (the first token) and question are neither needle nor noise, and keys that the row does not
see do not exist. SNR of many rows, prompts or heads is the ratio of the mean signal and the mean noise.
Source: README, "What is computed".

Axes: L layers, S score heads (logical ones of a DIFF Transformer), P prompts. Plain data: numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dexviz.bootstrap import Comparison, Interval
from dexviz.errors import PromptError
from dexviz.records import Score, Space, Tokens, ViewName

Span = tuple[int, int]
MEASURES = ("signal", "noise", "snr", "sink", "negative", "net")
"""What is measured of every head; `net`, the sum of S itself, is no share."""


@dataclass(frozen=True)
class Marks:
    """What is marked in a prompt, by half-open spans of its characters as typed."""

    needle: tuple[Span, ...]
    question: Span | None = None
    """Left out of the noise, as a question repeats the needle's words; None: no question."""

    def __post_init__(self) -> None:
        spans = [*self.needle, *([] if self.question is None else [self.question])]
        if not self.needle or not all(0 <= start < stop for start, stop in spans):
            got = ", ".join(f"[{start}, {stop})" for start, stop in spans) or "none"
            raise PromptError("at least one needle, each a span of characters that is not empty", got, "Mark some text.")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Marks:
        """Inverse of `dataclasses.asdict`."""
        question = data.get("question")
        return cls(
            tuple((int(start), int(stop)) for start, stop in data["needle"]),
            None if question is None else (int(question[0]), int(question[1])),
        )


@dataclass(frozen=True, eq=False)
class HeadNoise:
    """Every head of one view on one prompt, means over the chosen rows; float64 [L, S] each, NaN where a row has no mass."""

    signal: np.ndarray
    noise: np.ndarray
    snr: np.ndarray
    sink: np.ndarray
    """Share of the mass on the first token."""
    negative: np.ndarray
    """Share of the mass below zero."""
    net: np.ndarray
    """Sum of S."""

    def over_heads(self) -> dict[str, float]:
        """Means over all heads; SNR is the ratio of the means."""
        means = {name: float(np.nanmean(getattr(self, name))) for name in MEASURES}
        means["snr"] = ratio(means["signal"], means["noise"])
        return means


@dataclass(frozen=True, eq=False)
class MarkedTokens:
    """A marked prompt as one view reads it."""

    tokens: Tokens
    needle: tuple[Span, ...]
    """Half-open spans of tokens."""
    question: Span | None
    rows: tuple[int, ...]
    """Query rows that are measured."""


@dataclass(frozen=True, eq=False)
class NoiseOnPrompt:
    """Answer of `dexviz.noise`: both views on one marked prompt."""

    marks: Marks
    score: Score
    space: Space
    base_read: MarkedTokens
    variant_read: MarkedTokens | None
    """Other tokens than those of `base_read` where the two models have different tokenizers."""
    base: HeadNoise
    variant: HeadNoise | None
    """None where the pair is a base alone."""
    answer: str | None
    answer_log_probability: Mapping[ViewName, float] | None
    """View → log-probability of the answer after the prompt, nats; None where no answer was given."""
    provenance: Mapping[str, Any]

    def heads_of(self, view: ViewName) -> HeadNoise:
        """The heads of a view; the base's where there is no variant."""
        return self.base if view == "base" or self.variant is None else self.variant

    @property
    def same_heads(self) -> bool:
        """Whether head (l, h) of the variant is that of the base, so that a change per head means something: DEX."""
        return self.variant is not None and bool(self.provenance.get("adapter"))

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; NaN becomes null."""
        answers: Mapping[ViewName, float] = self.answer_log_probability or {}
        return {
            "marks": asdict(self.marks),
            "score": self.score,
            "space": self.space,
            "answer": self.answer,
            "base": _view(self.base_read, self.base, answers.get("base")),
            "variant": None
            if self.variant is None or self.variant_read is None
            else _view(self.variant_read, self.variant, answers.get("variant")),
            "provenance": dict(self.provenance),
        }


def _view(read: MarkedTokens, heads: HeadNoise, answer: float | None) -> dict[str, Any]:
    return {
        "tokens": len(read.tokens),
        "needle": [list(span) for span in read.needle],
        "question": None if read.question is None else list(read.question),
        "rows": list(read.rows),
        "mean": {name: plain(value) for name, value in heads.over_heads().items()},
        "heads": {name: plain(getattr(heads, name)) for name in MEASURES},
        "answer_log_probability": answer,
    }


@dataclass(frozen=True)
class NoiseTerm:
    """What one head subtracts on one prompt: N = A − S; λ A₂ of a DIFF Transformer, (1 − ρ_j) A_ij derived of DEX.

    Numbers are None where they mean nothing: no term, or too few keys.
    """

    layer: int
    head: int
    tokens: int
    kind: str
    """"diff", "dex", or "none" for a head from which nothing is subtracted."""
    rank: float | None
    """Effective rank of N: exp of the entropy of its normalised singular values; 1 to N."""
    attention_rank: float
    """The same of A."""
    energy: float
    """‖N‖ / ‖A‖, Frobenius."""
    correlation_salient: float | None
    """DIFF: correlation of A₁ and A₂ over a row's most salient keys, the top tenth by A₁; mean over rows."""
    correlation_rest: float | None
    """The same over the row's other keys."""
    rows: int
    """Rows that have enough keys for both."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BatteryRequest:
    """A grid of needle prompts; they are made up, so that every number can be made again from this."""

    lengths: tuple[int, ...] | None = None
    """Tokens a prompt; longer ones than the models read are cut to what they do. None: 256 and 512 in prose, and up to what the
    pair was trained on in the retrieval language."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where the fact stands: 0 before all else, 1 right before the question."""
    per_cell: int = 4
    """Prompts of each length and depth."""
    seed: int = 0
    score: Score = "signed"
    space: Space = "value"

    def __post_init__(self) -> None:
        lengths = (1,) if self.lengths is None else self.lengths
        fine = lengths and self.depths and self.per_cell >= 1 and min(lengths, default=0) >= 1 and self.seed >= 0
        if not fine or not all(0 <= depth <= 1 for depth in self.depths):
            raise PromptError(
                "lengths of at least one token, depths between 0 and 1, at least one prompt a cell, a seed of 0 or more",
                f"lengths {self.lengths}, depths {self.depths}, {self.per_cell} a cell, seed {self.seed}",
                "Correct the battery.",
            )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BatteryRequest:
        """Inverse of `dataclasses.asdict`."""
        lengths = None if data["lengths"] is None else tuple(data["lengths"])
        return cls(**{**data, "lengths": lengths, "depths": tuple(data["depths"])})


@dataclass(frozen=True)
class BatteryPrompt:
    """One prompt of a battery and its answers; view → value, the variant's where there is one."""

    length: int
    """Cell; the prompt has about as many tokens."""
    depth: float
    tokens: int
    seed: tuple[int, ...]
    kind: str
    position: float
    """First token of the needle as a share of the tokens before the question."""
    right: Mapping[ViewName, bool]
    """Whether the right answer is likelier than every wrong one."""
    answer_log_probability: Mapping[ViewName, float]
    """Nats."""


@dataclass(frozen=True, eq=False)
class HeadIntervals:
    """A number of every head with its bootstrap interval over prompts; float64 [L, S], ends NaN where there is one prompt."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False)
class HeadComparison:
    """As `Comparison`, per head; no change where the two views' heads are not the same ones."""

    base: HeadIntervals
    variant: HeadIntervals | None = None
    change: HeadIntervals | None = None


@dataclass(frozen=True)
class BatteryRow:
    """Means over heads and some of the prompts: all, those of one length, of one depth, or of one cell."""

    length: int | None
    depth: float | None
    prompts: int
    measures: Mapping[str, Comparison]
    """Those of `MEASURES`, "answer" (log-probability, nats) and "accuracy"."""


@dataclass(frozen=True, eq=False)
class BatteryReport:
    """Answer of `dexviz.noise_battery`."""

    request: BatteryRequest
    language: str
    """"prose", or "retrieval" for a model of the retrieval language."""
    prompts: tuple[BatteryPrompt, ...]
    heads: Mapping[str, HeadComparison]
    """Measure → every head, over all prompts."""
    rows: tuple[BatteryRow, ...]
    """All prompts first; then by length, by depth, by cell."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def overall(self) -> BatteryRow:
        return self.rows[0]

    def by_length(self) -> tuple[BatteryRow, ...]:
        return tuple(row for row in self.rows if row.length is not None and row.depth is None)

    def by_depth(self) -> tuple[BatteryRow, ...]:
        return tuple(row for row in self.rows if row.length is None and row.depth is not None)

    def cells(self) -> tuple[BatteryRow, ...]:
        return tuple(row for row in self.rows if row.length is not None and row.depth is not None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; NaN becomes null."""
        return {
            "request": asdict(self.request),
            "language": self.language,
            "prompts": [asdict(prompt) for prompt in self.prompts],
            "rows": [
                {
                    "length": row.length,
                    "depth": row.depth,
                    "prompts": row.prompts,
                    **{name: _comparison(found) for name, found in row.measures.items()},
                }
                for row in self.rows
            ],
            "heads": {name: _head_comparison(found) for name, found in self.heads.items()},
            "provenance": dict(self.provenance),
        }


def ratio(signal: float, noise: float) -> float:
    """SNR; NaN where there is no noise to divide by."""
    return signal / noise if noise > 0 else float("nan")


def plain(values: Any) -> Any:
    """Lists and floats with None in place of NaN, as JSON has no NaN."""
    if isinstance(values, np.ndarray):
        return [plain(value) for value in values.tolist()] if values.ndim == 1 else [plain(part) for part in values]
    return None if values is None or (isinstance(values, float) and not np.isfinite(values)) else values


def _comparison(found: Comparison) -> dict[str, Any]:
    parts: dict[str, Interval | None] = {"base": found.base, "variant": found.variant, "change": found.change}
    return {
        name: None if part is None else {"mean": plain(part.mean), "low": plain(part.low), "high": plain(part.high)}
        for name, part in parts.items()
    }


def _head_comparison(found: HeadComparison) -> dict[str, Any]:
    parts = {"base": found.base, "variant": found.variant, "change": found.change}
    return {
        name: None if part is None else {end: plain(getattr(part, end)) for end in ("mean", "low", "high")}
        for name, part in parts.items()
    }
