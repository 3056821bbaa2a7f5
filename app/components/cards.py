"""The gallery: each card is a finding with its picture."""

from __future__ import annotations

import streamlit as st

from app import gallery, state
from app.components.theme import theme
from app.gallery import Example
from dexviz.figures.thumbnail import map_thumbnail
from dexviz.records import head_name
from dexviz.requests import Prompt

COLUMNS = 3
PICTURE = 200


def card(example: Example) -> None:
    """Title, base and variant of its head, finding, and the way in."""
    recipe, (layer, head) = example.recipe, example.head
    with st.container(border=True, height="stretch"):
        st.markdown(f"#### {recipe.title}")
        maps = [gallery.map_in(capture, layer, head) for capture in (example.base, example.variant)]
        if maps[0] is not None and maps[1] is not None:
            figure = map_thumbnail(maps[0], maps[1], theme=theme(), height=PICTURE)
            st.plotly_chart(figure, key=f"card-{recipe.name}", theme=None, config={"staticPlot": True}, alt=recipe.title)
        st.markdown(example.finding)
        st.caption(f"{head_name(layer, head)}, {recipe.score} scores, {len(example.base.tokens)} tokens")
        st.button("Open in Heads", key=f"open-{recipe.name}", on_click=_open, args=(example,), width="stretch")


def _open(example: Example) -> None:
    recipe, (layer, head) = example.recipe, example.head
    view = {
        "score": recipe.score,
        "space": recipe.space,
        "statistic": recipe.pick.statistic,
        "side": "variant",
        "layer": layer,
        "head": head,
    }
    state.open_example(recipe.name, Prompt(recipe.prompt, recipe.chat), view)
