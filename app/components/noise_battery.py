"""Is it so in general? A battery of needle prompts on the pair, and the papers' other claims: started by a button each."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app import cache, state
from app.cache import Ready
from app.components.panel import panel_head
from app.components.text import plain
from app.components.theme import theme
from app.components.waiting import stand_in
from app.downloads import as_json
from app.presets import RETRIEVAL_MODELS
from app.state import Selection
from dexviz.claims_records import ClaimsReport
from dexviz.figures.noise_curves import interval_curve
from dexviz.figures.numbers import three
from dexviz.noise_records import BatteryReport, BatteryRequest
from dexviz.requests import CheckClaims, PairSpec, RunBattery

HEIGHT = 330
EXPLAIN = (
    "Made-up facts are hidden in held-out prose at every length and depth, and asked for; a model of the retrieval language "
    "gets facts of that language. SNR is the ratio of the mean signal and the mean noise over heads and prompts; bands are "
    "95 % bootstrap intervals over prompts, base and variant on the same ones."
)
CLAIMS = (
    "Accuracy of in-context learning over orders of the examples, answers by the context against distractors that contradict "
    "it, and outliers of activations; 95 % bootstrap intervals, base and variant on the same items."
)
QUICK = BatteryRequest(per_cell=2)
PASSES_A_PROMPT = 4
"""Noise and answers, in two views."""


def battery_panel(pair: PairSpec, choice: Selection) -> None:
    """SNR by depth and by length, or the button that measures them."""
    panel_head("SNR by depth and length of needle prompts", "ratio, mean over heads", key="battery", explain=EXPLAIN)
    asked = choice.battery
    if asked is None or asked[0] != pair:
        _offer(pair)
        return
    outcome = cache.ask(RunBattery(pair, asked[1]))
    if not isinstance(outcome, Ready):
        stand_in(outcome, HEIGHT)
        _again("battery-again", lambda: state.start_battery(pair, asked[1]), outcome)
        return
    (report,) = outcome.values
    _curves(report)


def _offer(pair: PairSpec) -> None:
    facts = pair.base.startswith(RETRIEVAL_MODELS)
    lengths = "4 to 48 facts" if facts else "256 and 512 tokens in prose"
    prompts = len(QUICK.depths) * QUICK.per_cell * (4 if facts else 2)
    with st.container(border=True, height=HEIGHT, vertical_alignment="center"):
        st.markdown("One prompt says little. A battery measures the pair on made-up needle prompts.")
        st.caption(
            f"{prompts} prompts of {lengths}, {PASSES_A_PROMPT} passes each: {'seconds' if facts else 'minutes'} on a CPU. "
            "It can be cancelled, and `python -m dexviz noise --battery` runs larger ones."
        )
        st.button("Measure the pair", key="battery-start", on_click=state.start_battery, args=(pair, QUICK))


def _again(key: str, start: Callable[[], None], outcome: object) -> None:
    """A way to try once more after a failure."""
    if isinstance(outcome, cache.Failed):
        st.button("Try again", key=key, on_click=start)


def _curves(report: BatteryReport) -> None:
    along = st.segmented_control(
        "Against", ("depth", "length"), key="battery-along", default="depth", required=True, label_visibility="collapsed"
    )
    rows = report.by_length() if along == "length" else report.by_depth()
    figure = interval_curve(rows, "snr", "length" if along == "length" else "depth", "SNR (ratio)", theme=theme())
    st.plotly_chart(figure, key="battery-curve", theme=None, config={"displayModeBar": False})
    st.markdown(_summary(report))
    st.download_button(
        "Battery, JSON",
        lambda: as_json(report.to_json()),
        "dexviz-battery.json",
        "application/json",
        key="battery-json",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def _summary(report: BatteryReport) -> str:
    """Table of the means with intervals."""
    names = {"snr": "SNR", "signal": "signal", "noise": "noise", "sink": "sink", "negative": "negative share"}
    names |= {"answer": "log p(answer), nats", "accuracy": "accuracy"}
    lines = [f"| {report.overall.prompts} prompts | base | variant | change |", "|---|---:|---:|---:|"]
    for key, label in names.items():
        found = report.overall.measures[key]
        cells = [_cell(part, signed) for part, signed in ((found.base, False), (found.variant, False), (found.change, True))]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(part: object, signed: bool = False) -> str:
    mean = getattr(part, "mean", None)
    if mean is None:
        return "–"
    low, high = getattr(part, "low", None), getattr(part, "high", None)
    text = three(mean, signed)
    return text if low is None or high is None else f"{text} ({three(low)} to {three(high)})"


def claims_panel(pair: PairSpec, choice: Selection) -> None:
    """The papers' other claims, or the button that looks into them."""
    panel_head("The papers' other claims on this pair", "base, variant, change", key="claims", explain=CLAIMS)
    if choice.claims != pair:
        st.caption(
            "In-context learning over orders of examples, contradicted contexts, outliers of activations. Minutes on a CPU."
        )
        st.button("Look into the claims", key="claims-start", on_click=state.start_claims, args=(pair,))
        return
    outcome = cache.ask(CheckClaims(pair))
    if not isinstance(outcome, Ready):
        stand_in(outcome, 120)
        _again("claims-again", lambda: state.start_claims(pair), outcome)
        return
    (report,) = outcome.values
    st.markdown(claims_table(report))
    for claim, why in report.refused.items():
        st.caption(f"{claim}: {plain(why)}")
    st.download_button(
        "Claims, JSON",
        lambda: as_json(report.to_json()),
        "dexviz-claims.json",
        "application/json",
        key="claims-json",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def claims_table(report: ClaimsReport) -> str:
    """The main numbers as a Markdown table."""
    lines = ["| measured | base | variant | change |", "|---|---:|---:|---:|"]
    rows: list[tuple[str, object]] = []
    if report.in_context:
        whole = report.in_context[0]
        rows += [("in-context accuracy, mean over orders", whole.accuracy), ("its spread over orders", whole.spread)]
    if report.contradiction is not None:
        whole_questions = report.contradiction.rows[0]
        rows += [
            ("answers by the context, accuracy", whole_questions.accuracy),
            ("log-odds of the answer by the context, nats", whole_questions.log_odds),
        ]
    for row in report.outliers.rows if report.outliers is not None else ():
        rows += [(f"largest of {row.what}", row.largest), (f"kurtosis of {row.what}", row.kurtosis)]
    for label, found in rows:
        if found is not None:
            cells = [_cell(getattr(found, name), name == "change") for name in ("base", "variant", "change")]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)
