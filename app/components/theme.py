"""The theme that the browser shows."""

from __future__ import annotations

import streamlit as st

from dexviz.figures.palette import MARKS, Theme


def theme() -> Theme:
    """Light unless the browser says dark."""
    return "dark" if st.context.theme.type == "dark" else "light"


def mark_variables(root: str) -> str:
    """CSS that gives everything below the class `root` the colours of needle and question."""
    return f".{root} {{ {' '.join(f'--{name}: {color};' for name, color in MARKS.items())} }}\n"
