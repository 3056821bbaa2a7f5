"""The attention map in real Chromium: what it shows, against the scores it was given, and what it sends back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from app.components.map_payload import clip_label
from dexviz.figures.palette import DIVERGING, SEQUENTIAL
from tests.apps.synthetic_maps import CASES, HOSTILE, SyntheticMaps, synthetic_maps
from tests.browser import await_idle, await_still, chromium, expect_tooltip, open_page, streamlit_server

pytestmark = pytest.mark.browser
Opener = Callable[..., AbstractContextManager[Page]]
PANELS = ("base", "variant", "difference")


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    with streamlit_server("tests/apps/attention_map_app.py") as url, chromium() as browser:

        @contextmanager
        def open_case(case: str, **context: object) -> Iterator[Page]:
            with open_page(browser, f"{url}/?case={case}", **context) as page:
                await_still(canvas(page))
                yield page

        yield open_case


def root(page: Page) -> Locator:
    return page.locator(".attention-map")


def canvas(page: Page, panel: str = "base") -> Locator:
    return page.locator(f"[data-panel={panel}] canvas")


def place(page: Page, r: float, c: float, panel: str = "base") -> dict[str, float]:
    """Position of the centre of cell (r, c) inside a panel's canvas; −1 is the label beside the plot, below for c rows."""
    left, top, width, height = map(float, canvas(page, panel).get_attribute("data-plot").split(","))
    rows, cols = map(int, root(page).get_attribute("data-cells").split("x"))
    x = left - 8 if c < 0 else left + (c + 0.5) * width / cols
    y = top + height + 8 if r < 0 else top + (r + 0.5) * height / rows
    return {"x": x, "y": y}


def number(text: str) -> float:
    """A value as the screen writes it."""
    return 0.0 if text.startswith("0 (less than") else float(text.replace("−", "-"))


def tooltip(page: Page, kind: str) -> list[str]:
    return page.locator(f".tooltip-row[data-kind={kind}] .tooltip-value").all_inner_texts()


def assert_tooltip(page: Page, maps: SyntheticMaps, query: int, key: int) -> None:
    """The tooltip tells this pair's tokens and its three values to three digits."""
    base, variant = (float(scores[query, key]) for scores in maps.dense)
    expect_tooltip(page, query, key)
    for kind, value in zip(PANELS, (base, variant, variant - base), strict=True):
        assert number(tooltip(page, kind)[0]) == pytest.approx(value, rel=6e-3, abs=1e-8), (kind, query, key)


def sent(page: Page) -> dict:
    """What Python has received."""
    await_idle(page)
    return json.loads(page.locator("[data-testid=stCode]").inner_text())


def expect_event(page: Page, lock: dict | None, focus: list[int] | None = None) -> None:
    wanted = json.dumps({"lock": lock, "focus": focus})
    expect(page.locator("[data-testid=stCode]")).to_contain_text(f'"event": {wanted}')
    await_idle(page)


def pixel(page: Page, r: int, c: int, panel: str = "base") -> list[int]:
    """RGB of the canvas at a cell's centre."""
    at = place(page, r, c, panel)
    script = """(canvas, at) => {
        const ratio = canvas.width / canvas.getBoundingClientRect().width;
        return [...canvas.getContext("2d").getImageData(at.x * ratio, at.y * ratio, 1, 1).data].slice(0, 3);
    }"""
    return canvas(page, panel).evaluate(script, at)


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.parametrize("case", ["signed", "attention", "middle"])
def test_hover_tells_the_captured_values(opener: Opener, case: str) -> None:
    maps = synthetic_maps(CASES[case])
    rng = np.random.default_rng(7)
    with opener(case) as page:
        for i in range(10):
            query = int(rng.integers(0, CASES[case].count))
            key = int(rng.integers(0, query + 1))
            panel = PANELS[i % 3]
            canvas(page, panel).hover(position=place(page, query, key, panel))
            assert_tooltip(page, maps, query, key)
            expect(page.locator(".tooltip-note").last).to_contain_text(f"Row {query} predicts token {query + 1}")


def test_hover_above_the_diagonal_has_no_value(opener: Opener) -> None:
    with opener("signed") as page:
        canvas(page).hover(position=place(page, 2, 9))
        expect(page.locator(".tooltip-note").first).to_have_text("The key comes after the query: no attention.")
        assert tooltip(page, "base") == []
        canvas(page).click(position=place(page, 2, 9))
        canvas(page).click(position=place(page, 9, 2))
        expect_event(page, {"query": 9, "key": 2})
        assert sent(page)["count"] == 1


@pytest.mark.parametrize(
    ("theme", "case"), [("light", "signed"), ("dark", "signed"), ("light", "attention"), ("dark", "attention")]
)
def test_colours_follow_value_scale_and_theme(opener: Opener, theme: str, case: str) -> None:
    maps = synthetic_maps(CASES[case])
    with opener(case, color_scheme=theme) as page:
        expect(root(page)).to_have_attribute("data-theme", theme)
        base, variant = maps.dense
        r, c = np.unravel_index(np.abs(base).argmax(), base.shape)
        stops = DIVERGING[theme] if CASES[case].signed else SEQUENTIAL[theme]
        assert pixel(page, r, c) == rgb(stops[-1] if base[r, c] > 0 else stops[0])
        difference = variant - base
        r, c = np.unravel_index(np.abs(difference).argmax(), base.shape)
        assert pixel(page, r, c, "difference") == rgb(DIVERGING[theme][-1 if difference[r, c] > 0 else 0])


def test_base_and_variant_share_a_scale_and_the_difference_states_its_own(opener: Opener) -> None:
    maps = synthetic_maps(CASES["attention"])
    with opener("attention") as page:
        legends = {name: page.locator(f"[data-panel={name}] .legend") for name in PANELS}
        ticks = {name: [number(text) for text in legends[name].locator(".ticks span").all_inner_texts()] for name in PANELS}
        assert ticks["base"] == ticks["variant"]
        assert ticks["base"][2] == pytest.approx(max(scores.max() for scores in maps.dense), rel=6e-3)
        assert ticks["difference"][2] == pytest.approx(np.abs(maps.dense[1] - maps.dense[0]).max(), rel=6e-3)
        expect(legends["difference"]).to_contain_text("scale of its own")
        page.get_by_role("button", name="common scale").click()
        expect(legends["difference"]).to_contain_text("common scale")
        assert number(legends["difference"].locator(".ticks span").last.inner_text()) == ticks["base"][2]


def test_equal_views_say_so(opener: Opener) -> None:
    with opener("equal") as page:
        expect(page.locator("[data-panel=difference] .legend")).to_contain_text("no difference anywhere")


def test_a_base_alone_has_one_panel(opener: Opener) -> None:
    with opener("alone") as page:
        expect(page.locator(".panel")).to_have_count(1)
        expect(page.get_by_text("Difference on")).to_be_hidden()


def test_switches_act_in_the_browser_alone(opener: Opener) -> None:
    frames: list[str] = []
    with opener("attention") as page:
        page.on("websocket", lambda socket: socket.on("framesent", lambda _: frames.append("sent")))
        page.reload()
        await_still(canvas(page))
        before, high = len(frames), number(page.locator("[data-panel=base] .ticks span").last.inner_text())
        assert before > 0
        assert pixel(page, 5, 0) != pixel(page, 0, 9)
        page.get_by_role("button", name="Hide sink").click()
        expect(page.locator(".notes")).to_contain_text("First column (token 0) is hidden")
        expect(page.locator(".notes")).to_contain_text("not renormalised")
        assert pixel(page, 5, 0) == pixel(page, 0, 9)
        assert number(page.locator("[data-panel=base] .ticks span").last.inner_text()) < high
        page.get_by_role("button", name="Log scale").click()
        expect(page.locator(".notes")).to_contain_text("Log colours over 4 decades")
        canvas(page).hover(position=place(page, 5, 0))
        assert_tooltip(page, synthetic_maps(CASES["attention"]), 5, 0)
        assert len(frames) == before


def test_a_click_locks_and_python_hears_of_it(opener: Opener) -> None:
    with opener("signed") as page:
        canvas(page, "variant").click(position=place(page, 8, 3, "variant"))
        expect_event(page, {"query": 8, "key": 3})
        expect(root(page)).to_have_attribute("data-query", "8")
        expect(page.locator(".readout")).to_contain_text("query 8")
        await_still(canvas(page))
        expect(page.locator(".tooltip"), "the rerun brought the same data and redrew nothing").to_be_visible()
        page.keyboard.press("Escape")
        expect_event(page, None)
        expect(root(page)).to_have_attribute("data-query", "")


def test_labels_lock_rows_and_columns(opener: Opener) -> None:
    with opener("signed") as page:
        canvas(page).click(position=place(page, 6, -1))
        expect_event(page, {"query": 6, "key": None})
        canvas(page).click(position=place(page, -1, 4))
        expect_event(page, {"query": None, "key": 4})
        canvas(page).click(position=place(page, -1, 4))
        expect_event(page, None)


def test_chips_lock_and_are_coloured_by_the_locked_row_or_column(opener: Opener) -> None:
    base, variant = synthetic_maps(CASES["signed"]).dense
    with opener("signed") as page:

        def values() -> dict[int, float]:
            chips = page.locator(".chip[data-value]").all()
            return {int(chip.get_attribute("data-token")): float(chip.get_attribute("data-value")) for chip in chips}

        page.locator(".chip[data-token='7']").click()
        expect_event(page, {"query": 7, "key": None})
        assert values() == pytest.approx({j: variant[7, j] for j in range(8)}, rel=1e-3, abs=1e-6)
        page.get_by_role("group", name="Values shown in the strip").get_by_text("Base").click()
        assert values() == pytest.approx({j: base[7, j] for j in range(8)}, rel=1e-3, abs=1e-6)
        page.locator(".chip[data-token='4']").click(modifiers=["Shift"])
        expect_event(page, {"query": None, "key": 4})
        assert values() == pytest.approx({i: base[i, 4] for i in range(4, 12)}, rel=1e-3, abs=1e-6)
        page.get_by_role("group", name="What a click on a token locks").get_by_text("key").click()
        page.locator(".chip[data-token='2']").click()
        expect_event(page, {"query": None, "key": 2})


def test_a_rerun_and_another_head_keep_the_view(opener: Opener) -> None:
    with opener("signed") as page:
        page.get_by_role("button", name="Log scale").click()
        canvas(page).click(position=place(page, 8, 3))
        expect_event(page, {"query": 8, "key": 3})
        canvas(page).evaluate("canvas => { canvas.marked = true; }")
        for button, head in (("Rerun", "L3·H0"), ("Other head", "L3·H1")):
            page.get_by_role("button", name=button).click()
            expect(root(page)).to_have_attribute("data-head", head)
            await_idle(page)
            expect(root(page)).to_have_attribute("data-query", "8")
            expect(page.get_by_role("button", name="Log scale")).to_have_attribute("aria-pressed", "true")
            assert canvas(page).evaluate("canvas => canvas.marked")
        expect(page.locator(".attention-map")).to_have_count(1)
        canvas(page).hover(position=place(page, 8, 3))
        assert_tooltip(page, synthetic_maps(CASES["signed"], seed=1), 8, 3)


def test_the_page_can_lock(opener: Opener) -> None:
    with opener("signed") as page:
        page.get_by_role("button", name="Lock row 2").click()
        expect(root(page)).to_have_attribute("data-query", "2")
        canvas(page).click(position=place(page, 8, 3))
        expect_event(page, {"query": 8, "key": 3})
        expect(root(page)).to_have_attribute("data-query", "8")
        page.get_by_role("button", name="Lock row 2").click()
        expect(root(page)).to_have_attribute("data-query", "2")


def test_the_keyboard_moves_and_locks(opener: Opener) -> None:
    maps = synthetic_maps(CASES["signed"])
    with opener("signed") as page:
        canvas(page).focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
        assert_tooltip(page, maps, 3, 1)
        expect(page.locator(".readout")).to_contain_text("query 3")
        page.keyboard.press("Enter")
        expect_event(page, {"query": 3, "key": 1})
        page.locator(".strip").focus()
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        expect_event(page, {"query": 11, "key": None})
        assert "12 queries by 12 keys" in canvas(page).get_attribute("aria-label")


def test_repeated_tokens_stay_apart(opener: Opener) -> None:
    with opener("repeats") as page:
        assert page.locator(".chip-label").all_inner_texts() == ["the", "·cat", "the", "·dog"]
        assert page.locator(".chip-position").all_inner_texts() == ["0", "1", "2", "3"]
        page.locator(".chip", has_text="the").nth(1).click()
        expect_event(page, {"query": 2, "key": None})
        canvas(page).hover(position=place(page, 3, 2))
        assert_tooltip(page, synthetic_maps(CASES["repeats"]), 3, 2)


def test_hostile_labels_are_text(opener: Opener) -> None:
    with opener("hostile") as page:
        shown = page.locator(".chip-label").evaluate_all("chips => chips.map((chip) => chip.textContent)")
        assert shown == [clip_label(label) for label in HOSTILE]
        for i in range(len(HOSTILE)):
            canvas(page).hover(position=place(page, i, i))
        canvas(page).click(position=place(page, 1, 0))
        expect_event(page, {"query": 1, "key": 0})
        assert page.evaluate("window.hacked") is None
        assert root(page).locator("script, img, b").count() == 0


def test_one_token(opener: Opener) -> None:
    with opener("one") as page:
        canvas(page).hover(position=place(page, 0, 0))
        assert_tooltip(page, synthetic_maps(CASES["one"]), 0, 0)
        expect(page.get_by_role("button", name="Hide sink")).to_be_disabled()
        page.locator(".chip").click()
        expect_event(page, {"query": 0, "key": None})


def test_the_theme_can_change_while_the_page_is_open(opener: Opener) -> None:
    with opener("signed", color_scheme="light") as page:
        expect(root(page)).to_have_attribute("data-theme", "light")
        before = pixel(page, 0, 0)
        page.emulate_media(color_scheme="dark")
        expect(root(page)).to_have_attribute("data-theme", "dark")
        assert pixel(page, 0, 0) != before


def test_a_phone_stacks_the_panels_and_clips_nothing(opener: Opener) -> None:
    with opener("signed", viewport={"width": 360, "height": 700}) as page:
        boxes = [canvas(page, name).bounding_box() for name in PANELS]
        assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
        assert root(page).evaluate("element => element.scrollWidth <= element.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for name in PANELS:
            canvas(page, name).scroll_into_view_if_needed()
            canvas(page, name).hover(position=place(page, 11, 11, name))
            box = page.locator(".tooltip").bounding_box()
            assert box["x"] >= 0
            assert box["y"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["y"] + box["height"] <= 700


def test_high_density_screens_get_their_pixels(opener: Opener) -> None:
    with opener("signed", device_scale_factor=2) as page:
        box = canvas(page).bounding_box()
        assert canvas(page).evaluate("canvas => canvas.width") == pytest.approx(2 * box["width"], abs=2)


def test_largest_exact_map(opener: Opener) -> None:
    maps = synthetic_maps(CASES["limit"])
    with opener("limit", viewport={"width": 1900, "height": 1000}) as page:
        expect(root(page)).to_have_attribute("data-exact", "true")
        for query, key in ((679, 0), (400, 390), (77, 41)):
            canvas(page).hover(position=place(page, query, key))
            shown = [int(text.split(" ")[0]) for text in tooltip(page, "token")]
            assert np.abs(np.array(shown) - (query, key)).max() <= 1
            assert_tooltip(page, maps, *shown)


def test_a_tiled_map_says_so_and_opens_exact_windows(opener: Opener) -> None:
    maps = synthetic_maps(CASES["tiled"])
    with opener("tiled") as page:
        expect(page.locator(".notes")).to_contain_text("each cell is the mean of up to 6 × 6 tokens, 1,500 in all")
        expect(root(page)).to_have_attribute("data-cells", "256x256")
        canvas(page).hover(position=place(page, 200, 199))
        rows, cols = maps.base.row_edges, maps.base.col_edges
        expect_tooltip(page, f"{rows[200]}–{rows[201] - 1}", f"{cols[199]}–{cols[200] - 1}")
        assert number(tooltip(page, "base")[0]) == pytest.approx(float(maps.base.scores[200, 199]), rel=6e-3)
        assert number(tooltip(page, "base")[1]) == pytest.approx(float(maps.base.extreme[200, 199]), rel=6e-3)
        expect(page.locator(".tooltip")).to_contain_text("Base, largest in tile")
        canvas(page).click(position=place(page, 200, 199))
        expect_event(page, None, [int(rows[200]), int(cols[199])])
        expect(root(page)).to_have_attribute("data-window", "true")
        expect(page.locator(".notes")).to_contain_text("of 1,500 tokens")
        await_still(canvas(page))
        canvas(page).hover(position=place(page, 130, 100))
        start = [int(text.split(" ")[0]) for text in tooltip(page, "token")]
        assert_tooltip(page, maps, *start)
        canvas(page).click(position=place(page, 130, 100))
        await_idle(page)
        expect(root(page)).to_have_attribute("data-window", "true")
        page.get_by_role("button", name="Whole map").click()
        expect(root(page)).to_have_attribute("data-cells", "256x256")
        expect(page.get_by_role("button", name="Whole map")).to_be_hidden()
        assert sent(page)["event"]["focus"] is None


def test_exact_strips_replace_tile_means(opener: Opener) -> None:
    _, variant = synthetic_maps(CASES["tiled"]).dense
    with opener("tiled") as page:
        page.locator(".chip[data-token='20']").click()
        expect_event(page, {"query": 20, "key": None})
        chip = page.locator(".chip[data-token='11'][data-value]")
        expect(chip).to_be_visible()
        assert float(chip.get_attribute("data-value")) == pytest.approx(float(variant[20, 11]), rel=1e-3)
        expect(page.locator(".strip-text")).not_to_contain_text("means over tiles")


def test_the_strip_of_a_long_prompt_is_virtual(opener: Opener) -> None:
    with opener("long") as page:
        assert page.locator(".chip").count() < 400
        page.locator(".strip").evaluate("strip => { strip.scrollTop = strip.scrollHeight; }")
        last = page.locator(".chip[data-token='2999']")
        expect(last).to_be_visible()
        assert page.locator(".chip").count() < 400
        last.click()
        expect_event(page, {"query": 2999, "key": None})
        expect(last).to_be_visible()
