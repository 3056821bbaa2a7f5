"""Two models whose heads are not the same heads, such as a Llama and a DIFF Transformer: one view at a time, no change."""

from __future__ import annotations

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state
from app.cache import Ready
from app.components.attention_map import Lock, MapEvent, attention_map, pool_for
from app.components.diff_panel import diff_panel, pair_line
from app.components.grid import HEIGHT as GRID_HEIGHT, WIDTH
from app.components.head_line import head_steps, named, switch
from app.components.maps import EXPLAIN, HEIGHT, formula_of, remember
from app.components.panel import Download, panel_head, panel_menu
from app.components.theme import theme
from app.components.waiting import stand_in
from app.downloads import map_npy, statistics_csv, statistics_json
from app.source import Source
from app.state import Selection, Widget
from dexviz.figures.head_grid import head_grid
from dexviz.figures.numbers import three
from dexviz.probes.heads import is_differential, one_view, statistic
from dexviz.records import VIEWS, Capture, HeadMap, Tokens, head_name


def other_heads(base: Capture, variant: Capture) -> bool:
    """Whether no head of one view is a head of the other: other numbers of layers or heads, or one is a DIFF Transformer."""
    sizes = (base.layers, base.heads) != (variant.layers, variant.heads)
    return sizes or is_differential(base) != is_differential(variant)


def heads_apart(here: Source, base: Capture, variant: Capture) -> None:
    """Grid, map and statistics of the chosen view."""
    view = state.current().noise_view
    own = base if view == "base" else variant
    state.keep_head_within(own.layers, own.heads)
    state.keep_lock_within(len(own.tokens))
    choice = state.current()
    st.caption(
        f"Base: {base.layers} layers × {base.heads} heads; variant: {variant.layers} × {variant.heads}. No head of one is a "
        "head of the other, so each view is shown by itself."
    )
    left, right = st.columns([1, 2], gap="medium")
    with left:
        _grid(own, choice)
        diff_panel(own, choice)
    with right:
        menu = _line(own, choice)
        _map(here, own.tokens, choice, menu)
    _statistics(base, variant, own, choice)


def _grid(own: Capture, choice: Selection) -> None:
    result = one_view(own, choice.statistic, choice.noise_view)
    panel_head(
        f"{result.title} by head",
        result.unit,
        key="grid",
        explain=f"{result.definition}\n\nRows are layers, columns heads: softmax ones, or logical ones of a DIFF Transformer.",
        downloads=(
            Download("Statistics, CSV", "dexviz-heads.csv", "text/csv", lambda: statistics_csv(own, own)),
            Download("Statistics, JSON", "dexviz-heads.json", "application/json", lambda: statistics_json(own, own)),
        ),
    )
    switch("View", VIEWS, Widget.NOISE_VIEW, "stretch")
    figure = head_grid(
        result,
        choice.noise_view,
        selected=(choice.layer, choice.head),
        adapted=own.selected,
        theme=theme(),
        width=WIDTH,
        height=min(GRID_HEIGHT, 160 + 40 * own.layers),
    )
    st.plotly_chart(
        figure,
        key=state.GRID_KEY,
        theme=None,
        on_select=lambda: state.pick_in_grid(own.heads),
        selection_mode="points",
        config={"displayModeBar": False},
        alt=f"Grid of {own.layers} layers by {own.heads} heads, {result.title}, {choice.noise_view}",
    )


def _line(own: Capture, choice: Selection) -> DeltaGenerator:
    about, size = statistic(choice.statistic), (own.layers, own.heads)
    value = float(own.mean(choice.statistic)[choice.layer, choice.head])
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="head-line"):
        head_steps(choice, size)
        pair_line(own, choice)
        st.markdown(f"{named(about, '{} ({})')}  **{three(value)}**", width="content", help=about.definition)
        return st.container(width="content")


def _map(here: Source, tokens: Tokens, choice: Selection, menu: DeltaGenerator) -> None:
    event = MapEvent(None if choice.lock is None else Lock(*choice.lock), choice.focus)
    window = event.window(len(tokens))
    pool = None if window else pool_for(len(tokens))
    outcome = here.map(choice.noise_view, choice.layer, choice.head, window, pool, choice.score)
    if not isinstance(outcome, Ready):
        stand_in(outcome, HEIGHT)
        return
    (head,) = outcome.values
    part = event.strip_window(len(tokens)) if window or pool else None
    exact = here.map(choice.noise_view, choice.layer, choice.head, part, score=choice.score) if part else None
    with menu:
        _menu(head)
    attention_map(
        head,
        None,
        tokens,
        key=state.MAP_KEY,
        title=f"{head.score.capitalize()} scores of {head_name(head.layer, head.head)}, {choice.noise_view}",
        names=(choice.noise_view.capitalize(), ""),
        only=choice.noise_view,
        lock=event.lock,
        strips=[(exact.values[0], None)] if isinstance(exact, Ready) else (),
        on_change=remember,
    )


def _menu(head: HeadMap) -> None:
    name = f"dexviz-L{head.layer}-H{head.head}.npy"
    panel_menu(
        key="maps",
        explain=EXPLAIN[head.score],
        formula=formula_of(head) if head.terms else None,
        downloads=(Download("Map values, npy", name, "application/octet-stream", lambda: map_npy(head, head)),),
    )


def _statistics(base: Capture, variant: Capture, own: Capture, choice: Selection) -> None:
    """The selected head beside the means of both models over all their heads."""
    place = (choice.layer, choice.head)
    rows = [f"{head_name(*place)}, {choice.noise_view}", "base, mean of heads", "variant, mean of heads"]
    table: dict[str, list[str]] = {"": rows}
    for name in own.stats:
        if name in base.stats and name in variant.stats:
            means = [float(capture.mean(name).mean()) for capture in (base, variant)]
            table[name] = [three(value) for value in (float(own.mean(name)[place]), *means)]
    columns = {
        name: st.column_config.TextColumn(named(statistic(name), "{}, {}"), help=statistic(name).definition)
        for name in table
        if name
    }
    st.dataframe(table, column_config={"": st.column_config.TextColumn(""), **columns}, hide_index=True, key="head-table")
