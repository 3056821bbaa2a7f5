"""SNR against depth or length of the needle: base and variant as lines, their bootstrap intervals as bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from dexviz.bootstrap import Comparison, Interval
from dexviz.figures.curves import LABEL_ROOM, name_lines, value_axis
from dexviz.figures.layout import QUIET, bare_axis, quiet_figure
from dexviz.figures.numbers import three
from dexviz.figures.palette import ACCENTS, Theme
from dexviz.noise_records import BatteryRow

Along = Literal["depth", "length"]
_TITLES = {"depth": "depth of the needle", "length": "tokens of the prompt"}
_BAND = 0.18
"""Opacity of a band."""


def interval_curve(
    rows: Sequence[BatteryRow], measure: str, along: Along, title: str, *, theme: Theme = "light", height: int = 250
) -> go.Figure:
    """A measure of a battery by depth or by length.

    Args:
        rows: `BatteryReport.by_depth()` or `.by_length()`, in order.
        measure: a key of `BatteryRow.measures`.
        title: of the value axis, with its unit.
    """
    places = [float((row.depth if along == "depth" else row.length) or 0) for row in rows]
    figure = quiet_figure(theme, height, (54, LABEL_ROOM, 10, 44))
    found = [row.measures[measure] for row in rows]
    lines: dict[str, np.ndarray] = {}
    for name in ("base", "variant"):
        intervals = [_of(comparison, name) for comparison in found]
        if any(interval is None for interval in intervals):
            continue
        known = [interval for interval in intervals if interval is not None]
        color = ACCENTS[theme]["base" if name == "base" else "variant"]
        if all(interval.low is not None for interval in known):
            figure.add_trace(_band(places, known, color))
        lines[name] = np.array([interval.mean for interval in known])
        figure.add_trace(_line(name, places, known, color))
    name_lines(figure, lines, {name: ACCENTS[theme]["base" if name == "base" else "variant"] for name in lines})
    room = (max(places) - min(places)) * 0.04 or 0.5
    figure.update_layout(
        xaxis=bare_axis(
            tickvals=places,
            ticktext=[f"{place:g}" if along == "depth" else f"{place:,.0f}" for place in places],
            title={"text": _TITLES[along], "font": {"size": 12}},
            tickfont={"size": 11, "color": QUIET[theme]},
            range=[min(places) - room, max(places) + room],
        ),
        yaxis=value_axis(title, theme, np.array([_ends(found)]), rangemode="tozero"),
    )
    return figure


def _of(comparison: Comparison, name: str) -> Interval | None:
    return comparison.base if name == "base" else comparison.variant


def _ends(found: Sequence[Comparison]) -> list[float]:
    """All numbers that are drawn."""
    intervals = [interval for each in found for interval in (each.base, each.variant) if interval is not None]
    return [value for interval in intervals for value in (interval.mean, interval.low, interval.high) if value is not None]


def _line(name: str, places: list[float], intervals: Sequence[Interval], color: str) -> go.Scatter:
    texts = [_text(interval) for interval in intervals]
    return go.Scatter(
        name=name,
        mode="lines+markers",
        x=places,
        y=[interval.mean if np.isfinite(interval.mean) else None for interval in intervals],
        line={"color": color, "width": 1.5},
        marker={"size": 5, "color": color},
        customdata=texts,
        hovertemplate=f"{name} %{{customdata}}<extra></extra>",
    )


def _text(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{three(interval.mean)}; one prompt, no interval"
    ends = f"{100 * interval.level:.0f} % interval {three(interval.low)} to {three(interval.high)}"
    return f"{three(interval.mean)}, {ends}, {interval.units} prompts"


def _band(places: list[float], intervals: Sequence[Interval], color: str) -> go.Scatter:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    ends: Any = [interval.high for interval in intervals] + [interval.low for interval in reversed(intervals)]
    return go.Scatter(
        x=[*places, *reversed(places)],
        y=ends,
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},{_BAND})",
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
    )
