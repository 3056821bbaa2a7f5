"""State ↔ query string. What comes from a link is checked value by value; whatever does not fit is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dexviz.probes.heads import SIDES
from dexviz.records import SCORES, SPACES, STATISTICS, VIEWS

MOST_SPANS = 64
"""Marked spans that are read from a link."""
MAX_TEXT = 100_000
"""Characters of prompt that are read from a link."""


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return read


def _text(limit: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not text or len(text) > limit:
            raise ValueError(len(text))
        return text

    return read


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise ValueError(text)
    return int(text)


def _lock(text: str) -> tuple[int | None, int | None]:
    query, key = (_position(part) for part in text.split("."))
    if query is None and key is None:
        raise ValueError(text)
    return query, key


def _position(text: str) -> int | None:
    if text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 7):
        raise ValueError(text)
    return int(text)


def _spans(text: str) -> tuple[tuple[int, int], ...]:
    """ "3-9_12-20": half-open spans of characters."""
    found = tuple(_span(part) for part in text.split("_"))
    if len(found) > MOST_SPANS:
        raise ValueError(len(found))
    return found


def _span(text: str) -> tuple[int, int]:
    start, stop = (_position(part) for part in text.split("-"))
    if start is None or stop is None or start >= stop:
        raise ValueError(text)
    return start, stop


_READ: dict[str, Callable[[str], Any]] = {
    "base": _text(300),
    "adapter": _text(300),
    "variant": _text(300),
    "draft": _text(MAX_TEXT),
    "chat": lambda text: _one_of(("1", "0"))(text) == "1",
    "score": _one_of(SCORES),
    "space": _one_of(SPACES),
    "statistic": _one_of(tuple(STATISTICS)),
    "side": _one_of(SIDES),
    "view": _one_of(VIEWS),
    "example": _text(60),
    "layer": _index,
    "head": _index,
    "lock": _lock,
    "answer": _text(300),
    "needle": _spans,
    "question": _span,
}


def read(params: Mapping[str, str]) -> dict[str, Any]:
    """State values out of a query string."""
    values = {}
    for key, parse in _READ.items():
        try:
            if key in params:
                values[key] = parse(params[key])
        except ValueError:
            continue
    return values


def write(values: Mapping[str, Any]) -> dict[str, str]:
    """Query string of state values; blanks are left out."""
    texts = {}
    for key in _READ:
        value = values.get(key)
        if value is None or value in ("", ()) or value is False:
            continue
        if key in ("needle", "question"):
            spans = value if key == "needle" else (value,)
            texts[key] = "_".join(f"{start}-{stop}" for start, stop in spans)
        elif key == "lock":
            texts[key] = ".".join("" if part is None else str(part) for part in value)
        else:
            texts[key] = "1" if value is True else str(value)
    return texts
