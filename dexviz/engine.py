"""The one door to the device: plain requests in, plain results out, with progress and cancellation.

The app asks here for everything that touches a model. `LocalEngine` serves requests on threads of this
process. Each base model is loaded once however many sessions ask; a request carries all it needs and leaves nothing behind
but caches, so sessions cannot disturb each other.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeout
from typing import Any, Protocol

from dexviz import catalogue
from dexviz.errors import DexvizError
from dexviz.requests import (
    CaptureView,
    CheckClaims,
    DescribeNoise,
    MapHead,
    MeasureNoise,
    ModelInfo,
    PairSpec,
    Progress,
    Request,
    RunBattery,
)
from dexviz.tasks import Task

OnProgress = Callable[[Progress], None]
_PASSES = CaptureView | MapHead | MeasureNoise | DescribeNoise | RunBattery | CheckClaims
_PASS_WORKERS, _LIGHT_WORKERS = 2, 4
"""Threads for passes over the device, which take turns there, and for what must not wait behind them."""
_DELIVERED_KEPT, _FINISHED_KEPT = 256, 16
"""Tickets that are remembered after their answer was handed over; answers that wait to be fetched."""


class Engine(Protocol):
    """What the app relies on; a worker in another process can implement it over a wire."""

    def models(self) -> list[ModelInfo]:
        """Models and adapters that can be chosen by name. Loads nothing."""

    def submit(self, request: Request) -> str:
        """Queue a request → its ticket."""

    def progress(self, ticket: str) -> Progress:
        """How far it is. Never waits."""

    def result(self, ticket: str, timeout: float | None = None) -> Any:
        """Its answer, handed over once. Raises what the request raised, Cancelled, or TimeoutError after `timeout` seconds."""

    def cancel(self, ticket: str) -> None:
        """Ask it to stop; `result` then raises Cancelled."""

    def run(self, request: Request, on_progress: OnProgress | None = None) -> Any:
        """Submit, follow, and return the answer."""

    def unload(self, pair: PairSpec) -> None:
        """Free what the pair holds in memory."""


class LocalEngine:
    """Serves requests in this process, on threads; passes over one device take turns."""

    def __init__(self) -> None:
        self._passes = ThreadPoolExecutor(_PASS_WORKERS, thread_name_prefix="dexviz-pass")
        self._light = ThreadPoolExecutor(_LIGHT_WORKERS, thread_name_prefix="dexviz-light")
        self._tasks: dict[str, Task] = {}
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._server: Any = None

    def models(self) -> list[ModelInfo]:
        """See Engine."""
        return catalogue.models()

    def submit(self, request: Request) -> str:
        """See Engine."""
        ticket, task = uuid.uuid4().hex, Task()
        pool = self._passes if isinstance(request, _PASSES) else self._light
        with self._lock:
            self._forget_old()
            self._tasks[ticket] = task
            task.future = pool.submit(self._serve, request, task)
        return ticket

    def progress(self, ticket: str) -> Progress:
        """See Engine."""
        return self._task(ticket).progress()

    def result(self, ticket: str, timeout: float | None = None) -> Any:
        """See Engine."""
        task = self._task(ticket)
        if task.delivered:
            raise _unknown(ticket)
        try:
            return task.hand_over(timeout)
        except FutureTimeout:
            if task.delivered:
                raise
            raise TimeoutError(f"not finished after {timeout} s") from None

    def cancel(self, ticket: str) -> None:
        """See Engine."""
        task = self._task(ticket)
        task.cancelled.set()
        if task.future is not None:
            task.future.cancel()

    def run(self, request: Request, on_progress: OnProgress | None = None) -> Any:
        """See Engine."""
        ticket = self.submit(request)
        last: Progress | None = None
        while True:
            try:
                return self.result(ticket, timeout=0.1 if on_progress is not None else None)
            except TimeoutError:
                now = self.progress(ticket)
                if on_progress is not None and now != last:
                    on_progress(now)
                last = now

    def unload(self, pair: PairSpec) -> None:
        """See Engine."""
        if self._server is not None:
            self._server.unload(pair)

    def _serve(self, request: Request, task: Task) -> Any:
        task.report("starting", 0, 1)
        return self._get_server().serve(request, task)

    def _get_server(self) -> Any:
        """Imports torch only when the first request comes, so that pages open before that."""
        with self._starting:
            if self._server is None:
                share_cores()
                from dexviz.serving import Server

                self._server = Server()
            return self._server

    def _task(self, ticket: str) -> Task:
        task = self._tasks.get(ticket)
        if task is None:
            raise _unknown(ticket)
        return task

    def close(self) -> None:
        """Let running requests finish, drop the others, and end the threads."""
        for pool in (self._passes, self._light):
            pool.shutdown(wait=True, cancel_futures=True)

    def _forget_old(self) -> None:
        delivered = [ticket for ticket, task in self._tasks.items() if task.delivered]
        finished = [ticket for ticket, task in self._tasks.items() if task.future is not None and task.future.done()]
        for tickets, kept in ((delivered, _DELIVERED_KEPT), (finished, _FINISHED_KEPT)):
            for ticket in tickets[: max(0, len(tickets) - kept)]:
                del self._tasks[ticket]


def _unknown(ticket: str) -> DexvizError:
    return DexvizError("a ticket of this engine whose answer was not fetched yet", repr(ticket), "Submit the request again.")


def share_cores() -> None:
    """Let idle OpenMP threads sleep rather than spin, unless the user has said otherwise. Call it before torch is imported.

    Beside a browser or another session on the same cores, spinning threads made torch operators ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_engine: LocalEngine | None = None
_engine_lock = threading.Lock()


def get_engine() -> Engine:
    """The engine of this process; made on the first call."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = LocalEngine()
        return _engine
