"""Marking the needle of one's own prompt: tokens on screen, characters in the state."""

from __future__ import annotations

import streamlit as st

from app import state
from app.components.panel import panel_head
from app.components.token_picker import Picked, Span, token_picker
from app.state import Marked, Selection, Widget
from dexviz.errors import CaptureError
from dexviz.records import Tokens
from dexviz.requests import Prompt

KEY = "noise-marks"
EXPLAIN = (
    "The needle is what the answer depends on, the question repeats it. Signal is the mass of the measured row per needle "
    "token, noise the mass per other token; question and first token count as neither. Marks are kept as characters of the "
    "prompt."
)


def marks_panel(tokens: Tokens, prompt: Prompt, choice: Selection, rows: tuple[int, ...]) -> None:
    """The prompt's tokens with the marks; a change goes into the state."""
    marked = choice.marks(prompt)
    panel_head("Needle and question", "click tokens to mark them", key="marks", explain=EXPLAIN)
    if choice.marked is not None and choice.marked.prompt != prompt:
        st.caption("The marks of the prompt before do not fit this one and are not used.")
    token_picker(
        tokens,
        picked_of(tokens, marked),
        key=KEY,
        rows=rows,
        on_change=lambda picked: state.mark(prompt, *characters_of(tokens, prompt, picked)),
    )
    st.text_input(
        "Answer",
        key=Widget.ANSWER,
        persist_state="session",
        placeholder="what the prompt should be answered with; its log-probability is measured",
    )


def answer_after(prompt: Prompt, answer: str) -> str | None:
    """The answer as it follows the prompt: with a space between where neither has one; None without an answer."""
    if not answer.strip():
        return None
    apart = prompt.chat or prompt.text[-1:].isspace() or answer[:1].isspace()
    return answer if apart else f" {answer}"


def picked_of(tokens: Tokens, marked: Marked) -> Picked:
    """Token spans of marks; those that no token covers are left out."""
    shift = typed_at(tokens, marked.prompt)
    spans = [_tokens(tokens, span, shift) for span in marked.needle]
    question = None if marked.question is None else _tokens(tokens, marked.question, shift)
    return Picked(tuple(sorted({span for span in spans if span is not None})), question)


def characters_of(tokens: Tokens, prompt: Prompt, picked: Picked) -> tuple[tuple[Span, ...], Span | None]:
    """Character spans of picked tokens within the prompt as typed; what lies outside it is left out."""
    shift = typed_at(tokens, prompt)
    spans = [_characters(tokens, span, shift, prompt.text) for span in picked.needle]
    question = None if picked.question is None else _characters(tokens, picked.question, shift, prompt.text)
    return tuple(span for span in spans if span is not None), question


def typed_at(tokens: Tokens, prompt: Prompt) -> int:
    """Where the prompt begins in what was tokenised; a chat template stands around it and may strip its ends."""
    typed = prompt.text.strip()
    found = tokens.text.find(typed)
    return 0 if found < 0 else found - prompt.text.index(typed)


def _tokens(tokens: Tokens, span: Span, shift: int) -> Span | None:
    try:
        return tokens.span_of(span[0] + shift, span[1] + shift)
    except CaptureError:
        return None


def _characters(tokens: Tokens, span: Span, shift: int, text: str) -> Span | None:
    """The tokens' characters without white space at the ends, where they are typed ones."""
    start = max(0, int(tokens.offsets[span[0], 0]) - shift)
    stop = min(len(text), int(tokens.offsets[span[1] - 1, 1]) - shift)
    part = text[start:stop]
    start, stop = start + len(part) - len(part.lstrip()), stop - (len(part) - len(part.rstrip()))
    return (start, stop) if start < stop else None
