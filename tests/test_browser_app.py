"""The real app with the real model in Chromium, against transformers' own eager attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dexviz.catalogue import DEFAULT_MODEL, model_folder
from dexviz.models import load_model
from tests.adapters import random_adapter
from tests.browser import await_idle, await_still, chromium, expect_tooltip, open_page, streamlit_server

pytestmark = [pytest.mark.browser, pytest.mark.model]
Opener = Callable[..., AbstractContextManager[Page]]
LAYERS, HEADS, WIDTH = 30, 9, 64
CATS = "the cat the dog the cat the dog the cat"
DOOR = "The code of the blue door is 7412. Question: what is the code of the blue door? Answer:"
LONG = "word " * 3000
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> :red[a] $x$ \u202e**b** 猫 مرحبا 🙂'
SLOW = 300_000


@dataclass(frozen=True)
class Site:
    """The served app and the adapter it is opened with."""

    open: Opener
    adapter: Path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    adapter = random_adapter(load_model(DEFAULT_MODEL), tmp_path_factory.mktemp("adapters") / "random")
    with streamlit_server("app/main.py") as url:

        @contextmanager
        def open_app(path: str = "/", **context: object) -> Iterator[Page]:
            with open_page(browser, f"{url}{path}?adapter={adapter}", **context) as page:
                yield page

        yield Site(open_app, adapter)


@cache
def eager(adapter: Path | None, prompt: str) -> np.ndarray:
    """Attention maps [L, H, N, N] of the stock model; DEX is merged into W_O by hand: W_O,h ← (I − λ W_D) W_O,h."""
    folder = model_folder(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        weights = load_file(adapter / "adapter_model.safetensors")
        for layer, block in enumerate(model.model.layers):
            change = torch.eye(WIDTH) - weights[f"operators.{layer}.lambda_learn"] * weights[f"operators.{layer}.w_d"]
            for head in (0, 2, 3, 7):
                rows = slice(head * WIDTH, (head + 1) * WIDTH)
                block.self_attn.o_proj.weight.data[:, rows] = block.self_attn.o_proj.weight.data[:, rows] @ change.T
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        return torch.stack(model(ids, output_attentions=True).attentions)[:, 0].numpy()


def box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Prompt", exact=True)


def start(page: Page, prompt: str) -> None:
    box(page).fill(prompt)
    page.get_by_role("button", name="Run").click()


def run(page: Page, prompt: str) -> None:
    """Type the prompt and press Run; wait until the maps are there."""
    start(page, prompt)
    expect(page.locator(".attention-map")).to_be_visible(timeout=SLOW)
    await_idle(page)


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_role("combobox", name=label).click()
    page.get_by_role("option", name=option).click()


def choose_attention(page: Page) -> None:
    """Choose the score, and wait for its maps."""
    choose(page, "Score", "Attention")
    expect(page.locator(".attention-map")).to_contain_text("Attention scores of", timeout=SLOW)
    await_idle(page)


def expect_grid(page: Page, shown: str) -> None:
    """Wait for the grid of this statistic and side: another figure is another element, and a click on the old one is lost."""
    expect(page.get_by_role("figure", name=f"heads, {shown}", exact=False)).to_be_visible()
    await_idle(page)


def click_head(page: Page, layer: int, head: int) -> None:
    """Point at a cell of the grid, click when the grid has told its name, and wait for that name over the maps."""
    left, top, width, height = await_still(page.locator(".st-key-heads-grid .nsewdrag").first)
    page.mouse.move(left + width * (head + 0.5) / HEADS, top + height * (layer + 0.5) / LAYERS)
    expect(page.locator(".st-key-heads-grid .hovertext")).to_contain_text(f"L{layer}·H{head}")
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".st-key-head-name")).to_have_text(f"L{layer}·H{head}")
    expect(page.locator(".attention-map")).to_contain_text(f"scores of L{layer}·H{head}", timeout=SLOW)
    await_still(page.locator("[data-panel=base] canvas"))


def hovered(page: Page, query: int, key: int) -> tuple[float, float, float]:
    """Base, variant and difference that the tooltip tells for a cell of the base panel."""
    canvas = page.locator("[data-panel=base] canvas")
    left, top, width, height = map(float, str(canvas.get_attribute("data-plot")).split(","))
    rows, columns = map(int, str(page.locator(".attention-map").get_attribute("data-cells")).split("x"))
    canvas.hover(position={"x": left + (key + 0.5) * width / columns, "y": top + (query + 0.5) * height / rows})
    values = [
        page.locator(f".tooltip-row[data-kind={kind}] .tooltip-value").first for kind in ("base", "variant", "difference")
    ]
    expect_tooltip(page, query, key)
    base, variant, difference = (float(value.inner_text().replace("−", "-")) for value in values)
    return base, variant, difference


def assert_shows(page: Page, site: Site, prompt: str, layer: int, head: int) -> None:
    """Some cells of the map tell what the stock model computes, before and after DEX."""
    base, variant = (eager(adapter, prompt)[layer, head] for adapter in (None, site.adapter))
    cells = np.argwhere(np.tril(base) > 1e-3)
    for query, key in cells[:: max(1, len(cells) // 5)]:
        left, right, change = hovered(page, int(query), int(key))
        assert left == pytest.approx(base[query, key], rel=6e-3, abs=2e-5)
        assert right == pytest.approx(variant[query, key], rel=6e-3, abs=2e-5)
        assert change == pytest.approx(right - left, rel=0.02, abs=6e-3 * max(left, right))


def test_a_click_on_a_head_shows_what_the_stock_model_computes(site: Site) -> None:
    with site.open() as page:
        run(page, DOOR)
        choose_attention(page)
        choose(page, "Statistic", "Sink mass")
        expect_grid(page, "Sink mass, variant")
        expect(page.get_by_text("Sink mass by head")).to_be_visible()
        for layer, head in ((12, 3), (0, 8), (29, 0), (12, 3)):
            click_head(page, layer, head)
            assert_shows(page, site, DOOR, layer, head)
        sink = eager(None, DOOR)[12, 3][:, 0].mean()
        expect(page.locator(".st-key-head-line")).to_contain_text(f"base {sink:.3f}")


def test_ctrl_enter_runs_what_is_in_the_box(site: Site) -> None:
    with site.open() as page:
        expect(page.get_by_role("button", name="Run")).to_be_enabled()
        await_still(page.get_by_role("button", name="Run"))
        box(page).fill(CATS)
        page.keyboard.press("Control+Enter")
        expect(page.locator(".attention-map")).to_be_visible(timeout=SLOW)
        expect(page.locator(".chip")).to_have_count(len(eager(None, CATS)[0, 0]))


def test_repeated_words_keep_their_own_columns(site: Site) -> None:
    with site.open() as page:
        run(page, CATS)
        expect(page.locator(".chip")).to_have_count(len(eager(None, CATS)[0, 0]))


def test_prompt_and_selection_stay_when_pages_change(site: Site) -> None:
    with site.open() as page:
        run(page, CATS)
        choose(page, "Statistic", "Local mass")
        expect_grid(page, "Local mass, variant")
        page.get_by_text("Change", exact=True).click()
        expect_grid(page, "Local mass, change")
        click_head(page, 7, 5)
        page.locator(".chip[data-token='4']").click()
        expect(page.locator(".attention-map")).to_have_attribute("data-query", "4")
        await_idle(page)
        page.get_by_role("link", name="Home").click()
        expect(page.get_by_text("before and after DEX")).to_be_visible()
        await_idle(page)
        expect(box(page)).to_have_value(CATS)
        page.get_by_role("link", name="Heads").click()
        expect(page.locator(".st-key-head-name")).to_have_text("L7·H5")
        expect(page.get_by_text("Local mass by head")).to_be_visible()
        expect(page.locator(".attention-map")).to_have_attribute("data-query", "4")
        expect(page.get_by_role("radio", name="Change")).to_be_checked()
        expect(box(page)).to_have_value(CATS)


def test_a_click_after_next_and_a_second_click_on_one_head_both_count(site: Site) -> None:
    with site.open() as page:
        run(page, CATS)
        click_head(page, 4, 4)
        page.locator(".st-key-next button").first.click()
        expect(page.locator(".st-key-head-name")).to_have_text("L4·H5")
        expect(page.locator(".attention-map")).to_contain_text("scores of L4·H5", timeout=SLOW)
        click_head(page, 4, 4)
        click_head(page, 4, 4)


def test_two_sessions_at_once_see_their_own_prompts(site: Site) -> None:
    with site.open() as first, site.open() as second:
        for page, prompt in ((first, DOOR), (second, CATS)):
            start(page, prompt)
        for page in (first, second):
            expect(page.locator(".attention-map")).to_be_visible(timeout=SLOW)
            await_idle(page)
            choose_attention(page)
        click_head(first, 3, 1)
        click_head(second, 20, 7)
        assert_shows(first, site, DOOR, 3, 1)
        assert_shows(second, site, CATS, 20, 7)
        expect(first.locator(".st-key-head-name")).to_have_text("L3·H1")


def test_a_long_prompt_shows_tiles_and_opens_exact_values(site: Site) -> None:
    with site.open() as page:
        run(page, "The quick brown fox jumps over the lazy dog. " * 75)
        maps = page.locator(".attention-map")
        expect(maps).to_contain_text("Tiled: each cell is the mean")
        canvas = page.locator("[data-panel=base] canvas")
        await_still(canvas)
        left, top, width, height = map(float, str(canvas.get_attribute("data-plot")).split(","))
        canvas.click(position={"x": left + 0.3 * width, "y": top + 0.6 * height})
        expect(maps).to_contain_text("Window: queries", timeout=SLOW)
        expect(maps).not_to_contain_text("Tiled")


def test_cancel_stops_a_long_run_and_keeps_the_prompt(site: Site) -> None:
    with site.open() as page:
        start(page, LONG)
        page.get_by_role("button", name="Cancel").click(timeout=SLOW)
        expect(page.get_by_text("Cancelled. Press Run to start again.")).to_be_visible(timeout=SLOW)
        expect(box(page)).to_have_value(LONG)
        run(page, "a short one instead")


def test_hostile_text_is_only_text(site: Site) -> None:
    with site.open() as page:
        run(page, HOSTILE)
        await_idle(page)
        assert page.evaluate("window.pwned") is None
        assert page.locator("img[src=x]").count() == 0
        expect(box(page)).to_have_value(HOSTILE)


def test_a_wrong_model_is_one_message(site: Site) -> None:
    with site.open() as page:
        page.get_by_role("button", name="Change model").click()
        page.get_by_role("combobox", name="Base model").fill("no-such-model")
        page.keyboard.press("Enter")
        expect(page.get_by_text("Base: no-such-model")).to_be_visible()
        await_idle(page)
        page.keyboard.press("Escape")
        start(page, CATS)
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("'no-such-model'", timeout=SLOW)
        expect(alert).not_to_contain_text("Traceback")
        expect(box(page)).to_have_value(CATS)


def test_a_link_straight_to_heads_goes_through_the_router(browser: Browser) -> None:
    with streamlit_server("app/main.py") as url, open_page(browser, f"{url}/heads") as page:
        expect(page.get_by_text("No prompt has been run yet")).to_be_visible()
        expect(box(page)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390])
def test_phones_need_no_sideways_scrolling(site: Site, scheme: str, width: int) -> None:
    with site.open(viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        page.get_by_test_id("stExpandSidebarButton").click()
        run(page, CATS)
        main = page.get_by_test_id("stMain")
        assert main.evaluate("main => main.scrollWidth - main.clientWidth") <= 0
