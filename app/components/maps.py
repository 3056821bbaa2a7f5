"""The selected head's maps: asks the source for what the browser can take, and shows it."""

from __future__ import annotations

from typing import Any

from streamlit.delta_generator import DeltaGenerator

from app import state
from app.cache import Ready
from app.components.attention_map import Lock, MapEvent, attention_map, pool_for
from app.components.diff_panel import FORMULA as DIFF_FORMULA
from app.components.panel import Download, panel_menu
from app.components.waiting import stand_in
from app.downloads import map_csv, map_npy
from app.source import Source
from app.state import Selection
from dexviz.records import Capture, HeadMap, head_name

HEIGHT = 520
EXPLAIN = {
    "attention": "Entry (i, j) is A, the softmax weight of key j for query i; a row sums to 1.",
    "signed": "Entry (i, j) is S, the signed score: A in the base and in heads that DEX leaves alone, ρ A where it adapts, "
    "A₁ − λA₂ in a DIFF Transformer.",
    "contribution": "Entry (i, j) is key j's share of the head's output at i along that output; a row sums to 1.",
}


def formula_of(head: HeadMap) -> str | None:
    """How a signed map comes about; None for other scores."""
    if head.score != "signed":
        return None
    return DIFF_FORMULA if head.terms else r"S_{ij} = \rho_j\,A_{ij}"


def maps_panel(source: Source, base: Capture, choice: Selection, menu: DeltaGenerator) -> tuple[HeadMap, HeadMap] | None:
    """Base, variant and difference of the selected head; returns the maps once they are there, their menu in `menu`."""
    tokens = base.tokens
    event = MapEvent(None if choice.lock is None else Lock(*choice.lock), choice.focus)
    window = event.window(len(tokens))
    pool = None if window else pool_for(len(tokens))
    outcome = source.maps(choice.layer, choice.head, window, pool)
    if not isinstance(outcome, Ready):
        stand_in(outcome, HEIGHT)
        return None
    left, right = outcome.values
    with menu:
        _menu(left, right, base)
    attention_map(
        left,
        right,
        tokens,
        key=state.MAP_KEY,
        title=_title(left, len(tokens)),
        lock=event.lock,
        strips=_strips(source, choice, event.strip_window(len(tokens)) if window or pool else None),
        on_change=remember,
    )
    return left, right


def _strips(source: Source, choice: Selection, window: tuple[int, int, int, int] | None) -> list[Any]:
    """Exact row or column of the locked token, where the map itself shows tiles or a part."""
    if window is None:
        return []
    outcome = source.maps(choice.layer, choice.head, window)
    return [outcome.values] if isinstance(outcome, Ready) else []


def remember(event: MapEvent) -> None:
    state.remember_map(None if event.lock is None else (event.lock.query, event.lock.key), event.focus)


def _title(head: HeadMap, tokens: int) -> str:
    return f"{head.score.capitalize()} scores of {head_name(head.layer, head.head)}, {tokens:,} × {tokens:,} tokens"


def _menu(left: HeadMap, right: HeadMap, base: Capture) -> None:
    stem = f"dexviz-L{left.layer}-H{left.head}-{left.score}"
    panel_menu(
        key="maps",
        explain=f"{EXPLAIN[left.score]} Row i is the query and predicts token i + 1; columns are keys; nothing is above the "
        "diagonal. Base and variant share one scale; the difference is variant − base.",
        formula=formula_of(right),
        downloads=(
            Download("Map values, CSV", f"{stem}.csv", "text/csv", lambda: map_csv(left, right, base.tokens.labels)),
            Download("Map values, npy", f"{stem}.npy", "application/octet-stream", lambda: map_npy(left, right)),
        ),
    )
