"""The top line of the Noise page: the selected head, its SNR in base and variant, its neighbours, and which view is shown."""

from __future__ import annotations

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.components.head_line import head_steps, switch
from app.state import Selection, Widget
from dexviz.figures.numbers import three
from dexviz.noise_records import NoiseOnPrompt
from dexviz.records import VIEWS


def noise_line(found: NoiseOnPrompt | None, choice: Selection, size: tuple[int, int], *, variants: bool) -> DeltaGenerator:
    """Name, SNR, previous and next head, a switch between the views where there are two; returns the place for a menu."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="head-line"):
        head_steps(choice, size)
        if found is not None:
            st.markdown(snr_text(found, choice), width="content")
        if variants:
            switch("View", VIEWS, Widget.NOISE_VIEW)
        return st.container(width="content")


def snr_text(found: NoiseOnPrompt, choice: Selection) -> str:
    """SNR of the selected head: of both views where it is the same head in both, else of the view that is shown."""
    place, parts = (choice.layer, choice.head), []
    both = found.same_heads or found.variant is None
    for name, color, heads in (("base", "blue", found.base), ("variant", "orange", found.variant)):
        if heads is not None and (both or name == choice.noise_view):
            parts.append(f":{color}[{name} **{three(float(heads.snr[place]))}**]")
    if found.same_heads and found.variant is not None:
        parts.append(f"change **{three(float(found.variant.snr[place] - found.base.snr[place]), signed=True)}**")
    return "SNR  " + "  ".join(parts)
