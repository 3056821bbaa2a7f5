"""The chosen statistic of the selected head along the prompt."""

from __future__ import annotations

import streamlit as st

from app.components.panel import panel_head
from app.components.theme import theme
from app.state import Selection
from dexviz.figures.curves import row_curve
from dexviz.probes.heads import head_rows
from dexviz.records import Capture


def rows_panel(base: Capture, variant: Capture, choice: Selection) -> None:
    """Base and variant by query token."""
    result = head_rows(base, variant, choice.statistic, choice.layer, choice.head)
    panel_head(result.title, result.unit, key="rows", explain=result.definition)
    st.plotly_chart(row_curve(result, theme=theme()), key="row-curve", theme=None, config={"displayModeBar": False})
