"""A request on its way through the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

from dexviz.errors import Cancelled
from dexviz.requests import Progress


class Task:
    """One request on its way: how far it is, and whether it shall stop."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.future: Future[Any] | None = None
        self.delivered = False
        self._progress = Progress("queued", "waiting", 0, 1)

    def report(self, stage: str, done: int, total: int) -> None:
        """Note progress; raise Cancelled where the caller has asked to stop."""
        if self.cancelled.is_set():
            raise Cancelled
        self._progress = Progress("running", stage, done, total)

    @contextmanager
    def holding(self, lock: threading.Lock, stage: str) -> Iterator[None]:
        """Hold a lock; who waits for it can be cancelled."""
        while not lock.acquire(timeout=0.1):
            self.report(stage, 0, 1)
        try:
            self.report(stage, 0, 1)
            yield
        finally:
            lock.release()

    def hand_over(self, timeout: float | None) -> Any:
        """The answer, once it is there; then let go of it, and of what an error holds on to."""
        assert self.future is not None
        try:
            return self.future.result(timeout)
        except CancelledError:
            raise Cancelled from None
        finally:
            if self.future.done():
                self._progress, self.future = self.progress(), None
                self.delivered = True

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
