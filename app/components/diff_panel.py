"""What a head of a DIFF Transformer is made of: its two softmax heads, λ, and the formula."""

from __future__ import annotations

import streamlit as st

from app.components.panel import panel_head
from app.state import Selection
from dexviz.figures.numbers import three
from dexviz.probes.heads import is_differential, pairing_text
from dexviz.records import Capture, head_name

FORMULA = r"S = A_1 - \lambda A_2"
EXPLAIN = (
    "Two softmax maps A₁ and A₂ on the same values; the head's output is S applied to them. What both maps share cancels, so a "
    "row of S sums to 1 − λ and its entries can be negative."
)
SOFTMAX_MAP = "The attention score shows the softmax heads one by one; choose Signed to see the logical head."


def pair_line(capture: Capture, choice: Selection) -> None:
    """The head's partner or its two maps as a badge, and λ of its layer; nothing for other models."""
    if pairing := pairing_text(capture, choice.head):
        st.badge(pairing, color="orange")
        st.markdown(lambda_text(capture, choice.layer), width="content")


def lambda_text(capture: Capture, layer: int) -> str:
    """λ of a layer; V2 has one for every token and head, of which the mean is told."""
    value = f"**{three(float(capture.lam[layer]))}**"
    if capture.provenance.get("convention") == "V2":
        return f"λ of L{layer} per token and head, mean {value}"
    return f"λ of L{layer} {value}"


def diff_panel(capture: Capture, choice: Selection) -> None:
    """How S is made of two softmax maps, in the same place as what DEX does to a head; nothing for other models."""
    if not is_differential(capture):
        return
    name = head_name(choice.layer, choice.head)
    title = f"The pair of {name}" if capture.request.score == "attention" else f"What {name} is made of"
    panel_head(title, "λ, ratio", key="diff", explain=EXPLAIN, formula=FORMULA)
    pairing = capture.provenance.get("pairing")
    st.caption(
        f"{pairing_text(capture, choice.head)}. Logical head p is made of softmax heads {pairing}, of H softmax heads. "
        f"{lambda_text(capture, choice.layer)}."
    )
    if capture.request.score == "attention":
        st.caption(SOFTMAX_MAP)
        return
    st.latex(FORMULA)
    st.caption(f"{EXPLAIN} Rank and size of λA₂ are on the page Noise.")
