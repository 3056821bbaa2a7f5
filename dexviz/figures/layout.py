"""The look that all figures share: quiet ink, no gridlines, transparent background."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from dexviz.figures.numbers import three
from dexviz.figures.palette import Theme

INK: dict[Theme, str] = {"light": "#31333F", "dark": "#E6E8EC"}
"""Text and the mark of the selected head."""
QUIET: dict[Theme, str] = {"light": "#6B7280", "dark": "#9AA1AC"}
"""Tick labels and axis lines."""
HAIR: dict[Theme, str] = {"light": "#D5D9E0", "dark": "#39404C"}
"""Outlines of cells, zero lines."""
NOISE = 1e-6
"""Values whose spread is below this are shown as equal: what differs there is rounding."""
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


def value_ticks(*series: np.ndarray) -> dict[str, Any]:
    """Axis settings for these values: plain numbers, and one tick where they differ by rounding alone."""
    values = np.concatenate([np.ravel(part) for part in series])
    known = values[np.isfinite(values)]
    plain: dict[str, Any] = {"nticks": 4, "exponentformat": "e"}
    if known.size and np.ptp(known) >= NOISE:
        return plain
    middle = float(known.mean()) if known.size else 0.0
    middle = 0.0 if abs(middle) < NOISE else middle
    room = abs(middle) / 2 or 1.0
    return {"range": [middle - room, middle + room], "tickvals": [middle], "ticktext": [three(middle)]}


def scale_of(colors: list[str]) -> list[list[float | str]]:
    """A palette's stops at equal steps as plotly reads them."""
    return [[step / (len(colors) - 1), color] for step, color in enumerate(colors)]
