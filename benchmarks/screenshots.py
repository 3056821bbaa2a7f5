"""Takes the README's picture from the real app with the default model: `python -m benchmarks.screenshots`."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser import await_idle, chromium, open_page, streamlit_server

TARGET = Path(__file__).resolve().parent.parent / "docs"
PROMPT = "The code of the blue door is 7412. The baker sells rye. Question: what is the code of the blue door? Answer:"
LAYER, HEAD = 23, 0
WIDTH, HEIGHT = 1440, 900
PATIENCE = 180_000


def main() -> None:
    """Run the app, show a head of a real prompt, and save the picture."""
    with streamlit_server("app/main.py") as url, chromium() as browser:
        link = f"{url}/?layer={LAYER}&head={HEAD}"
        with open_page(browser, link, viewport={"width": WIDTH, "height": HEIGHT}) as page:
            show(page)
            page.screenshot(path=TARGET / "heads.png")
    print(TARGET / "heads.png")


def show(page: Page) -> None:
    """Run the prompt and lock its last token."""
    page.get_by_role("textbox", name="Prompt", exact=True).fill(PROMPT)
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".attention-map")).to_be_visible(timeout=PATIENCE)
    await_idle(page)
    page.locator(".chip").last.click()
    page.mouse.move(WIDTH / 2, 20)
    await_idle(page)


if __name__ == "__main__":
    main()
