"""The app: `streamlit run app/main.py`, or `python -m dexviz serve`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app import cache, state
from app.components.sidebar import sidebar
from app.routing import routed
from dexviz.requests import DescribePair

HERE = Path(__file__).parent
SIDEBAR_WIDTH = 300


def main() -> None:
    """Route to a page, with the sidebar that all pages share."""
    st.set_page_config(page_title="dexviz", layout="wide", initial_sidebar_state=SIDEBAR_WIDTH)
    st.html(HERE / "app.css")
    state.begin(cache.models(), cache.example_run)
    pages = {
        "home": st.Page(HERE / "pages" / "home.py", title="Home", default=True),
        "heads": st.Page(HERE / "pages" / "heads.py", title="Heads"),
        "noise": st.Page(HERE / "pages" / "noise.py", title="Noise"),
    }
    chosen = st.navigation(list(pages.values()), position="top")
    wanted = state.wanted_page()
    if wanted is not None and pages[wanted] != chosen:
        st.switch_page(pages[wanted])
    state.at_page(next(name for name, page in pages.items() if page == chosen))
    choice = state.current()
    if choice.ran is not None and choice.example is None:
        cache.ask(DescribePair(choice.ran.pair), patience=0.05)
    sidebar()
    with routed():
        chosen.run()
    state.arrived()


if __name__ == "__main__":
    main()
