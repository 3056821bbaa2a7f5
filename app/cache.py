"""The only owner of st.cache_*, and the app's way to the engine: ask, wait a moment, come back later.

An answer is kept for every session under the JSON of its request; tickets and failures belong to one session.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import gallery, state
from app.answers import Answers
from dexviz.engine import get_engine
from dexviz.errors import Cancelled, DexvizError
from dexviz.requests import DescribePair, ModelInfo, PairInfo, PairSpec, Progress, Request, to_json

_log = logging.getLogger(__name__)

PATIENCE = 0.4
"""Seconds a page waits for the engine before it shows progress instead."""


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


Outcome = Ready | Pending | Failed


@st.cache_resource(show_spinner=False)
def _answers() -> Answers:
    return Answers(max_entries=96, max_bytes=512 << 20)


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


def ask(*requests: Request, patience: float = PATIENCE) -> Outcome:
    """Answers to all requests if they are there within `patience` seconds; the engine goes on in the background otherwise."""
    found = {key_of(request): _found_or_started(request) for request in requests}
    deadline = time.monotonic() + patience
    for key, value in found.items():
        found[key] = value if value is not None else _settle(key, max(0.0, deadline - time.monotonic()))
    for key in found:
        if key in state.failures():
            return Failed(_explain(state.failures()[key]))
    waiting = tuple(state.tickets()[key] for key, value in found.items() if value is None)
    return Pending(waiting) if waiting else Ready(tuple(found[key_of(request)] for request in requests))


def key_of(request: Request) -> str:
    """The whole request as text: equal only for equal requests."""
    return json.dumps(to_json(request), sort_keys=True)


def known_pair(pair: PairSpec) -> PairInfo | None:
    """Description of a pair that this process has loaded already; never loads one."""
    return _answers().get(key_of(DescribePair(pair)))


def progress(tickets: tuple[str, ...]) -> list[Progress]:
    """How far each ticket is."""
    return [get_engine().progress(ticket) for ticket in tickets]


def cancel(tickets: Iterable[str]) -> None:
    """Stop these tickets."""
    for ticket in tickets:
        get_engine().cancel(ticket)


def cancel_all() -> None:
    """Stop and forget whatever this session has running."""
    cancel(state.tickets().values())
    state.tickets().clear()


def _found_or_started(request: Request) -> Any | None:
    key = key_of(request)
    value = _answers().get(key)
    if value is None and key not in state.tickets() and key not in state.failures():
        state.tickets()[key] = get_engine().submit(request)
    return value


def _settle(key: str, patience: float) -> Any | None:
    """The ticket's answer if it comes within `patience` seconds; a failure is noted in the session."""
    ticket = state.tickets().get(key)
    if ticket is None:
        return None
    try:
        value = get_engine().result(ticket, timeout=patience)
    except Exception as error:
        if isinstance(error, TimeoutError) and get_engine().progress(ticket).state in ("queued", "running", "done"):
            return None
        if not isinstance(error, DexvizError | Cancelled):
            _log.exception("A request failed for a reason that is not the user's")
        state.failures()[key] = error
        value = None
    else:
        _answers().put(key, value)
    state.tickets().pop(key)
    return value


def _explain(error: Exception) -> str:
    if isinstance(error, Cancelled):
        return "Cancelled. Press Run to start again."
    if isinstance(error, DexvizError):
        return str(error)
    return f"Something failed inside dexviz ({type(error).__name__}). The server's log has the details; the prompt is kept."
