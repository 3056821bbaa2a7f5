"""The panel with the grid of all heads."""

from __future__ import annotations

import streamlit as st

from app import state
from app.components.head_line import switch
from app.components.panel import Download, panel_head
from app.components.theme import theme
from app.downloads import statistics_csv, statistics_json
from app.state import Selection, Widget
from dexviz.figures.head_grid import head_grid
from dexviz.probes.heads import SIDES, head_statistic
from dexviz.records import Capture

HEIGHT = 640
WIDTH = 270
"""The least width beside the maps (app.css): markers fit their cells there and anywhere wider."""


def grid_panel(base: Capture, variant: Capture, choice: Selection) -> None:
    """Grid of one side; a click selects the head everywhere."""
    result = head_statistic(base, variant, choice.statistic)
    stem = f"dexviz-heads-{variant.request.score}"
    panel_head(
        f"{result.title} by head",
        result.unit,
        key="grid",
        explain=f"{result.definition}\n\nRows are layers, columns are heads; the dot marks heads that DEX adapts. The curve at "
        "the right is each layer's mean over its heads. Base and variant share one colour scale, the change has its own.",
        downloads=(
            Download("Statistics, CSV", f"{stem}.csv", "text/csv", lambda: statistics_csv(base, variant)),
            Download("Statistics, JSON", f"{stem}.json", "application/json", lambda: statistics_json(base, variant)),
        ),
    )
    side = switch("Shown", SIDES, Widget.SIDE, "stretch")
    figure = head_grid(
        result,
        side or choice.side,
        selected=(choice.layer, choice.head),
        adapted=variant.selected,
        theme=theme(),
        width=WIDTH,
        height=HEIGHT,
    )
    st.plotly_chart(
        figure,
        key=state.GRID_KEY,
        theme=None,
        on_select=lambda: state.pick_in_grid(base.heads),
        selection_mode="points",
        config={"displayModeBar": False},
        alt=f"Grid of {base.layers} layers by {base.heads} heads, {result.title}, {side}",
    )
