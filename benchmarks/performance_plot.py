"""The plot of docs/performance.md: time and peak extra memory against tokens, both axes logarithmic.

The page is read on light and on dark backgrounds: the paper is transparent, and every colour stands out on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

INK, LINES = "#7D8590", "rgba(125, 133, 144, 0.3)"
STYLES = {
    "sdpa": ("#7D8590", "circle", "solid"),
    "seam": ("#7D8590", "x", "dot"),
    "base": ("#2C82BE", "square", "solid"),
    "variant": ("#D55E00", "diamond", "solid"),
    "map": ("#1B9E77", "triangle-up", "solid"),
    "dense": ("#B5559B", "cross", "dash"),
    "peer": ("#B8860B", "star", "dash"),
}
"""Name of a case → colour, marker, line."""
WIDTH, HEIGHT = 980, 520


def plot(
    seconds: Mapping[int, Mapping[str, float]], extra: Mapping[int, Mapping[str, int]], names: Mapping[str, str]
) -> go.Figure:
    """Left seconds, right MB; one line a case, over the tokens at which it was measured."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=("Time, seconds", "Peak extra memory, MB"), horizontal_spacing=0.09)
    for column, values, scale in ((1, seconds, 1.0), (2, extra, 1e-6)):
        for name, title in names.items():
            counts = [count for count in sorted(values) if name in values[count]]
            colour, symbol, dash = STYLES[name]
            figure.add_trace(
                go.Scatter(
                    name=title,
                    legendgroup=name,
                    showlegend=column == 1,
                    mode="lines+markers",
                    x=counts,
                    y=[max(values[count][name] * scale, 1e-9) for count in counts],
                    line={"color": colour, "dash": dash, "width": 2},
                    marker={"symbol": symbol, "size": 8},
                ),
                row=1,
                col=column,
            )
    counts = sorted({*seconds, *extra})
    figure.update_xaxes(type="log", title="tokens", tickvals=counts, ticktext=[f"{n:,}" for n in counts], **_axis())
    figure.update_yaxes(type="log", dtick=1, **_axis())
    figure.update_annotations(font={"color": INK, "size": 14})
    figure.update_layout(
        width=WIDTH,
        height=HEIGHT,
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        font={"color": INK, "size": 12},
        margin={"l": 56, "r": 16, "t": 36, "b": 120},
        legend={"orientation": "h", "y": -0.2, "x": 0},
    )
    return figure


def _axis() -> dict[str, Any]:
    return {"gridcolor": LINES, "linecolor": INK, "zeroline": False, "showline": True, "exponentformat": "power"}
