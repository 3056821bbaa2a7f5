"""The theme that the browser shows."""

from __future__ import annotations

import streamlit as st

from dexviz.figures.palette import Theme


def theme() -> Theme:
    """Light unless the browser says dark."""
    return "dark" if st.context.theme.type == "dark" else "light"
