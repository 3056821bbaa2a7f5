"""The prompt as tokens of which spans can be marked: a first and a last token become a needle, or the question.

picked = token_picker(tokens, Picked(((3, 7),), None), key="noise-marks", on_change=…)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app.components.attention_map import tokens_name
from app.components.map_payload import clip_label
from app.components.theme import mark_variables
from dexviz.records import Tokens

Span = tuple[int, int]
MOST_SPANS = 64
_HERE = Path(__file__).parent
_mount = st.components.v2.component(
    "dexviz_token_picker",
    css=mark_variables("token-picker") + (_HERE / "token_picker.css").read_text(encoding="utf-8"),
    js=(_HERE / "token_picker.js").read_text(encoding="utf-8"),
)


@dataclass(frozen=True)
class Picked:
    """Half-open spans of tokens."""

    needle: tuple[Span, ...] = ()
    question: Span | None = None

    def spans(self) -> dict[str, tuple[Span, ...]]:
        """Kind of mark → its spans."""
        return {"needle": self.needle, "question": () if self.question is None else (self.question,)}


def token_picker(
    tokens: Tokens, picked: Picked, *, key: str, rows: tuple[int, ...] = (), on_change: Callable[[Picked], None] | None = None
) -> None:
    """Show the tokens with what is marked.

    Args:
        picked: what the page holds to be marked; the component shows it and never anything else.
        key: identity across reruns.
        rows: tokens whose query rows are measured; they are underlined.
        on_change: called with the new marks before the rerun that they cause.
    """
    data: dict[str, Any] = {
        "tokens": tokens_name(tokens),
        "labels": [clip_label(label) for label in tokens.labels],
        "special": [int(i) for i in tokens.special.nonzero()[0]],
        "needle": [list(span) for span in picked.needle],
        "question": None if picked.question is None else list(picked.question),
        "rows": list(rows),
    }

    def changed() -> None:
        value = st.session_state.get(key)
        found = decode(value.get("marks") if isinstance(value, Mapping) else None, tokens)
        if on_change is not None and found is not None and found != picked:
            on_change(found)

    _mount(key=key, data=data, on_marks_change=changed)


def decode(raw: object, tokens: Tokens) -> Picked | None:
    """What the browser sent, checked; None where it is malformed or about another prompt."""
    if not isinstance(raw, Mapping) or raw.get("tokens") != tokens_name(tokens):
        return None
    spans, question = raw.get("needle"), raw.get("question")
    if not isinstance(spans, list) or len(spans) > MOST_SPANS:
        return None
    needle = [_span(span, len(tokens)) for span in spans]
    asked = None if question is None else _span(question, len(tokens))
    if None in needle or (question is not None and asked is None):
        return None
    return Picked(tuple(sorted(span for span in needle if span is not None)), asked)


def _span(raw: object, count: int) -> Span | None:
    if not isinstance(raw, list) or len(raw) != 2 or not all(type(edge) is int for edge in raw):
        return None
    start, stop = raw
    return (start, stop) if 0 <= start < stop <= count else None
