"""The look that all figures share: quiet ink, no gridlines, transparent background."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from dexviz.figures.palette import Theme

INK: dict[Theme, str] = {"light": "#31333F", "dark": "#E6E8EC"}
"""Text and the mark of the selected head."""
QUIET: dict[Theme, str] = {"light": "#6B7280", "dark": "#9AA1AC"}
"""Tick labels and axis lines."""
HAIR: dict[Theme, str] = {"light": "#D5D9E0", "dark": "#39404C"}
"""Outlines of cells, zero lines."""
FONT = "'Source Sans', 'Source Sans Pro', sans-serif"


def quiet_figure(theme: Theme, height: int, margin: tuple[int, int, int, int] = (0, 0, 0, 0)) -> go.Figure:
    """An empty figure of fixed height; `margin` is left, right, top, bottom in pixels."""
    left, right, top, bottom = margin
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": left, "r": right, "t": top, "b": bottom, "pad": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": QUIET[theme]},
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 13}},
        hovermode="closest",
        showlegend=False,
        dragmode=False,
        uirevision="fixed",
    )
    return figure


def bare_axis(**settings: Any) -> dict[str, Any]:
    """An axis without grid, line, zero line or zoom."""
    return {"showgrid": False, "zeroline": False, "showline": False, "fixedrange": True, "ticks": "", **settings}


def scale_of(colors: list[str]) -> list[list[float | str]]:
    """A palette's stops at equal steps as plotly reads them."""
    return [[step / (len(colors) - 1), color] for step, color in enumerate(colors)]
