"""A | noise term | S of the selected head: what is subtracted from attention, on the prompt's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state
from app.cache import Ready
from app.components.attention_map import NOISE_TERM, Lock, MapEvent, attention_map, pool_for
from app.components.panel import Download, panel_menu
from app.components.token_picker import Picked
from app.components.waiting import stand_in
from app.downloads import term_npy
from app.source import Source
from app.state import Selection
from dexviz.figures.numbers import BLANK, three
from dexviz.noise_records import NoiseTerm
from dexviz.records import HeadMap, Tokens, ViewName, head_name

HEIGHT = 480
MAP_KEY = "noise-map"
DEX_FORMULA = r"S_{ij} = A_{ij} - N_{ij}, \qquad N_{ij} = (1 - \rho_j)\,A_{ij}"
DIFF_FORMULA = r"S_{ij} = A_{1,ij} - N_{ij}, \qquad N_{ij} = \lambda\,A_{2,ij}"
DERIVED = (
    "DEX acts on values, so S is a derived score: ρ is the gain that best describes what DEX does to a token's value, "
    "and ε the share of the adapted value that ρ does not explain."
)
EXPLAIN = (
    "Left the head's softmax map, in the middle what is subtracted from it, right the signed score S. Row i is the query and "
    "predicts token i + 1; columns are keys. A and S share one scale, the noise term has its own unless you choose the common "
    "one."
)


def triptych(
    source: Source, tokens: Tokens, choice: Selection, view: ViewName, menu: DeltaGenerator, picked: Picked | None = None
) -> HeadMap | None:
    """Ask for the head's signed map and show its three parts, their menu in `menu`; the map once it is there."""
    event = MapEvent(None if choice.lock is None else Lock(*choice.lock), choice.focus)
    window = event.window(len(tokens))
    outcome = source.map(view, choice.layer, choice.head, window, None if window else pool_for(len(tokens)))
    name = head_name(choice.layer, choice.head)
    if not isinstance(outcome, Ready):
        stand_in(outcome, HEIGHT)
        return None
    (head,) = outcome.values
    differential = bool(head.terms)
    with menu:
        panel_menu(
            key="triptych",
            explain=EXPLAIN if differential else f"{EXPLAIN} {DERIVED}",
            formula=DIFF_FORMULA if differential else DEX_FORMULA,
            downloads=(
                Download(
                    "A and S, npy",
                    f"dexviz-noise-L{head.layer}-H{head.head}.npy",
                    "application/octet-stream",
                    lambda: term_npy(head),
                ),
            ),
        )
    third = replace(NOISE_TERM, name="− λ A₂", formula="A₁ − S") if differential else NOISE_TERM
    names = ("A₁" if differential else "A", "= S")
    attention_map(
        replace(head, scores=head.attention, extreme=None),
        replace(head, extreme=None),
        tokens,
        key=MAP_KEY,
        title=f"{names[0]} {third.name} {names[1]} of {name}, {view}, {len(tokens):,} × {len(tokens):,} tokens",
        names=names,
        third=third,
        lock=event.lock,
        marks=(picked or Picked()).spans(),
        on_change=_remember,
    )
    return head


def _remember(event: MapEvent) -> None:
    state.remember_map(None if event.lock is None else (event.lock.query, event.lock.key), event.focus)


def formula_line(head: HeadMap, lam: float | None) -> None:
    """The formula with the head's numbers in it, and for DEX the note that S is derived; λ None: one a token; NaN: unknown."""
    if head.terms:
        st.latex(DIFF_FORMULA)
        if lam is None:
            st.caption("λ is one a token in this model.")
        elif np.isfinite(lam):
            st.caption(f"λ of L{head.layer} is {three(lam)}.")
    elif head.gain is None or head.residue is None:
        st.caption(f"Nothing is subtracted in {head_name(head.layer, head.head)}: S is A.")
    else:
        st.latex(DEX_FORMULA)
        st.caption(f"{DERIVED} Here ρ is {_reach(head.gain)} and ε {_reach(head.residue)} over the keys.")


def term_line(term: NoiseTerm) -> None:
    """Size and rank of what is subtracted, and how alike A₁ and A₂ are."""
    if term.kind == "none":
        return
    cells = {
        "‖N‖ / ‖A‖": three(term.energy),
        "effective rank of N": BLANK if term.rank is None else three(term.rank),
        "effective rank of A": three(term.attention_rank),
    }
    if term.kind == "diff":
        salient, rest = (BLANK if x is None else three(x) for x in (term.correlation_salient, term.correlation_rest))
        cells |= {"corr(A₁, A₂), salient keys": salient, "corr(A₁, A₂), other keys": rest}
    st.markdown("\n".join(f"| {' | '.join(row)} |" for row in (cells.keys(), ["---:"] * len(cells), cells.values())))
    if term.kind == "diff":
        st.caption("Salient keys are a row's top tenth by A₁; means over rows of at least thirty keys.")


def _reach(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return f"{three(float(known.min()))} to {three(float(known.max()))}" if known.size else BLANK
