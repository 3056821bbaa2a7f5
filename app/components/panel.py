"""The head of a panel: a title that states what is plotted and its unit, and a menu that explains it and gives its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from app import state

MENU = "Explain and download"
"""What a menu is called; on screen it is an icon (app.css)."""


@dataclass(frozen=True)
class Download:
    """A file made when it is asked for."""

    label: str
    file_name: str
    mime: str
    make: Callable[[], bytes]


def panel_head(
    title: str, unit: str, *, key: str, explain: str, formula: str | None = None, downloads: Sequence[Download] = ()
) -> None:
    """Title and unit in Markdown, with the menu at the right end."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", wrap=False, gap="small"):
        st.markdown(f"**{title}**  :gray[{unit}]")
        panel_menu(key=key, explain=explain, formula=formula, downloads=downloads)


def panel_menu(*, key: str, explain: str, formula: str | None = None, downloads: Sequence[Download] = ()) -> None:
    """What is plotted, how it is computed, and its data as files."""
    with st.popover(MENU, icon=":material/more_horiz:", type="tertiary", key=f"{key}-menu", help=MENU):
        st.markdown(explain)
        if formula:
            st.latex(formula)
        for download in downloads:
            st.download_button(
                download.label,
                download.make,
                download.file_name,
                download.mime,
                key=f"{key}-{download.file_name.rpartition('.')[2]}",
                on_click="ignore",
                icon=":material/download:",
            )
        st.caption("Link to this view")
        link = state.link()
        if link is None:
            st.caption("The prompt is too long for a link.")
        else:
            st.code(link, language=None, wrap_lines=True, height=70)
