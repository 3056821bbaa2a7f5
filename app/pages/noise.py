"""What a head subtracts, and whether it helps: the noise term on tokens, signal and noise on a marked needle, a battery."""

from __future__ import annotations

import math

import streamlit as st

from app import cache, source, state
from app.cache import Failed, Ready
from app.components.empty import example_line, no_prompt_yet
from app.components.noise_battery import battery_numbers, battery_panel, claims_panel
from app.components.noise_heads import heads_panel, means_line
from app.components.noise_line import noise_line
from app.components.noise_marks import answer_after, marks_panel, picked_of
from app.components.noise_triptych import formula_line, term_line, triptych
from app.components.text import plain
from app.components.waiting import show_failure, stand_in
from app.routing import show
from app.source import Live, Stored
from app.state import Marked, Selection
from dexviz.noise_records import Marks, NoiseOnPrompt
from dexviz.probes.noise_terms import MOST_TOKENS
from dexviz.records import HeadMap, Tokens
from dexviz.requests import DescribeNoise, DescribePair, MeasureNoise, TokenizePrompt

SKELETON, TERM = 480, 110


def page() -> None:
    """Pick the source, then show whatever of it is there."""
    here = source.chosen()
    if here is None:
        no_prompt_yet(state.current())
    elif isinstance(here, Failed):
        show_failure(here)
    elif isinstance(here, Stored):
        show_stored(here)
    else:
        assert isinstance(here, Live)
        outcome = cache.ask(TokenizePrompt(here.pair, here.prompt))
        if isinstance(outcome, Ready):
            show_noise(here, outcome.values[0])
        else:
            stand_in(outcome, SKELETON)


def show_stored(here: Stored) -> None:
    """A ready example has maps, and no marks."""
    base, variant = here.example.base, here.example.variant
    state.keep_head_within(base.layers, base.heads)
    state.keep_lock_within(len(base.tokens))
    choice = state.current()
    example_line(here.example)
    menu = noise_line(None, choice, (base.layers, base.heads), variants=True)
    held = here.map(choice.noise_view, choice.layer, choice.head)
    if isinstance(held, Failed):
        st.info(plain(held.text), icon=":material/info:")
        return
    head = triptych(here, variant.tokens, choice, choice.noise_view, menu)
    if head is not None:
        formula_line(head, float(variant.lam[choice.layer]))
    st.caption("Signal and noise on a marked needle are measured with the model: press Run.")


def show_noise(here: Live, tokens: Tokens) -> None:
    """Triptych, marks, then heads beside the battery."""
    state.keep_lock_within(len(tokens))
    choice = state.current()
    marked = choice.marks(here.prompt)
    rows = _rows(tokens, marked, choice)
    found, failure = _measured(here, marked, rows, answer_after(here.prompt, choice.answer))
    compared = here.pair.adapter is not None or here.pair.variant is not None
    view = choice.noise_view if compared else "base"
    described = cache.ask(DescribePair(here.pair), patience=2.0)
    info = described.values[0] if isinstance(described, Ready) else None
    if found is not None:
        layers, heads = found.heads_of(view).snr.shape
    elif info is not None:
        layers, heads = (info.variant_layers, info.variant_heads) if view == "variant" else (info.layers, info.heads)
    else:
        layers, heads = choice.layer + 1, choice.head + 1
    state.keep_head_within(layers, heads)
    choice = state.current()
    menu = noise_line(found, choice, (layers, heads), variants=compared)
    head = triptych(here, tokens, choice, view, menu, picked_of(tokens, marked))
    if head is not None:
        lam = info.lam[choice.layer] if info is not None and view == "variant" else math.nan
        _about_term(here, head, choice, view, lam)
    marks_panel(tokens, here.prompt, choice, rows or (len(tokens) - 1,))
    if found is not None:
        means_line(found)
    left, right = st.columns(2, gap="medium")
    with right:
        _heads(found, failure, choice, view)
    with left:
        report = battery_panel(here.pair, choice)
    if report is not None:
        battery_numbers(report)
    claims_panel(here.pair, choice)


def _rows(tokens: Tokens, marked: Marked, choice: Selection) -> tuple[int, ...] | None:
    """The locked query row where it sees the whole needle; None for the last row."""
    query = None if choice.lock is None else choice.lock[0]
    stops = [stop for _, stop in picked_of(tokens, marked).needle]
    return (query,) if query is not None and stops and query >= max(stops) - 1 else None


def _measured(
    here: Live, marked: Marked, rows: tuple[int, ...] | None, answer: str | None
) -> tuple[NoiseOnPrompt | None, object]:
    """Noise on the marked prompt if it is there, and otherwise what stands in for it."""
    if not marked.needle:
        return None, None
    request = MeasureNoise(
        here.pair,
        here.prompt,
        Marks(marked.needle, marked.question),
        rows=rows,
        score=here.request.score,
        space=here.request.space,
        answer=answer,
    )
    outcome = cache.ask(request, patience=1.0)
    return (outcome.values[0], None) if isinstance(outcome, Ready) else (None, outcome)


def _about_term(here: Live, head: HeadMap, choice: Selection, view: str, lam: float | None) -> None:
    formula_line(head, lam)
    if (head.terms or head.gain is not None) and head.row_edges[-1] <= MOST_TOKENS:
        request = DescribeNoise(
            here.pair, here.prompt, "base" if view == "base" else "variant", choice.layer, choice.head, here.request.space
        )
        outcome = cache.ask(request)
        if isinstance(outcome, Ready):
            term_line(outcome.values[0])
        else:
            stand_in(outcome, TERM)


def _heads(found: NoiseOnPrompt | None, waiting: object, choice: Selection, view: str) -> None:
    if found is not None:
        heads_panel(found, choice, "base" if view == "base" else "variant")
    elif isinstance(waiting, cache.Pending | Failed):
        stand_in(waiting, SKELETON)
    else:
        with st.container(border=True, height=330, vertical_alignment="center"):
            st.markdown("#### No needle is marked")
            st.markdown(
                "Click the first and the last token of what the answer depends on, in the prompt above. "
                "The presets Needle, Distractors, Examples and Code come with marks."
            )


show(page)
