"""A real Chromium and a real Streamlit server for tests; plain context managers, no pytest in here.

with streamlit_server("tests/apps/attention_map.py") as url, chromium() as browser, open_page(browser, url) as page:
    page.get_by_role(...)
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
APP_READY = '[data-testid="stApp"][data-test-script-state="notRunning"]'
PATIENCE = 60.0
"""Seconds for anything that no model is needed for: a busy machine takes many times what a quiet one does."""
STILL_FRAMES = 3
STILL = """async (shown, [ready, frames]) => {
    const look = () => {
        const { x, y, width, height } = shown.getBoundingClientRect();
        return shown.isConnected && width && height && document.querySelector(ready) ? [x, y, width, height] : null;
    };
    const box = look();
    for (let frame = 0; box && frame < frames; frame++) {
        await new Promise(requestAnimationFrame);
        if (look()?.join() !== box.join()) return null;
    }
    return box;
}"""
expect.set_options(timeout=PATIENCE * 1000)


def chromium_path() -> str:
    """Path of the system's Chromium.

    Raises:
        AssertionError: there is none; browser tests fail then, they are never skipped.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "Chromium is needed for the browser tests: apt-get install chromium"
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium, closed at the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_ARGS)
        try:
            yield browser
        finally:
            browser.close()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def streamlit_server(
    script: str | Path, *, env: Mapping[str, str] | None = None, options: tuple[str, ...] = (), timeout: float = 2 * PATIENCE
) -> Iterator[str]:
    """Serve a Streamlit script (path relative to the repository) on a free port; yields its URL, stops the process by pid."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", str(ROOT / script), "--server.port", str(port)]
    command += ["--server.address", "127.0.0.1", "--server.headless", "true", "--server.fileWatcherType", "none"]
    command += ["--browser.gatherUsageStats", "false", *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **(env or {})}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _await_health(server, port, log, timeout)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(server)


def _await_health(server: subprocess.Popen, port: int, log, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    log.seek(0)
    raise AssertionError(f"Streamlit did not become healthy within {timeout:.0f} s. Its output:\n{log.read()}")


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextmanager
def open_page(browser: Browser, url: str, **context: object) -> Iterator[Page]:
    """A page in a context of its own, with the app's first run finished. Keywords go to `browser.new_context`, such as
    viewport={"width": 360, "height": 800}, color_scheme="dark", device_scale_factor=2. A page error fails the block.
    """
    settings = {"viewport": {"width": 1440, "height": 900}, **context}
    session = browser.new_context(**settings)
    try:
        page = session.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        await_idle(page)
        yield page
        assert not errors, f"JavaScript errors on the page: {errors}"
    finally:
        session.close()


def await_idle(page: Page, timeout: float = PATIENCE) -> None:
    """Wait until the app's script is not running.

    After an action it is idle until the server has heard of it, so first expect something on the page that the rerun brings.
    """
    page.wait_for_selector(APP_READY, timeout=timeout * 1000)


def await_still(shown: Locator, timeout: float = PATIENCE) -> tuple[float, float, float, float]:
    """Wait until the app is idle while the element that `shown` finds stays the same and keeps its place over some frames.

    Returns its left, top, width and height.

    Raises:
        AssertionError: it was replaced, moved or missing until the end.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        await_idle(shown.page, timeout)
        if box := shown.evaluate(STILL, [APP_READY, STILL_FRAMES]):
            left, top, width, height = box
            return left, top, width, height
    raise AssertionError(f"{shown} was not at rest on an idle page within {timeout:.0f} s")


def expect_tooltip(page: Page, *tokens: int | str) -> None:
    """Wait until the map's tooltip tells of these tokens, or spans of tokens, rather than of where the pointer was before."""
    expect(page.locator(".tooltip")).to_be_visible()
    named = page.locator(".tooltip-row[data-kind=token] .tooltip-value")
    expect(named).to_have_text([re.compile(rf"^{token} ") for token in tokens])
