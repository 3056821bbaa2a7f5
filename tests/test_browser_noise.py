"""The Noise page of the shipped retrieval pair in Chromium: the three maps, marking, and the table of heads."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

import dexviz
from app.components.noise_heads import ROW_HEIGHT
from app.presets import RETRIEVAL
from dexviz.figures.palette import MARKS
from dexviz.models import ModelPair
from tests.browser import await_idle, await_still, chromium, expect_tooltip, open_page, streamlit_server
from tests.test_noise_page import LINK, pair

pytestmark = pytest.mark.browser
__all__ = ["pair"]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with (
        streamlit_server("app/main.py") as url,
        chromium() as browser,
        open_page(browser, f"{url}/noise?{urlencode(LINK)}") as opened,
    ):
        expect(opened.locator(".attention-map")).to_be_visible(timeout=120_000)
        expect(opened.get_by_text("Mean over heads:")).to_be_visible(timeout=120_000)
        expect(opened.get_by_text("effective rank of N")).to_be_visible(timeout=120_000)
        await_idle(opened)
        yield opened


def test_the_three_maps_are_attention_less_noise_is_score(page: Page, pair: ModelPair) -> None:
    tokens = pair.tokenize(RETRIEVAL)
    cap = dexviz.capture(pair.variant, tokens, dexviz.CaptureRequest(maps=((1, 1),)))
    head, lam = cap.maps[(1, 1)], pair.variant.lambdas()[1]
    panels = page.locator(".attention-map [data-panel]")
    assert [panels.nth(i).get_attribute("data-panel") for i in range(3)] == ["base", "difference", "variant"]
    canvas = page.locator("[data-panel=base] canvas")
    for query, key in ((17, 17), (27, 17), (9, 4)):
        left, top, width, height = map(float, str(canvas.get_attribute("data-plot")).split(","))
        n = len(tokens)
        canvas.hover(position={"x": left + (key + 0.5) * width / n, "y": top + (query + 0.5) * height / n})
        expect_tooltip(page, query, key)
        shown = {
            kind: float(page.locator(f".tooltip-row[data-kind={kind}] .tooltip-value").first.inner_text().replace("−", "-"))
            for kind in ("base", "difference", "variant")
        }
        first, second = (float(term[query, key]) for term in head.terms)
        for kind, expected in (("base", first), ("difference", lam * second), ("variant", first - lam * second)):
            assert shown[kind] == pytest.approx(expected, rel=1e-2, abs=1e-4), (kind, query, key)


def test_a_click_in_the_table_opens_that_head(page: Page) -> None:
    table = page.get_by_test_id("stDataFrame")
    table.scroll_into_view_if_needed()
    wanted = table.locator("tbody tr td").first.inner_text()
    assert wanted != "L1·H1"
    left, top, _, _ = await_still(table)
    place = left + 120, top + 1.5 * ROW_HEIGHT
    page.mouse.move(*place)
    await_still(table)
    page.mouse.click(*place, delay=50)
    expect(page.locator(".st-key-head-name")).to_have_text(wanted)
    expect(page.locator(".attention-map")).to_contain_text(f"of {wanted}, variant")


def test_a_drag_marks_a_span_that_has_its_colour_in_the_maps_too(page: Page) -> None:
    strip, picker = page.locator(".attention-map .strip"), page.locator(".token-picker .token")
    expect(strip.locator(".chip.needle")).to_have_count(4)
    expect(strip.locator(".chip.question")).to_have_count(3)
    picker.nth(13).scroll_into_view_if_needed()
    await_still(picker.nth(13))
    picker.nth(15).drag_to(picker.nth(13))
    expect(page.locator(".token-picker .token.needle")).to_have_count(7)
    expect(strip.locator(".chip.needle")).to_have_count(7)
    marked = strip.locator(".chip.needle").evaluate_all("chips => chips.map(chip => Number(chip.dataset.token))")
    assert marked[4:] == [13, 14, 15]
    await_idle(page)
    canvas = page.locator("[data-panel=base] canvas")
    left, top, width, height = map(float, str(canvas.get_attribute("data-plot")).split(","))
    pixel = "(canvas, [x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]"
    needle = [int(MARKS["needle"][at : at + 2], 16) for at in (1, 3, 5)]
    count = len(RETRIEVAL.split()) + 1
    for token, expected in ((13, True), (15, True), (10, False)):
        places = [[left - 2, top + (token + 0.5) * height / count], [left + (token + 0.5) * width / count, top + height + 2]]
        assert [canvas.evaluate(pixel, place)[:3] == needle for place in places] == [expected, expected]
    picker.nth(14).click()
    expect(strip.locator(".chip.needle")).to_have_count(4)
    await_idle(page)


def test_two_clicks_mark_a_span_and_keys_do_too(page: Page) -> None:
    picker = page.locator(".token-picker")
    marked = picker.locator(".token.needle")
    expect(marked).to_have_count(4)
    picker.locator(".token").nth(5).click()
    expect(picker.get_by_role("status")).to_contain_text("First token 5")
    picker.locator(".token").nth(7).click()
    expect(marked).to_have_count(7)
    await_idle(page)
    marked.first.click()
    expect(marked).to_have_count(3)
    await_idle(page)
    picker.get_by_role("button", name="Mark question").click()
    tokens = picker.get_by_role("listbox")
    tokens.focus()
    for key in ("Home", "ArrowRight", "Enter", "ArrowRight", "Enter"):
        tokens.press(key)
    expect(picker.locator(".token.question")).to_have_count(2)
    await_idle(page)
    picker.get_by_role("button", name="Clear marks").click()
    expect(page.get_by_text("No needle is marked")).to_be_visible()
    await_idle(page)
