"""The attention map in the browser: base | variant | difference of one head, linked, with the prompt's tokens below.

    event = attention_map(base, variant, tokens, key="heads-map", title="L12·H3", on_change=state.remember_map_event)

Above `EXACT_LIMIT` tokens, pages ask the engine for `pool=pool_for(len(tokens))`. A click on a tile arrives as `event.focus`;
the page answers with the exact maps of `event.window(len(tokens))`, and the component offers the way back. For a locked token
of a tiled map, `event.strip_window(len(tokens))` is the row or column whose exact values the page can pass as `strips`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import streamlit as st

from app.components.map_payload import EXACT_LIMIT, clip_label, digest, encode, pool_for, window_around
from app.components.theme import mark_variables
from dexviz.figures.palette import ACCENTS, DIVERGING, MARKS, SEQUENTIAL
from dexviz.records import HeadMap, Tokens, ViewName, head_name

__all__ = ["EXACT_LIMIT", "Lock", "MapEvent", "attention_map", "decode_event", "pool_for"]

UNITS = {"attention": "share of attention", "signed": "signed score", "contribution": "share of head output"}
KEEP: Literal["keep"] = "keep"
_HERE = Path(__file__).parent
_SCRIPTS = (
    "map_data.js",
    "map_colour.js",
    "map_text.js",
    "map_panel.js",
    "map_locked.js",
    "map_strip.js",
    "map_frame.js",
    "map_view.js",
)
_mount = st.components.v2.component(
    "dexviz_attention_map",
    css=mark_variables("attention-map") + (_HERE / "attention_map.css").read_text(encoding="utf-8"),
    js="\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS),
)


@dataclass(frozen=True)
class Lock:
    """What is pinned: a query row, a key column, or the cell of both; the other position is None."""

    query: int | None = None
    key: int | None = None


@dataclass(frozen=True)
class Third:
    """What the third map is called and how it comes from the other two."""

    name: str
    formula: str
    nothing: str
    """Stands under a map of zeros."""
    negated: bool = False
    """Base − variant, where False is variant − base."""
    middle: bool = False
    """Between the other two, as in A − N = S."""


DIFFERENCE = Third("Difference", "", "no difference anywhere")
NOISE_TERM = Third("− Noise term N", "A − S", "nothing is subtracted", negated=True, middle=True)


@dataclass(frozen=True)
class MapEvent:
    """What the user has chosen in the map: a lock, and the pair around which exact values are wanted."""

    lock: Lock | None = None
    focus: tuple[int, int] | None = None
    """(query, key) of the tile that was opened; None for the whole map."""

    def window(self, tokens: int) -> tuple[int, int, int, int] | None:
        """The window to ask the engine for (`MapHead.window`); None for the whole map."""
        return None if self.focus is None else window_around(*self.focus, tokens)

    def strip_window(self, tokens: int) -> tuple[int, int, int, int] | None:
        """Window of the locked query's row or the locked key's column; None without a lock."""
        lock = self.lock or Lock()
        if lock.query is not None:
            return (lock.query, lock.query + 1, 0, tokens)
        return None if lock.key is None else (0, tokens, lock.key, lock.key + 1)


def decode_event(raw: object, tokens: Tokens) -> MapEvent:
    """What the browser sent, checked: anything malformed, out of range or about another prompt counts as no choice."""
    if not isinstance(raw, Mapping) or raw.get("tokens") != tokens_name(tokens):
        return MapEvent()

    def position(value: object) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(tokens) else None

    def pair(name: str) -> Lock:
        value = raw.get(name)
        return Lock(position(value.get("query")), position(value.get("key"))) if isinstance(value, Mapping) else Lock()

    lock, focus = pair("lock"), pair("focus")
    tile = None if focus.query is None or focus.key is None else (focus.query, focus.key)
    return MapEvent(None if lock == Lock() else lock, tile)


def attention_map(
    base: HeadMap,
    variant: HeadMap | None,
    tokens: Tokens,
    *,
    key: str,
    title: str | None = None,
    names: tuple[str, str] = ("Base", "Variant"),
    third: Third = DIFFERENCE,
    only: ViewName | None = None,
    lock: Lock | Literal["keep"] | None = KEEP,
    strips: Sequence[tuple[HeadMap, HeadMap | None]] = (),
    marks: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    on_change: Callable[[MapEvent], None] | None = None,
) -> MapEvent:
    """Show one head's maps and return what the user has chosen in them.

    Args:
        base, variant: maps over the same tokens: exact up to `EXACT_LIMIT` tokens, tiles, or an exact window. Without a
            variant the base stands alone.
        key: identity across reruns; the view (lock, options) belongs to it.
        title: stands above the panels; the head's name unless given.
        names: what base and variant are called.
        third: what their difference is called, and where it stands.
        only: the view that stands alone, for its colour.
        lock: the lock the page wants, for a page that keeps locks in its own state; `KEEP` leaves it to the component.
        strips: exact rows (1 × N) or columns (N × 1) of both views, which replace tile means in the token strip.
        marks: kind ("needle", "question") → half-open spans of tokens, which keep its colour along the axes and in the strip.
        on_change: called with the new event before the rerun that it causes.

    Raises:
        CaptureError: base and variant do not cover the same tokens.
        BudgetError: the maps are too large for one payload.
    """
    reported = _reported(key, tokens)
    header = map_header(base, tokens, key=key, title=title, names=names, third=third)
    header |= {"only": only, "marks": [[kind, *span] for kind, spans in (marks or {}).items() for span in spans]}
    if lock != KEEP and lock != reported.lock:
        header["lock"] = asdict(lock or Lock())

    def changed() -> None:
        if on_change is not None:
            on_change(_reported(key, tokens))

    result = _mount(key=key, data=encode((base, variant), strips, header), on_view_change=changed)
    return decode_event(result.get("view"), tokens)


def map_header(
    base: HeadMap,
    tokens: Tokens,
    *,
    key: str,
    title: str | None = None,
    names: tuple[str, str] = ("Base", "Variant"),
    third: Third = DIFFERENCE,
) -> dict[str, Any]:
    """What goes to the browser beside the values; see `attention_map`."""
    return {
        "id": key,
        "head": head_name(base.layer, base.head),
        "title": title or head_name(base.layer, base.head),
        "names": list(names),
        "third": {**asdict(third), "formula": third.formula or f"{names[1]} − {names[0]}"},
        "score": base.score,
        "unit": UNITS.get(base.score, base.score),
        "tokens": tokens_name(tokens),
        "labels": [clip_label(label) for label in tokens.labels],
        "palette": {"accents": ACCENTS, "sequential": SEQUENTIAL, "diverging": DIVERGING, "marks": MARKS},
    }


def _reported(key: str, tokens: Tokens) -> MapEvent:
    """The event that the component of this key sent last."""
    value = st.session_state.get(key)
    return decode_event(value.get("view") if isinstance(value, Mapping) else None, tokens)


def tokens_name(tokens: Tokens) -> str:
    """Short name of a prompt, which every event carries: a choice made in one prompt means nothing in another."""
    return digest("\x00".join((*map(str, tokens.ids), *tokens.labels)).encode("utf-8", "replace"))
