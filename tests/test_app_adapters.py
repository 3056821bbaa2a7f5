"""What the app says of variants whose adapter changes projections, beside DEX or instead of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.components.dex_panel import unadapted
from app.components.sidebar import variant_text
from dexviz.adapter import save_adapter
from dexviz.engine import LocalEngine
from dexviz.models import load_model
from dexviz.records import Capture
from dexviz.requests import CaptureView, DescribePair, PairSpec, Prompt
from tests.adapters import tiny_model
from tests.delta_cases import adapter_for


@pytest.mark.parametrize(
    ("made", "sidebar", "panel"),
    [
        (
            {"dex": True, "parts": ("k", "v", "o")},
            r"λ 0\.300; adapts \d+ of \d+ heads; changes W_K, W_V, W_O",
            "DEX leaves L0·H1 alone; what changes in it comes from W_K, W_V, W_O, which this adapter changes in every layer",
        ),
        (
            {"dex": False, "parts": ("k", "v", "o")},
            "^changes W_K, W_V, W_O$",
            "This adapter has no DEX: it changes W_K, W_V, W_O of every layer, L0·H1 included.",
        ),
        (
            {"dex": False, "parts": ("o",), "rank": 2},
            "^changes W_O$",
            "This adapter has no DEX: it changes W_O of every layer, L0·H1 included.",
        ),
    ],
    ids=["full", "attention-only", "lora"],
)
def test_a_variant_says_what_it_changes(tmp_path: Path, made: dict[str, Any], sidebar: str, panel: str) -> None:
    base = load_model(str(tiny_model(tmp_path / "base", "llama")))
    save_adapter(adapter_for(base, **made), tmp_path / "adapter", base)
    spec = PairSpec(str(tmp_path / "base"), str(tmp_path / "adapter"))
    engine = LocalEngine()
    try:
        info = engine.result(engine.submit(DescribePair(spec)))
        taken = engine.result(engine.submit(CaptureView(spec, Prompt("w1 w2 w3"), "variant")))
    finally:
        engine.close()
    assert isinstance(taken, Capture)
    assert not taken.selected[0, 1]
    text = variant_text(spec, info, stored=False)
    assert re.search(sidebar, text), text
    assert unadapted(taken, 0, "L0·H1").startswith(panel)
