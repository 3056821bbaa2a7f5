"""What is measured of the papers' claims about differential attention, and how it is asked for. Needs no torch.

In-context learning should depend less on the order of the examples, answers should follow the context where it contradicts
what is commonly known or where texts contradict each other, and activations should have fewer outliers (arXiv 2410.05258,
sections 3.5 to 3.7; 2505.16333). Every comparison is base against variant on the same items, orders and prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dexviz.bootstrap import Bootstrap, Comparison
from dexviz.errors import EvaluationError

CLAIMS = IN_CONTEXT, CONTRADICTION, OUTLIERS = ("in-context", "contradiction", "outliers")
TOP = (1, 2, 3, 10, 100)
"""Ranks whose absolute values are reported: the largest, the second largest, …"""


@dataclass(frozen=True)
class ClaimsRequest:
    """Which claims are looked into, and on how much."""

    claims: tuple[str, ...] = CLAIMS
    """Some of `CLAIMS`."""
    seed: int = 0
    """Fixes the orders of the examples, where prompts are drawn, their texts, and the resamples."""
    orders: int = 8
    """Orders of the examples of in-context learning, at least 2."""
    prompts: int = 8
    """Prompts whose activations are read."""
    tokens: int = 256
    """Tokens of such a prompt, cut to the models' context."""
    resamples: int = 2000
    """Bootstrap resamples."""
    level: float = 0.95
    """Coverage of the intervals."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claims", tuple(self.claims))
        for sound, expected, got in (
            (self.claims and set(self.claims) <= set(CLAIMS), f"some of the claims {', '.join(CLAIMS)}", self.claims),
            (self.seed >= 0, "a seed of 0 or more", self.seed),
            (2 <= self.orders <= 1000, "2 to 1,000 orders of the examples", self.orders),
            (1 <= self.prompts <= 1000, "1 to 1,000 prompts", self.prompts),
            (self.tokens >= 2, "prompts of at least 2 tokens", self.tokens),
        ):
            if not sound:
                raise EvaluationError(expected, str(got), "Correct what is asked of the claims.")
        self.bootstrap()

    def bootstrap(self) -> Bootstrap:
        """How intervals are drawn."""
        return Bootstrap(self.resamples, self.level, self.seed)


@dataclass(frozen=True)
class InContextRow:
    """One task of in-context learning, or the mean over all tasks. Intervals: over test items, orders as they are."""

    task: str | None
    """None: all tasks."""
    items: int
    """Test items, each asked after the same examples in every order."""
    chance: float
    """Accuracy of guessing."""
    accuracy: Comparison
    """Share of items whose label is the likeliest, mean over the orders."""
    spread: Comparison
    """Largest less smallest accuracy among the orders."""
    deviation: Comparison
    """Standard deviation of the accuracy over the orders."""
    base: tuple[float, ...]
    """Accuracy in each order; over all tasks their mean in the first order, in the second, …"""
    variant: tuple[float, ...] | None


@dataclass(frozen=True)
class ContradictionRow:
    """Contextual questions of one kind, or all of them. Intervals: over questions."""

    kind: str | None
    """None: all; "against knowledge": the context says what is not so; "among sources": it tells which of them to believe."""
    questions: int
    chance: float
    """Accuracy of guessing."""
    accuracy: Comparison
    """Share of questions whose answer by the context is likelier than each distractor."""
    log_odds: Comparison
    """log(p / (1 − p)), p = the share of the answer by the context in the probability of all candidates; mean in nats."""


@dataclass(frozen=True)
class ContradictionResult:
    """Contextual questions, whose distractors contradict the context."""

    rows: tuple[ContradictionRow, ...]
    """All, then by kind."""
    texts: tuple[str, ...]
    """What was asked, with the context before it."""
    answers: tuple[tuple[str, ...], ...]
    """Of each question: the answer by the context, then its distractors."""
    base: tuple[float, ...]
    """Log-odds of each question in nats."""
    variant: tuple[float, ...] | None


@dataclass(frozen=True)
class Extremes:
    """The distribution of some activations, of which absolute values count as outliers."""

    count: int
    top: Mapping[str, float | None]
    """Rank ("1", "2", "3", "10", "100") → absolute value; None where there are fewer values."""
    median: float
    """Of absolute values, to 0.4 %."""
    kurtosis: float | None
    """E(x − μ)⁴ / σ⁴ of the values as they are, 3 for a normal distribution; None where they are all the same."""


@dataclass(frozen=True)
class OutlierRow:
    """One kind of activations over all layers and prompts, and by layer."""

    what: str
    """"attention logits", of A₁ and of A₂ too in DIFF Transformers, or "hidden states"."""
    base: Extremes | None
    variant: Extremes | None
    """None where the view has no such activations."""
    largest: Comparison | None
    """Largest absolute value of a prompt, mean over prompts; None unless both views have such activations, or one is alone."""
    kurtosis: Comparison | None
    """Kurtosis over all layers of a prompt, mean over prompts; likewise."""
    base_layers: tuple[Extremes | None, ...]
    """By layer; None for a layer without such activations."""
    variant_layers: tuple[Extremes | None, ...]


@dataclass(frozen=True)
class OutlierResult:
    """Activations on ordinary prompts."""

    prompts: int
    tokens: int
    """Of each prompt."""
    source: str
    """What the prompts are taken from."""
    rows: tuple[OutlierRow, ...]


@dataclass(frozen=True)
class ClaimsReport:
    """What was found out about a pair. `to_json` is plain data; `table` is for people."""

    request: ClaimsRequest
    in_context: tuple[InContextRow, ...] | None
    """All tasks, then each; None where not measured."""
    contradiction: ContradictionResult | None
    outliers: OutlierResult | None
    refused: Mapping[str, str] = field(default_factory=dict)
    """Claims that were asked for and cannot be looked into in this pair → why."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Models, fingerprints, dtype, device, versions, date, and the seconds that it took."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; every number is finite, what was not measured is null."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    def table(self) -> str:
        """The results as lines of text."""
        from dexviz.claims_table import table

        return table(self)
