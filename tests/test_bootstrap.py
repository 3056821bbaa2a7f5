"""Bootstrap intervals against a plain loop, against scipy, and by how often they cover what they should."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dexviz import bootstrap
from dexviz.bootstrap import Bootstrap, Comparison
from dexviz.errors import EvaluationError

DRAW = np.random.default_rng(0)
WEIGHTS = DRAW.integers(5, 300, 40).astype(np.float64)
TOTALS = WEIGHTS * DRAW.normal(3, 0.5, 40)


def test_ratio_is_that_of_a_plain_loop() -> None:
    draw, ratios = np.random.default_rng(7), []
    for _ in range(500):
        chosen = [int(draw.integers(40)) for _ in range(40)]
        ratios.append(sum(TOTALS[i] for i in chosen) / sum(WEIGHTS[i] for i in chosen))
    interval = Bootstrap(4000, 0.9, seed=1).ratio(TOTALS, WEIGHTS, unit="document")
    assert interval.mean == pytest.approx(TOTALS.sum() / WEIGHTS.sum())
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(ratios, [0.05, 0.95])), abs=0.03)
    assert (interval.level, interval.units, interval.unit) == (0.9, 40, "document")


def test_mean_is_that_of_scipy() -> None:
    expected = stats.bootstrap((TOTALS,), np.mean, n_resamples=5000, method="percentile", rng=3).confidence_interval
    interval = Bootstrap(5000, 0.95, seed=4).ratio(TOTALS, unit="prompt")
    width = expected.high - expected.low
    assert interval.low == pytest.approx(expected.low, abs=0.05 * width)
    assert interval.high == pytest.approx(expected.high, abs=0.05 * width)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    draw, covered = np.random.default_rng(5), 0
    for seed in range(400):
        interval = Bootstrap(300, 0.8, seed).ratio(draw.normal(1.0, 2.0, 50), unit="prompt")
        covered += interval.low < 1.0 < interval.high
    assert 0.72 < covered / 400 < 0.86


def test_a_seed_fixes_the_interval_however_it_is_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (Bootstrap(200, seed=seed).ratio(TOTALS, WEIGHTS, unit="block") for seed in (2, 3))
    monkeypatch.setattr(bootstrap, "_BATCH_ENTRIES", 70)
    assert Bootstrap(200, seed=2).ratio(TOTALS, WEIGHTS, unit="block") == first
    assert (other.low, other.high) != (first.low, first.high)


def test_differences_are_paired() -> None:
    compared = Bootstrap().compare(TOTALS, TOTALS - 0.25 * WEIGHTS, WEIGHTS, unit="document")
    assert compared.base.high - compared.base.low > 0.1
    assert (compared.change.mean, compared.change.low, compared.change.high) == pytest.approx((-0.25, -0.25, -0.25))
    assert Bootstrap().compare(TOTALS, None, WEIGHTS, unit="document") == Comparison(compared.base)


def test_one_unit_has_no_interval() -> None:
    interval = Bootstrap().ratio(np.array([6.0]), np.array([2.0]), unit="document")
    assert (interval.mean, interval.low, interval.high, interval.units) == (3.0, None, None, 1)
    assert interval.map(np.square).mean == 9.0
    assert interval.map(np.square).low is None


def test_maps_keep_the_ends() -> None:
    interval = Bootstrap().ratio(TOTALS, WEIGHTS, unit="document")
    mapped = interval.map(np.exp)
    assert (mapped.mean, mapped.low, mapped.high) == pytest.approx(
        (np.exp(interval.mean), np.exp(interval.low), np.exp(interval.high))
    )


@pytest.mark.parametrize("totals", [[], [1.0, float("nan")], [float("inf")]])
def test_measurements_that_mean_nothing_are_refused(totals: list[float]) -> None:
    with pytest.raises(EvaluationError, match="Expected finite measurements of at least one prompt"):
        Bootstrap().ratio(np.array(totals), unit="prompt")


@pytest.mark.parametrize("settings", [{"resamples": 10}, {"level": 1.0}, {"level": 0.0}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(EvaluationError, match="at least 100 resamples and a level between 0 and 1"):
        Bootstrap(**settings)
