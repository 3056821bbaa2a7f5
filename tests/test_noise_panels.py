"""Panels of the Noise page that wait, and what they say before and while they do."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from app import cache
from app.cache import Pending
from app.presets import RETRIEVAL
from dexviz.requests import CheckClaims, MapHead, MeasureNoise, Progress, Request, RunBattery
from tests.test_app import MAIN, press, settled

LINK = {"base": "retrieval-llama", "variant": "retrieval-diff", "draft": RETRIEVAL}
SLOW = (MapHead, MeasureNoise, RunBattery, CheckClaims)


def opened() -> AppTest:
    """The Noise page, by a link to the shipped pair on the preset of its language."""
    at = AppTest.from_file(MAIN, default_timeout=60)
    at.query_params.update(LINK)
    at.run()
    at.switch_page("pages/noise.py").run()
    return settled(at)


def test_panels_that_wait_at_once_are_cancelled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at, asked, cancelled = opened(), cache.ask, []

    def ask(*requests: Request, patience: float = 0.4) -> cache.Outcome:
        names = [type(request).__name__ for request in requests if isinstance(request, SLOW)]
        return Pending(tuple(names)) if names else asked(*requests, patience=patience)

    monkeypatch.setattr(cache, "ask", ask)
    monkeypatch.setattr(cache, "progress", lambda tickets: [Progress("running", "a stage", 1, 4) for _ in tickets])
    monkeypatch.setattr(cache, "cancel", cancelled.append)
    press(at, "Look into the claims")
    press(at, "Measure the pair")
    assert not at.exception
    keys = [button.key for button in at.button if button.label == "Cancel"]
    assert len(keys) == len(SLOW)
    for key in keys:
        at.button(key=key).click().run()
    assert sorted(cancelled) == sorted((kind.__name__,) for kind in SLOW)
