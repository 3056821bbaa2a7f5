"""How many bytes the Heads page sends to the browser: one head's maps of both views, and the grid of all heads."""

from __future__ import annotations

from typing import Any

from app.components.attention_map import map_header, pool_for
from app.components.grid import HEIGHT, WIDTH
from app.components.map_payload import encode
from dexviz.bench_cases import reading
from dexviz.figures.head_grid import head_grid
from dexviz.headmaps import head_map
from dexviz.models import ModelPair, View
from dexviz.probes.heads import head_statistic
from dexviz.recorder import capture
from dexviz.records import Capture, HeadMap
from dexviz.scores import LayerRecord


def browser_bytes(pair: ModelPair, count: int) -> dict[str, Any]:
    """{"map": bytes of base and difference of one adapted head, "grid": bytes of the figure of all heads, "exact"}."""
    tokens = reading(pair, count)
    pool = pool_for(count)

    def shown(view: View) -> tuple[Capture, HeadMap]:
        records: list[LayerRecord] = []
        taken = capture(view, tokens, keep=records.append)
        record = records[len(records) // 2]
        return taken, head_map(record, head, pool=pool)

    head = _adapted_head(pair)
    base, left = shown(pair.base)
    variant, right = shown(pair.variant)
    header = map_header(left, tokens, key="maps")
    figure = head_grid(
        head_statistic(base, variant, "entropy"),
        "variant",
        selected=(left.layer, left.head),
        adapted=variant.selected,
        theme="light",
        width=WIDTH,
        height=HEIGHT,
    )
    return {"map": len(encode((left, right), (), header)), "grid": len(figure.to_json().encode()), "exact": pool is None}


def _adapted_head(pair: ModelPair) -> int:
    """The first adapted head of the middle layer; 0 without an adapter."""
    adapter = pair.variant.adapter
    return 0 if adapter is None else int(adapter.config.heads[len(adapter.config.heads) // 2][0])
