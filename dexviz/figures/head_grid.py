"""All heads of the model as one grid, coloured by a statistic.

The cells are scatter markers, because heatmap cells deliver no selection events in the browser. Trace 0 holds the cells
in the order layer × heads + head; its point index names the head. The marks above it ignore the pointer.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from dexviz.figures.layout import HAIR, INK, NOISE, QUIET, bare_axis, quiet_figure, scale_of, value_ticks
from dexviz.figures.numbers import three
from dexviz.figures.palette import ACCENTS, DIVERGING, SEQUENTIAL, Theme
from dexviz.records import ProbeResult, head_name

LEFT, TOP, BOTTOM, GAP, PROFILE = 34, 26, 46, 14, 0.30
"""Margins and gap in pixels; share of the width that the profile takes."""


def head_grid(
    result: ProbeResult,
    side: str,
    *,
    selected: tuple[int, int] | None = None,
    adapted: np.ndarray | None = None,
    theme: Theme = "light",
    width: int = 340,
    height: int = 600,
) -> go.Figure:
    """Layers × heads of `head_statistic`, with each layer's mean beside it.

    `side` is base, variant or change, or the only one there is; base and variant share one colour scale. `adapted` [L, H] marks
    the heads that DEX adapts. `width` is what the figure will roughly get; it decides the size of the markers.
    """
    values = result.values[result.labels["side"].index(side)]
    figure = quiet_figure(theme, height, (LEFT, 4, TOP, BOTTOM))
    size = _marker_size(values.shape, width, height)
    figure.add_trace(_cells(result, side, values, size, theme, adapted))
    if adapted is not None and adapted.any():
        figure.add_trace(_badges(adapted, size, theme))
    if selected is not None:
        figure.add_trace(_ring(selected, size, theme))
    profile = _add_profile(figure, result, side, theme)
    _set_axes(figure, values.shape, width, theme, profile)
    return figure


def color_range(result: ProbeResult, side: str) -> tuple[float, float]:
    """Limits of the colour scale: one for base and variant, one of its own for the change; symmetric where signed.

    Values below `NOISE` are no scale of their own: they look like zero.
    """
    shown = result.values[2:] if side == "change" else result.values[:2]
    finite = shown[np.isfinite(shown)]
    limit = float(np.abs(finite).max()) if finite.size else 0.0
    limit = limit if limit >= NOISE else 1.0
    return (-limit, limit) if _diverging(result, side) else (0.0, limit)


def _diverging(result: ProbeResult, side: str) -> bool:
    return side == "change" or result.signed


def _marker_size(shape: tuple[int, ...], width: int, height: int) -> float:
    layers, heads = shape
    cell = min((width - LEFT - GAP) * (1 - PROFILE) / heads, (height - TOP - BOTTOM) / layers)
    return round(max(3.0, min(22.0, cell - 2)), 1)


def _cells(
    result: ProbeResult, side: str, values: np.ndarray, size: float, theme: Theme, adapted: np.ndarray | None
) -> go.Scatter:
    layers, heads = values.shape
    low, high = color_range(result, side)
    scale = (DIVERGING if _diverging(result, side) else SEQUENTIAL)[theme]
    flat = values.ravel()
    marker = {
        "symbol": ["square" if known else "x-thin-open" for known in np.isfinite(flat)],
        "size": size,
        "color": flat.tolist(),
        "colorscale": scale_of(scale),
        "cmin": low,
        "cmax": high,
        "line": {"width": 1, "color": HAIR[theme]},
        "colorbar": _color_bar(result, side, theme),
    }
    if low < 0:
        marker["cmid"] = 0.0
    return go.Scatter(
        name="heads",
        mode="markers",
        x=[head for _ in range(layers) for head in range(heads)],
        y=[layer for layer in range(layers) for _ in range(heads)],
        marker=marker,
        selected={"marker": {"opacity": 1}},
        unselected={"marker": {"opacity": 1}},
        hovertext=_hover_texts(result, adapted),
        hoverinfo="text",
    )


def _color_bar(result: ProbeResult, side: str, theme: Theme) -> dict[str, object]:
    low, high = color_range(result, side)
    ticks = [low, 0.0, high] if low < 0 else [0.0, high / 2, high]
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "len": 1 - PROFILE - 0.04,
        "y": 0,
        "yanchor": "top",
        "ypad": 8,
        "xpad": 0,
        "thickness": 8,
        "outlinewidth": 1,
        "outlinecolor": HAIR[theme],
        "tickvals": ticks,
        "ticktext": [three(tick, signed=low < 0) for tick in ticks],
        "ticklabelposition": "outside bottom",
        "ticks": "",
    }


def _hover_texts(result: ProbeResult, adapted: np.ndarray | None) -> list[str]:
    sides = result.labels["side"]
    layers, heads = result.values[0].shape
    texts = []
    for layer in range(layers):
        for head in range(heads):
            badge = " · adapted by DEX" if adapted is not None and adapted[layer, head] else ""
            texts.append(
                f"<b>{head_name(layer, head)}</b>{badge}<br>{result.title}, {result.unit}"
                + "".join(
                    f"<br>{side} {three(values[layer, head], signed=side == 'change')}"
                    for side, values in zip(sides, result.values, strict=True)
                )
            )
    return texts


def _badges(adapted: np.ndarray, size: float, theme: Theme) -> go.Scatter:
    layers, heads = np.nonzero(adapted)
    dot = round(max(2.0, size * 0.3), 1)
    marker = {
        "symbol": "circle",
        "size": dot,
        "color": ACCENTS[theme]["variant"],
        "line": {"width": 1, "color": "#FFFFFF" if theme == "light" else "#12161D"},
    }
    return go.Scatter(name="adapted", mode="markers", x=heads.tolist(), y=layers.tolist(), marker=marker, hoverinfo="skip")


def _ring(selected: tuple[int, int], size: float, theme: Theme) -> go.Scatter:
    layer, head = selected
    marker = {"symbol": "square-open", "size": size + 3, "color": INK[theme], "line": {"width": 2.5, "color": INK[theme]}}
    return go.Scatter(name="selected", mode="markers", x=[head], y=[layer], marker=marker, hoverinfo="skip", cliponaxis=False)


def _add_profile(figure: go.Figure, result: ProbeResult, side: str, theme: Theme) -> np.ndarray:
    """Mean over the heads of each layer, on the second x axis; returns all means."""
    sides = tuple(name for name in result.labels["side"] if (name == "change") == (side == "change"))
    drawn = []
    for name in sides:
        values = result.values[result.labels["side"].index(name)]
        known = np.isfinite(values)
        means = np.where(known.any(axis=1), np.where(known, values, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1), np.nan)
        drawn.append(means)
        color = INK[theme] if name == "change" else ACCENTS[theme][name]
        figure.add_trace(
            go.Scatter(
                name=f"{name} mean",
                mode="lines",
                x=[float(mean) if np.isfinite(mean) else None for mean in means],
                y=list(range(len(means))),
                xaxis="x2",
                line={"color": color, "width": 1.5},
                hovertext=[
                    f"<b>L{layer}</b> mean over heads<br>{name} {three(m, signed=name == 'change')} {result.unit}"
                    for layer, m in enumerate(means)
                ],
                hoverinfo="text",
            )
        )
    _name_profile(figure, sides, theme)
    return np.stack(drawn)


def _name_profile(figure: go.Figure, sides: tuple[str, ...], theme: Theme) -> None:
    """Below the profile, in the colours of its lines."""
    names = " ".join(f'<span style="color:{ACCENTS[theme].get(side, INK[theme])}">{side}</span>' for side in sides)
    text = f"mean of layer<br>{names}"
    place = {
        "x": 1 - PROFILE / 2,
        "y": 0,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "center",
        "yanchor": "top",
        "yshift": -6,
    }
    figure.add_annotation(text=text, showarrow=False, font={"size": 11, "color": QUIET[theme]}, **place)


def _set_axes(figure: go.Figure, shape: tuple[int, ...], width: int, theme: Theme, profile: np.ndarray) -> None:
    layers, heads = shape
    edge = 1 - PROFILE
    step_y = max(1, -(-layers // 12))
    step_x = max(1, -(-heads * 24 // max(1, int((width - LEFT) * edge))))
    font = {"size": 11, "color": QUIET[theme]}
    figure.update_layout(
        xaxis=bare_axis(
            domain=[0, edge - GAP / width],
            range=[-0.5, heads - 0.5],
            side="top",
            tickvals=list(range(0, heads, step_x)),
            ticktext=[f"H{head}" for head in range(0, heads, step_x)],
            tickfont=font,
            tickangle=0,
        ),
        xaxis2=bare_axis(domain=[edge, 1], side="top", anchor="y", tickfont=font, tickangle=0, zeroline=True)
        | value_ticks(profile)
        | {"zerolinecolor": HAIR[theme]},
        yaxis=bare_axis(
            range=[layers - 0.5, -0.5],
            tickvals=list(range(0, layers, step_y)),
            ticktext=[f"L{layer}" for layer in range(0, layers, step_y)],
            tickfont=font,
        ),
    )
