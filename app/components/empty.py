"""What is on screen where it is not the user's own run: nothing yet, or a ready example."""

from __future__ import annotations

import streamlit as st

from app.components.text import plain
from app.gallery import Example
from app.state import Selection


def no_prompt_yet(choice: Selection) -> None:
    """The Heads page before the first run; a link to a model that the server does not list leaves its prompt in the box."""
    with st.container(border=True, height=260, vertical_alignment="center"):
        st.markdown("#### No prompt has been run yet")
        if choice.draft.text:
            adapter = f" with the adapter {plain(choice.pair.adapter)}" if choice.pair.adapter else ""
            st.markdown(
                "The prompt is in the box at the left. "
                f"Press **Run** (Ctrl+Enter): it loads the model {plain(choice.pair.base)}{adapter} and computes the heads."
            )
        else:
            st.markdown("Type a prompt at the left, or take one of the presets, and press **Run** (Ctrl+Enter).")
        st.markdown("Or open an example on the Home page: it needs no model.")


def example_line(example: Example) -> None:
    """Which example this is and where its numbers come from."""
    made = example.variant.provenance
    facts = [str(made[key]) for key in ("model", "variant", "dtype") if made.get(key)] + [str(made.get("date", ""))[:10]]
    st.caption(f"Ready example: {plain(example.recipe.title)} ({plain(', '.join(facts))}). Run computes it anew.")
