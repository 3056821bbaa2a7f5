"""What to do where there is nothing to show yet."""

from __future__ import annotations

import streamlit as st


def no_prompt_yet() -> None:
    """The Heads page before the first run."""
    with st.container(border=True, height=260, vertical_alignment="center"):
        st.markdown("#### No prompt has been run yet")
        st.markdown("Type a prompt at the left, or take one of the presets, and press **Run** (Ctrl+Enter).")
        st.markdown("Or open an example on the Home page: it needs no model.")
