"""All heads on one prompt, and the maps of the selected one."""

from __future__ import annotations

import streamlit as st

from app import cache, source, state
from app.cache import Failed, Ready
from app.components.apart import heads_apart, other_heads
from app.components.dex_panel import dex_panel, gain_panel, spectrum_panel
from app.components.diff_panel import diff_panel
from app.components.empty import example_line, no_prompt_yet
from app.components.grid import grid_panel
from app.components.head_line import head_line, statistics_table
from app.components.maps import maps_panel
from app.components.rows_panel import rows_panel
from app.components.waiting import show_failure, stand_in
from app.routing import show
from app.source import Source, Stored
from dexviz.probes.heads import is_differential
from dexviz.records import Capture

SKELETON = 760


def page() -> None:
    """Pick the source, then show whatever of it is there."""
    here = source.chosen()
    if here is None:
        no_prompt_yet(state.current())
    elif isinstance(here, Failed):
        show_failure(here)
    else:
        outcome = here.captures()
        if isinstance(outcome, Ready):
            show_heads(here, *outcome.values)
        else:
            stand_in(outcome, SKELETON)


def show_heads(here: Source, base: Capture, variant: Capture) -> None:
    """Left the grid; right the selected head."""
    if isinstance(here, Stored):
        example_line(here.example)
    if other_heads(base, variant):
        heads_apart(here, base, variant)
        return
    state.keep_head_within(base.layers, base.heads)
    state.keep_lock_within(len(base.tokens))
    choice = state.current()
    stored = isinstance(here, Stored)
    left, right = st.columns([1, 2], gap="medium")
    with left:
        grid_panel(base, variant, choice)
    with right:
        menu = head_line(base, variant, choice)
        maps = maps_panel(here, base, choice, menu)
        if is_differential(variant):
            diff_panel(variant, choice)
        else:
            dex_panel(variant, maps and maps[1], choice, stored)
    statistics_table(base, variant, choice)
    below_left, below_right = st.columns(2, gap="medium")
    with below_left:
        rows_panel(base, variant, choice)
    with below_right:
        gain_panel(variant, maps and maps[1])
        spectrum_panel(None if choice.ran is None or stored else cache.known_pair(choice.ran.pair), choice.layer)


show(page)
