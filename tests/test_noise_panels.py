"""What the Noise page's panels do beside showing numbers: waits at once, marks in the maps, clicks in the table."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect
from streamlit.testing.v1 import AppTest

from app import cache
from app.cache import Pending
from app.presets import RETRIEVAL
from dexviz.figures.palette import MARKS
from dexviz.requests import CheckClaims, MapHead, MeasureNoise, Progress, Request, RunBattery
from tests.browser import await_idle, await_still, chromium, open_page, streamlit_server
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


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with (
        streamlit_server("app/main.py") as url,
        chromium() as browser,
        open_page(browser, f"{url}/noise?{urlencode(LINK)}") as it,
    ):
        expect(it.get_by_text("Mean over heads")).to_be_visible(timeout=120_000)
        expect(it.locator(".attention-map")).to_be_visible(timeout=120_000)
        await_idle(it)
        yield it


@pytest.mark.browser
def test_a_drag_marks_a_span_that_has_its_colour_in_the_maps_too(page: Page) -> None:
    strip, picker = page.locator(".attention-map .strip"), page.locator(".token-picker .token")
    expect(strip.locator(".chip.needle")).to_have_count(3)
    expect(strip.locator(".chip.question")).to_have_count(3)
    picker.nth(13).scroll_into_view_if_needed()
    picker.nth(15).drag_to(picker.nth(13))
    expect(page.locator(".token-picker .token.needle")).to_have_count(6)
    expect(strip.locator(".chip.needle")).to_have_count(6)
    assert strip.locator(".chip.needle").evaluate_all("chips => chips.map(chip => Number(chip.dataset.token))")[3:] == [
        13,
        14,
        15,
    ]
    await_idle(page)
    canvas = page.locator("[data-panel=base] canvas")
    left, top, width, height = map(float, str(canvas.get_attribute("data-plot")).split(","))
    pixel = "(canvas, [x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]"
    needle = [int(MARKS["needle"][at : at + 2], 16) for at in (1, 3, 5)]
    count = len(RETRIEVAL.split()) + 1
    for token, marked in ((13, True), (15, True), (10, False)):
        places = [(left - 2, top + (token + 0.5) * height / count), (left + (token + 0.5) * width / count, top + height + 2)]
        assert [canvas.evaluate(pixel, list(place))[:3] == needle for place in places] == [marked, marked]


@pytest.mark.browser
def test_a_click_in_the_table_opens_that_head(page: Page) -> None:
    table = page.get_by_test_id("stDataFrame")
    table.scroll_into_view_if_needed()
    names = table.locator("tbody tr td:nth-child(1)")
    wanted = names.nth(2).inner_text()
    left, top, _, _ = await_still(table)
    page.mouse.click(left + 120, top + 35 * 3.5)
    expect(page.locator(".st-key-head-name")).to_have_text(wanted)
    expect(page.locator(".attention-map")).to_contain_text(f"of {wanted}, variant")
