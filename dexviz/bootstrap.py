"""Percentile bootstrap: how far a mean would move, had other documents, blocks or prompts been drawn.

The statistic is a ratio of sums, Σ totals / Σ weights, over units that are drawn again with replacement: with losses and
token counts of documents it is the mean loss a token; with weights of one it is the mean over units. A difference between two
models on the same units is the same ratio of `variant − base`, so both are drawn together (paired).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dexviz.errors import EvaluationError

_BATCH_ENTRIES = 2_000_000
"""Entries that are drawn at a time: 16 MB of indices."""


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval; `low` and `high` are None where one unit alone says nothing about others."""

    mean: float
    low: float | None
    high: float | None
    level: float
    """Coverage that the interval aims at, such as 0.95."""
    units: int
    unit: str
    """What was drawn again: "document", "block" or "prompt"."""

    def map(self, increasing: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the mean."""
        low, high = (None if end is None else float(increasing(end)) for end in (self.low, self.high))
        return replace(self, mean=float(increasing(self.mean)), low=low, high=high)


@dataclass(frozen=True)
class Comparison:
    """A number of the base, of the variant, and variant − base, paired; the last two are None where there is no variant."""

    base: Interval
    variant: Interval | None = None
    change: Interval | None = None


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn: the same seed and units give the same resamples, whatever is measured on them."""

    resamples: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 100 or not 0 < self.level < 1:
            got = f"{self.resamples} resamples, level {self.level}"
            raise EvaluationError("at least 100 resamples and a level between 0 and 1", got, "Correct the bootstrap settings.")

    def ratio(self, totals: np.ndarray, weights: np.ndarray | None = None, *, unit: str) -> Interval:
        """Σ totals / Σ weights with its interval; both [units], weights positive, one each if left out.

        Raises:
            EvaluationError: there are no units, or a total is not finite.
        """
        totals = np.asarray(totals, dtype=np.float64)
        weights = np.ones_like(totals) if weights is None else np.asarray(weights, dtype=np.float64)
        if not len(totals) or not np.isfinite(totals).all():
            got = "none" if not len(totals) else "NaN or infinity"
            raise EvaluationError(
                f"finite measurements of at least one {unit}", got, "Check the text, the model and its dtype."
            )
        mean = float(totals.sum() / weights.sum())
        if len(totals) == 1:
            return Interval(mean, None, None, self.level, 1, unit)
        ratios = self._resampled(totals, weights)
        low, high = np.quantile(ratios, [(1 - self.level) / 2, (1 + self.level) / 2])
        return Interval(mean, float(low), float(high), self.level, len(totals), unit)

    def compare(
        self, base: np.ndarray, variant: np.ndarray | None, weights: np.ndarray | None = None, *, unit: str
    ) -> Comparison:
        """The ratio of both models on the same units, [units] each, and its paired difference."""
        if variant is None:
            return Comparison(self.ratio(base, weights, unit=unit))
        return Comparison(*(self.ratio(totals, weights, unit=unit) for totals in (base, variant, variant - base)))

    def of(self, statistic: Callable[[np.ndarray], np.ndarray], units: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A statistic of many numbers at once, with its interval: (value, low, high), each of the statistic's shape.

        Args:
            statistic: from how often each unit is drawn, float64 [R, units], to its value in each resample, [R, …]. Resamples
                are those of `ratio`; a difference of two numbers within it is paired.
            units: how many there are; the ends of one unit's interval are NaN.
        """
        value = statistic(np.ones((1, units)))[0]
        if units == 1:
            return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
        low, high = np.quantile(statistic(self._counts(units)), [(1 - self.level) / 2, (1 + self.level) / 2], axis=0)
        return value, low, high

    def _counts(self, units: int) -> np.ndarray:
        """How often each unit is in each resample, float64 [resamples, units]."""
        counts = [np.apply_along_axis(np.bincount, 1, chosen, minlength=units) for chosen in self._draws(units)]
        return np.concatenate(counts).astype(np.float64)

    def _draws(self, units: int) -> Iterator[np.ndarray]:
        """Drawn units, int64 [R, units] a batch of resamples."""
        draw, step = np.random.default_rng(self.seed), max(1, _BATCH_ENTRIES // units)
        for start in range(0, self.resamples, step):
            yield draw.integers(units, size=(min(step, self.resamples - start), units))

    def _resampled(self, totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The ratio in each resample, [resamples]."""
        return np.concatenate([totals[chosen].sum(axis=1) / weights[chosen].sum(axis=1) for chosen in self._draws(len(totals))])
