"""The only owner of st.cache_*, and the app's way to the engine: ask, wait a moment, come back later.

An answer is kept for every session under the JSON of its request; tickets and failures belong to one session.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import gallery, state
from app.answers import Answers
from app.estimate import FIXED, Cost, cost, work
from dexviz.engine import get_engine
from dexviz.errors import Cancelled, DexvizError, SnapshotError
from dexviz.requests import CaptureView, DescribePair, ModelInfo, PairInfo, PairSpec, Progress, Prompt, Request, to_json

_log = logging.getLogger(__name__)

PATIENCE = 0.4
"""Seconds a page waits for the engine before it shows progress instead."""
MIN_MEASURED = 1.0
MIN_TOKENS = 256
"""Seconds and tokens from which on a capture tells the machine's speed."""


@dataclass(frozen=True)
class Ready:
    """All answers, in the order of the requests."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Pending:
    """The engine is at work on these tickets."""

    tickets: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """A request ended without an answer; the text is for the user."""

    text: str
    cancelled: bool = False
    """True where the user wanted it so."""


Outcome = Ready | Pending | Failed


@st.cache_resource(show_spinner=False)
def _answers() -> Answers:
    return Answers(max_entries=96, max_bytes=512 << 20)


@st.cache_resource(show_spinner=False)
def _rates() -> dict[str, float]:
    return {}


def cost_of(info: PairInfo, tokens: int) -> Cost:
    """What capturing so many tokens will take, going by what this process has measured."""
    return cost(info, tokens, _rates().get(info.device))


@st.cache_data(ttl=5, show_spinner=False)
def models() -> list[ModelInfo]:
    """Models and adapters that can be chosen by name."""
    return list(get_engine().models())


@st.cache_resource(max_entries=16, show_spinner=False)
def example(name: str, stamp: float) -> gallery.Example:
    """A ready example with its snapshots; `stamp` is the time of its files, so that a rebuilt one is read again."""
    return gallery.load(name)


def examples() -> list[gallery.Example]:
    """All ready examples, in the order of the gallery."""
    return [example(name, stamp) for name, stamp in gallery.stamps().items()]


def example_run(name: str) -> state.Ran | None:
    """Pair and prompt of a ready example, as its snapshots tell them; None where they cannot be read."""
    try:
        found = example(name, gallery.stamps().get(name, 0.0))
    except SnapshotError:
        return None
    made = found.variant.provenance
    pair = PairSpec(str(made.get("model") or "not recorded"), str(made["variant"]) if made.get("adapter") else None)
    return state.Ran(pair, Prompt(found.recipe.prompt, found.recipe.chat))


def on_screen(choice: state.Selection) -> state.Ran | None:
    """Pair and prompt whose results the pages show; None where nothing was run or opened yet."""
    return choice.ran if choice.example is None else example_run(choice.example)


def ask(*requests: Request, patience: float = PATIENCE) -> Outcome:
    """Answers to all requests if they are there within `patience` seconds; the engine goes on in the background otherwise."""
    found = [_found_or_started(request) for request in requests]
    deadline = time.monotonic() + patience
    for place, request in enumerate(requests):
        if found[place] is None:
            found[place] = _settle(request, max(0.0, deadline - time.monotonic()))
    keys = [key_of(request) for request in requests]
    failure = next((state.failures()[key] for key in keys if key in state.failures()), None)
    if failure is not None:
        return Failed(_explain(failure), isinstance(failure, Cancelled))
    waiting = tuple(state.tickets()[key].name for key, value in zip(keys, found, strict=True) if value is None)
    return Pending(waiting) if waiting else Ready(tuple(found))


def key_of(request: Request) -> str:
    """The whole request as text: equal only for equal requests."""
    return json.dumps(to_json(request), sort_keys=True)


def known_pair(pair: PairSpec) -> PairInfo | None:
    """Description of a pair that this process has loaded already; never loads one."""
    return _answers().get(key_of(DescribePair(pair)))


def progress(tickets: tuple[str, ...]) -> list[Progress]:
    """How far each ticket is."""
    return [_progress(ticket) for ticket in tickets]


def cancel(tickets: Iterable[str]) -> None:
    """Stop these tickets."""
    for ticket in tickets:
        with suppress(DexvizError):
            get_engine().cancel(ticket)


def cancel_all() -> None:
    """Stop and forget whatever this session has running."""
    cancel(ticket.name for ticket in state.tickets().values())
    state.tickets().clear()


def _progress(ticket: str) -> Progress:
    """Progress of a ticket; one that the engine has forgotten counts as failed."""
    try:
        return get_engine().progress(ticket)
    except DexvizError:
        return Progress("failed", "", 0, 0)


def _found_or_started(request: Request) -> Any | None:
    key = key_of(request)
    value = _answers().get(key)
    if value is None and key not in state.tickets() and key not in state.failures():
        warm = known_pair(request.pair) is not None
        state.tickets()[key] = state.Ticket(get_engine().submit(request), time.monotonic(), warm)
    return value


def _settle(request: Request, patience: float) -> Any | None:
    """The ticket's answer if it comes within `patience` seconds; a failure is noted in the session."""
    key = key_of(request)
    ticket = state.tickets().get(key)
    if ticket is None:
        return None
    try:
        value = get_engine().result(ticket.name, timeout=patience)
    except Exception as error:
        if isinstance(error, TimeoutError) and _progress(ticket.name).state in ("queued", "running", "done"):
            return None
        if not isinstance(error, DexvizError | Cancelled):
            _log.exception("A request failed for a reason that is not the user's")
        state.failures()[key] = error
        value = None
    else:
        _answers().put(key, value)
        if ticket.warm:
            _learn_speed(request, value, time.monotonic() - ticket.started)
    state.tickets().pop(key)
    return value


def _learn_speed(request: Request, value: Any, seconds: float) -> None:
    """Note how fast this machine is, once both views of a long prompt have taken long enough to tell."""
    if not isinstance(request, CaptureView) or request.view != "variant":
        return
    info, tokens = known_pair(request.pair), len(value.tokens)
    if info is not None and seconds > MIN_MEASURED and tokens >= MIN_TOKENS:
        _rates()[info.device] = work(info, tokens) / (seconds - FIXED)


def _explain(error: Exception) -> str:
    if isinstance(error, Cancelled):
        return "Cancelled. Press Run to start again."
    if isinstance(error, DexvizError):
        return str(error)
    return f"Something failed inside dexviz ({type(error).__name__}). The server's log has the details; the prompt is kept."
