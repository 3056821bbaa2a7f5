"""Is it so in general? A battery of needle prompts on the pair, and the papers' other claims: started by a button each."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app import cache, state
from app.cache import Failed, Pending, Ready
from app.components.panel import Download, panel_head
from app.components.text import plain
from app.components.theme import theme
from app.components.waiting import stand_in
from app.downloads import as_json, battery_csv
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
PROSE_TOKENS = (256, 512)
RETRIEVAL_TOKENS = (16, 52, 100, 148)
"""What 4, 16, 32 and 48 facts are."""
RUNS_A_PROMPT = 2
"""Of both views: one for the noise, one for the answers."""


def battery_panel(pair: PairSpec, choice: Selection) -> BatteryReport | None:
    """SNR by depth and by length, or the button that measures them; the report once it is there."""
    panel_head("SNR by depth and length of needle prompts", "ratio, mean over heads", key="battery", explain=EXPLAIN)
    asked = choice.battery
    if asked is None or asked[0] != pair:
        _offer(pair)
        return None
    outcome = cache.ask(RunBattery(pair, asked[1]))
    if not isinstance(outcome, Ready):
        stand_in(outcome, HEIGHT)
        _again("battery-again", lambda: state.start_battery(pair, asked[1]), outcome)
        return None
    (report,) = outcome.values
    _curves(report)
    return report


def _offer(pair: PairSpec) -> None:
    facts = pair.base.startswith(RETRIEVAL_MODELS)
    lengths = RETRIEVAL_TOKENS if facts else PROSE_TOKENS
    prompts = len(QUICK.depths) * QUICK.per_cell * len(lengths)
    what = "4 to 48 facts" if facts else " and ".join(map(str, lengths)) + " tokens in prose"
    with st.container(border=True, height=HEIGHT, vertical_alignment="center"):
        st.markdown("One prompt says little. A battery measures the pair on made-up needle prompts.")
        st.caption(
            f"{prompts} prompts of {what}, in both views{_duration(pair, lengths)}. It can be cancelled, and "
            "`python -m dexviz noise --battery` runs larger ones."
        )
        st.button("Measure the pair", key="battery-start", on_click=state.start_battery, args=(pair, QUICK))


def _duration(pair: PairSpec, lengths: tuple[int, ...]) -> str:
    """How long the battery will take, where the pair is known."""
    info = cache.known_pair(pair)
    if info is None:
        return ""
    each = len(QUICK.depths) * QUICK.per_cell * RUNS_A_PROMPT
    seconds = sum(each * cache.cost_of(info, tokens).seconds for tokens in lengths)
    return f": about {seconds / 60:.0f} min" if seconds >= 90 else f": about {seconds:.0f} s"


def _again(key: str, start: Callable[[], None], outcome: object) -> None:
    """A way to try once more after a failure."""
    if isinstance(outcome, Failed):
        st.button("Try again", key=key, on_click=start)


def _curves(report: BatteryReport) -> None:
    along = st.segmented_control(
        "Against", ("depth", "length"), key="battery-along", default="depth", required=True, label_visibility="collapsed"
    )
    rows = report.by_length() if along == "length" else report.by_depth()
    figure = interval_curve(rows, "snr", "length" if along == "length" else "depth", "SNR (ratio)", theme=theme())
    st.plotly_chart(figure, key="battery-curve", theme=None, config={"displayModeBar": False})


def battery_numbers(report: BatteryReport) -> None:
    """All means of a battery with their intervals, and its files."""
    panel_head(
        "The battery in numbers",
        "means over heads and prompts (95 % interval)",
        key="battery-numbers",
        explain=EXPLAIN,
        downloads=(
            Download("Battery, CSV", "dexviz-battery.csv", "text/csv", lambda: battery_csv(report)),
            Download("Battery, JSON", "dexviz-battery.json", "application/json", lambda: as_json(report.to_json())),
        ),
    )
    st.markdown(_summary(report))


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
    outcome = cache.ask(CheckClaims(pair)) if choice.claims == pair else None
    report: ClaimsReport | None = outcome.values[0] if isinstance(outcome, Ready) else None
    files = [] if report is None else [_claims_file(report)]
    panel_head("The papers' other claims on this pair", "mean (95 % interval)", key="claims", explain=CLAIMS, downloads=files)
    if report is not None:
        st.markdown(claims_table(report))
        for claim, why in report.refused.items():
            st.caption(f"{claim}: {plain(why)}")
    elif isinstance(outcome, Pending | Failed):
        stand_in(outcome, 120)
        _again("claims-again", lambda: state.start_claims(pair), outcome)
    else:
        st.caption(
            "In-context learning over orders of examples, contradicted contexts, outliers of activations. Minutes on a CPU."
        )
        st.button("Look into the claims", key="claims-start", on_click=state.start_claims, args=(pair,))


def _claims_file(report: ClaimsReport) -> Download:
    return Download("Claims, JSON", "dexviz-claims.json", "application/json", lambda: as_json(report.to_json()))


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
