"""A head's maps as a small picture: base beside variant on one scale."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from dexviz.figures.layout import HAIR, bare_axis, quiet_figure, scale_of
from dexviz.figures.palette import ACCENTS, DIVERGING, SEQUENTIAL, Theme
from dexviz.records import HeadMap


def map_thumbnail(base: HeadMap, variant: HeadMap, *, theme: Theme = "light", height: int = 190) -> go.Figure:
    """Two heatmaps, rows the queries from the top, blank above the diagonal; signed scales are centred on zero."""
    maps = {"base": _causal(base), "variant": _causal(variant)}
    finite = np.concatenate([m[np.isfinite(m)] for m in maps.values()])
    limit = float(np.abs(finite).max()) or 1.0
    diverging = bool((finite < 0).any())
    figure = quiet_figure(theme, height, (2, 2, 20, 2))
    for index, (name, scores) in enumerate(maps.items(), start=1):
        number = "" if index == 1 else str(index)
        figure.add_trace(
            go.Heatmap(
                name=name,
                z=scores,
                xaxis=f"x{number}",
                yaxis=f"y{number}",
                zmin=-limit if diverging else 0,
                zmax=limit,
                zmid=0 if diverging else None,
                colorscale=scale_of((DIVERGING if diverging else SEQUENTIAL)[theme]),
                showscale=False,
                hoverinfo="skip",
            )
        )
        frame = {"showticklabels": False, "showline": True, "mirror": True, "linecolor": HAIR[theme]}
        left = 0.0 if index == 1 else 0.52
        figure.update_layout(
            {
                f"xaxis{number}": bare_axis(domain=[left, left + 0.48], anchor=f"y{number}", constrain="domain") | frame,
                f"yaxis{number}": bare_axis(
                    anchor=f"x{number}", autorange="reversed", scaleanchor=f"x{number}", constrain="domain"
                )
                | frame,
            }
        )
        figure.add_annotation(
            text=name,
            x=left + 0.24,
            y=1,
            xref="paper",
            yref="paper",
            yanchor="bottom",
            showarrow=False,
            font={"size": 12, "color": ACCENTS[theme][name]},
        )
    return figure


def _causal(head: HeadMap) -> np.ndarray:
    """Scores with NaN where a key comes after its query."""
    rows, columns = head.row_edges[1:, None] - 1, head.col_edges[None, :-1]
    return np.where(columns <= rows, head.scores, np.nan)
