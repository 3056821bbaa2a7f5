"""The top line of a page: the selected head, its statistic in base and variant, and the way to its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state
from app.components.diff_panel import pair_line
from app.state import Selection
from dexviz.figures.numbers import three
from dexviz.probes.heads import statistic
from dexviz.records import Capture, Statistic, head_name


def head_line(base: Capture, variant: Capture, choice: Selection) -> DeltaGenerator:
    """Name, statistic with its change, previous and next; returns the place for the menu at the right end."""
    about = statistic(choice.statistic)
    left, right = (float(capture.mean(choice.statistic)[choice.layer, choice.head]) for capture in (base, variant))
    size = (base.layers, base.heads)
    with st.container(horizontal=True, vertical_alignment="top", wrap=False, gap="small", key="head-line"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            head_steps(choice, size)
            if variant.selected[choice.layer, choice.head]:
                st.badge("adapted by DEX", color="orange")
            pair_line(variant, choice)
            st.markdown(
                f"{named(about, '{} ({})')}  :blue[base **{three(left)}**]  :orange[variant **{three(right)}**]  "
                f"change **{three(right - left, signed=True)}**",
                width="content",
                help=f"{about.definition} Mean over the query rows.",
            )
        return st.container(width="content")


def statistics_table(base: Capture, variant: Capture, choice: Selection) -> None:
    """All statistics of the selected head, with their definitions in the column headers."""
    place = (choice.layer, choice.head)
    names = [name for name in variant.stats if name in base.stats]
    table: dict[str, list[str]] = {"": ["base", "variant", "change"]}
    for name in names:
        left, right = float(base.mean(name)[place]), float(variant.mean(name)[place])
        table[name] = [three(left), three(right), three(right - left, signed=True)]
    columns = {
        name: st.column_config.TextColumn(named(statistic(name), "{}, {}"), help=statistic(name).definition) for name in names
    }
    st.dataframe(
        table, column_config={"": st.column_config.TextColumn("Mean over rows"), **columns}, hide_index=True, key="head-table"
    )


def head_steps(choice: Selection, size: tuple[int, int]) -> None:
    """Name of the selected head between buttons that lead to its neighbours; `size` is (layers, heads)."""
    _step("Previous head", "previous", "left", (-1, *size))
    with st.container(key="head-name", width="content"):
        st.markdown(f"**{head_name(choice.layer, choice.head)}**")
    _step("Next head", "next", "right", (1, *size))


def switch(label: str, options: Sequence[str], key: str, width: Literal["content", "stretch"] = "content") -> str | None:
    """A choice between base, variant and the like, kept in the state."""
    return st.segmented_control(
        label,
        options,
        key=key,
        persist_state="session",
        required=True,
        format_func=str.capitalize,
        label_visibility="collapsed",
        width=width,
    )


def _step(label: str, key: str, side: str, args: tuple[int, int, int]) -> None:
    """A button that shows an icon and is called by its label."""
    st.button(label, icon=f":material/chevron_{side}:", help=label, key=key, on_click=state.step_head, args=args)


def named(about: Statistic, form: str) -> str:
    """Label and unit, or the label alone where it ends with the unit."""
    return about.label if about.label.endswith(about.unit) else form.format(about.label, about.unit)
