"""A request on its way through the engine."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from dexviz.errors import Cancelled
from dexviz.requests import Progress


class Task:
    """One request on its way: how far it is, and whether it shall stop."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.future: Future[Any] | None = None
        self._progress = Progress("queued", "waiting", 0, 1)

    def report(self, stage: str, done: int, total: int) -> None:
        """Note progress; raise Cancelled where the caller has asked to stop."""
        if self.cancelled.is_set():
            raise Cancelled
        self._progress = Progress("running", stage, done, total)

    def progress(self) -> Progress:
        """Where it stands."""
        future, last = self.future, self._progress
        if future is None or not future.done():
            return last
        if future.cancelled():
            return Progress("cancelled", last.stage, last.done, last.total)
        error = future.exception()
        state = "done" if error is None else "cancelled" if isinstance(error, Cancelled) else "failed"
        return Progress(state, last.stage, last.done, last.total)
