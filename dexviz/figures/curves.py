"""Curves along the prompt: a head's statistic by query token, its gains by key token. Axes over tokens are numeric."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from dexviz.figures.layout import HAIR, QUIET, bare_axis, quiet_figure, value_ticks
from dexviz.figures.numbers import three
from dexviz.figures.palette import ACCENTS, Theme
from dexviz.records import ProbeResult

MAX_TICK_TOKENS = 48
"""Up to so many tokens the tick text shows them; beyond it shows positions."""
MAX_TICKS = 26
"""Tokens beside each other that can still be read."""
LABEL_ROOM = 64
"""Pixels at the right for the names of the lines."""


def row_curve(result: ProbeResult, *, theme: Theme = "light", height: int = 210) -> go.Figure:
    """Base and variant of `head_rows` over the query position."""
    tokens = result.labels["query"]
    figure = _token_figure(tokens, theme, height)
    lines = {name: result.values[result.labels["side"].index(name)] for name in ("base", "variant")}
    for name, values in lines.items():
        figure.add_trace(_line(name, values, ACCENTS[theme][name], result.unit))
    name_lines(figure, lines, {name: ACCENTS[theme][name] for name in lines})
    figure.update_layout(yaxis=value_axis(result.unit, theme, result.values, rangemode="tozero"))
    return figure


def gain_curve(result: ProbeResult, *, theme: Theme = "light", height: int = 210) -> go.Figure:
    """ρ of `token_gains` on a scale of its own, with a line at 1 (unchanged); hover also gives ε."""
    tokens = result.labels["key"]
    gain, residue = result.values
    figure = _token_figure(tokens, theme, height)
    line = _line("ρ", gain, ACCENTS[theme]["variant"], "")
    line.customdata = [[position, three(g), three(e)] for position, (g, e) in enumerate(zip(gain, residue, strict=True))]
    line.hovertemplate = "position %{customdata[0]}<br>ρ %{customdata[1]}<br>ε %{customdata[2]}<extra></extra>"
    figure.add_trace(line)
    figure.add_hline(y=1, line={"color": QUIET[theme], "width": 1, "dash": "dot"})
    name_lines(figure, {"ρ": gain}, {"ρ": ACCENTS[theme]["variant"]})
    figure.update_layout(yaxis=value_axis("ρ (ratio)", theme, gain))
    return figure


def spectrum_curve(values: np.ndarray, *, theme: Theme = "light", height: int = 150) -> go.Figure:
    """Singular values of one W_D, largest first."""
    figure = quiet_figure(theme, height, (54, 10, 10, 30))
    line = _line("σ", values, ACCENTS[theme]["variant"], "")
    line.hovertemplate = "number %{customdata[0]}<br>σ %{customdata[1]}<extra></extra>"
    figure.add_trace(line)
    figure.update_layout(
        xaxis=bare_axis(nticks=6, tickfont={"size": 11, "color": QUIET[theme]}),
        yaxis=value_axis("σ of W_D", theme, values, rangemode="tozero"),
    )
    return figure


def _token_figure(tokens: tuple[str, ...], theme: Theme, height: int) -> go.Figure:
    short = len(tokens) <= MAX_TICK_TOKENS
    places = list(range(0, len(tokens), -(-len(tokens) // (MAX_TICKS if short else 8))))
    figure = quiet_figure(theme, height, (54, LABEL_ROOM, 10, 70 if short else 26))
    edge = 0.5 if len(tokens) == 1 else 0
    figure.update_layout(
        xaxis=bare_axis(
            tickvals=places,
            ticktext=[_plain(tokens[place]) if short else str(place) for place in places],
            tickangle=-60 if short and len(tokens) > 10 else 0,
            tickfont={"size": 11, "color": QUIET[theme]},
            range=[-edge, len(tokens) - 1 + edge],
        )
    )
    return figure


def _line(name: str, values: np.ndarray, color: str, unit: str) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="lines+markers" if len(values) == 1 else "lines",
        x=list(range(len(values))),
        y=[float(value) if np.isfinite(value) else None for value in values],
        line={"color": color, "width": 1.5},
        customdata=[[position, three(value)] for position, value in enumerate(values)],
        hovertemplate=f"position %{{customdata[0]}}<br>{name} %{{customdata[1]}} {unit}<extra></extra>",
    )


def value_axis(title: str, theme: Theme, values: np.ndarray, **settings: Any) -> dict[str, Any]:
    axis = bare_axis(title={"text": title, "font": {"size": 12}}, **settings)
    return axis | value_ticks(values) | {"zeroline": True, "zerolinecolor": HAIR[theme]}


def name_lines(figure: go.Figure, lines: dict[str, np.ndarray], colors: dict[str, str]) -> None:
    """Name each line at its right end, the higher one above its end and the lower one below."""
    ends = {name: _last(values) for name, values in lines.items()}
    top = max(ends, key=lambda name: ends[name])
    for name, end in ends.items():
        figure.add_annotation(
            text=name,
            x=1,
            xref="paper",
            xanchor="left",
            xshift=6,
            y=end,
            yanchor="middle" if len(ends) == 1 else "bottom" if name == top else "top",
            showarrow=False,
            font={"color": colors[name], "size": 12},
        )


def _last(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else 0.0


def _plain(label: str) -> str:
    """A token as tick text: plotly reads a little HTML in there, which a prompt must not be able to write."""
    short = label if len(label) <= 12 else label[:11] + "…"
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") or " "
