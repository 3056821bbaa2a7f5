"""What this is, and ready examples that open before any model is loaded."""

from __future__ import annotations

import streamlit as st

from app import cache
from app.cache import Failed
from app.components.cards import COLUMNS, card
from app.components.waiting import show_failure
from app.routing import show
from dexviz.errors import SnapshotError

INTRODUCTION = (
    "dexviz opens the attention heads of a language model and of its differential variant side by side. "
    "Type a prompt in the sidebar and press Run: every head of base and variant is measured, and each one's token by token map "
    "is a click away. The examples below are ready captures of a real model and open at once."
)


def page() -> None:
    """Three sentences and the gallery."""
    st.markdown("#### Attention heads, before and after DEX")
    st.markdown(INTRODUCTION)
    try:
        examples = cache.examples()
    except SnapshotError as error:
        show_failure(Failed(str(error)))
        return
    if not examples:
        st.info("No examples are installed. `make gallery` builds them; a prompt of your own works without.")
    for start in range(0, len(examples), COLUMNS):
        row = st.columns(COLUMNS, gap="medium")
        for place, example in zip(row, examples[start : start + COLUMNS], strict=False):
            with place:
                card(example)


show(page)
