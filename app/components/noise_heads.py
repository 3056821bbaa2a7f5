"""Signal, noise and SNR of every head on the marked prompt: a line of means, and a table that opens a head on click."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from app import state
from app.components.panel import Download, panel_head
from app.components.text import plain
from app.downloads import noise_csv, noise_json
from app.state import Selection
from dexviz.figures.numbers import three
from dexviz.noise_records import HeadNoise, NoiseOnPrompt
from dexviz.records import ViewName, head_name

TABLE_HEIGHT = 330
ROW_HEIGHT = 35
EXPLAIN = (
    "Mass is |S| / Σ|S| of the measured row. Signal: mass per needle token. Noise: mass per other token, without question and "
    "first token. SNR: signal / noise; averaged over heads, the ratio of the mean signal and the mean noise."
)


def means_line(found: NoiseOnPrompt) -> None:
    """Averages over all heads, base, variant and change; with the answer where one was given."""
    parts = []
    base = found.base.over_heads()
    variant = None if found.variant is None else found.variant.over_heads()
    for label, name in (("SNR", "snr"), ("signal", "signal"), ("noise", "noise"), ("sink", "sink"), ("negative", "negative")):
        text = f"{label} :blue[**{three(base[name])}**]"
        if variant is not None:
            text += f" :orange[**{three(variant[name])}**] ({three(variant[name] - base[name], signed=True)})"
        parts.append(text)
    if found.answer is not None and found.answer_log_probability is not None:
        nats = found.answer_log_probability
        text = f"log p of {plain(repr(found.answer))} :blue[**{three(nats['base'])}**]"
        if "variant" in nats:
            text += f" :orange[**{three(nats['variant'])}**] ({three(nats['variant'] - nats['base'], signed=True)})"
        parts.append(f"{text} nats")
    st.markdown("Mean over heads: " + " · ".join(parts), help=f"{EXPLAIN} Blue: base; orange: variant; in brackets the change.")


def heads_panel(found: NoiseOnPrompt, choice: Selection, view: ViewName) -> None:
    """Table of all heads, largest signal first."""
    panel_head(
        "Signal and noise by head",
        f"{found.score} score, share per token; SNR is a ratio",
        key="noise-heads",
        explain=EXPLAIN,
        downloads=(
            Download("Heads, CSV", "dexviz-noise.csv", "text/csv", lambda: noise_csv(found)),
            Download("Heads, JSON", "dexviz-noise.json", "application/json", lambda: noise_json(found)),
        ),
    )
    table, places = head_table(found, view)
    if not found.same_heads and found.variant is not None:
        st.caption(f"Heads of two models are not the same heads: the table shows those of the {view}, and no change.")
    numbers = {name: st.column_config.NumberColumn(name, format="%.3g") for name in table if name != "head"}
    st.dataframe(
        table,
        key=state.TABLE_KEY,
        height=min(TABLE_HEIGHT, ROW_HEIGHT * (len(places) + 1) + 2),
        hide_index=True,
        column_config={"head": st.column_config.TextColumn("head", pinned=True), **numbers},
        on_select=lambda: state.pick_in_table(places),
        selection_mode="single-cell",
    )
    st.caption(f"Selected: {head_name(choice.layer, choice.head)}. A click on a row opens that head.")


def head_table(found: NoiseOnPrompt, view: ViewName) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The table and the head of each of its rows."""
    shown = found.heads_of(view)
    columns: dict[str, np.ndarray] = {"signal": shown.signal, "noise": shown.noise}
    if found.same_heads and found.variant is not None:
        columns |= {
            "SNR base": found.base.snr,
            "SNR variant": found.variant.snr,
            "change": found.variant.snr - found.base.snr,
        }
    else:
        columns["SNR"] = shown.snr
    columns |= {"sink": shown.sink, "negative": shown.negative}
    order = _largest_first(shown)
    places = [tuple(map(int, np.unravel_index(i, shown.snr.shape))) for i in order]
    data: dict[str, Any] = {"head": [head_name(*place) for place in places]}
    data |= {name: values.ravel()[order] for name, values in columns.items()}
    return data, [(layer, head) for layer, head in places]


def _largest_first(shown: HeadNoise) -> np.ndarray:
    """Heads by signal, blanks last: the SNR of a head that puts all its mass on the first token says nothing."""
    values = shown.signal.ravel()
    return np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")
