"""Numbers on screen as files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dexviz.noise_records import MEASURES, BatteryReport, NoiseOnPrompt
from dexviz.probes.heads import statistic
from dexviz.records import Capture, HeadMap

PROMPT = 200
"""Characters of the prompt in a row of a table."""


def statistics_csv(base: Capture, variant: Capture) -> bytes:
    """One row a head and statistic: mean over the query rows in base and variant, the change, and what was measured.

    The prompt is cut to its beginning, because every row repeats it; the JSON has it whole.
    """
    buffer = io.StringIO()
    about = _about(base, variant)
    prompt = about["prompt"] if len(about["prompt"]) <= PROMPT else about["prompt"][: PROMPT - 1] + "…"
    about = {key: _cell(str(value)) for key, value in {**about, "prompt": prompt}.items()}
    numbers = ["layer", "head", "adapted", "statistic", "unit", "base", "variant", "change"]
    writer = csv.DictWriter(buffer, [*numbers, *about])
    writer.writeheader()
    writer.writerows(record | about for record in _records(base, variant))
    return buffer.getvalue().encode("utf-8", "replace")


def statistics_json(base: Capture, variant: Capture) -> bytes:
    """The same table with definitions and provenance."""
    names = [name for name in variant.stats if name in base.stats]
    table = {
        **_about(base, variant),
        "definitions": {name: statistic(name).definition for name in names},
        "provenance": {"base": dict(base.provenance), "variant": dict(variant.provenance)},
        "heads": [{k: _json_number(v) for k, v in record.items()} for record in _records(base, variant)],
    }
    return as_json(table)


def noise_csv(found: NoiseOnPrompt) -> bytes:
    """One row a view and head: signal, noise, SNR, sink, negative share, net mass, and what was marked."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["view", "layer", "head", *MEASURES, "score", "space", "needle_characters"])
    needle = " ".join(f"{start}-{stop}" for start, stop in found.marks.needle)
    for view, heads in (("base", found.base), ("variant", found.variant)):
        if heads is not None:
            for layer, head in np.ndindex(heads.snr.shape):
                numbers = [f"{float(getattr(heads, name)[layer, head]):.9g}" for name in MEASURES]
                writer.writerow([view, layer, head, *numbers, found.score, found.space, needle])
    return buffer.getvalue().encode()


def battery_csv(report: BatteryReport) -> bytes:
    """One row a set of prompts and measure, with intervals: all prompts, those of a length, of a depth, and of both."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    views = ("base", "variant", "change")
    ends = [f"{view}_{end}" for view in views for end in ("mean", "low", "high")]
    writer.writerow(["length", "depth", "prompts", "measure", *ends])
    for row in report.rows:
        for name, found in row.measures.items():
            parts = [getattr(found, view) for view in views]
            numbers = [getattr(part, end, None) for part in parts for end in ("mean", "low", "high")]
            writer.writerow([row.length, row.depth, row.prompts, name, *("" if x is None else f"{x:.9g}" for x in numbers)])
    return buffer.getvalue().encode()


def as_json(data: Any) -> bytes:
    """A record's `to_json` as a file."""
    return json.dumps(data, ensure_ascii=False, indent=1, default=str).encode("utf-8", "replace")


def noise_json(found: NoiseOnPrompt) -> bytes:
    """Both views with marks, prompt and provenance."""
    return as_json({"prompt": found.base_read.tokens.text, **found.to_json()})


def map_csv(base: HeadMap, variant: HeadMap, labels: tuple[str, ...]) -> bytes:
    """One row an entry on or below the diagonal: query and key positions with their tokens, base, variant, change.

    `value` says "exact", or "mean of tile": then the positions and tokens are the first and last of the tile.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(
        ["query_start", "query_stop", "key_start", "key_stop", "query_token", "key_token", "base", "variant", "change", "value"]
    )
    rows, columns = base.row_edges, base.col_edges
    for r in range(len(rows) - 1):
        for c in range(len(columns) - 1):
            if columns[c] < rows[r + 1]:
                left, right = float(base.scores[r, c]), float(variant.scores[r, c])
                places = [rows[r], rows[r + 1], columns[c], columns[c + 1]]
                names = [_tokens(labels, *places[:2]), _tokens(labels, *places[2:])]
                one = places[1] - places[0] == places[3] - places[2] == 1
                kind = "exact" if one else "mean of tile"
                writer.writerow([*places, *names, f"{left:.6g}", f"{right:.6g}", f"{right - left:.6g}", kind])
    return buffer.getvalue().encode("utf-8", "replace")


def map_npy(base: HeadMap, variant: HeadMap) -> bytes:
    """Both maps stacked, base first: float32 [2, R, C]."""
    buffer = io.BytesIO()
    np.save(buffer, np.stack([base.scores, variant.scores]).astype(np.float32))
    return buffer.getvalue()


def term_npy(head: HeadMap) -> bytes:
    """A and S of one head stacked, A first; their difference is the noise term: float32 [2, R, C]."""
    buffer = io.BytesIO()
    np.save(buffer, np.stack([head.attention, head.scores]).astype(np.float32))
    return buffer.getvalue()


def _about(base: Capture, variant: Capture) -> dict[str, str]:
    """What the numbers were measured of."""
    views = [str(capture.provenance.get("view", name)) for capture, name in ((base, "base"), (variant, "variant"))]
    request = variant.request
    return {"score": request.score, "space": request.space, "view": " and ".join(views), "prompt": variant.tokens.text}


def _tokens(labels: tuple[str, ...], start: int, stop: int) -> str:
    """The token, or the first and last of several."""
    return _cell(labels[start] if stop - start == 1 else f"{labels[start]} … {labels[stop - 1]}")


def _records(base: Capture, variant: Capture) -> Iterator[dict[str, Any]]:
    for name in variant.stats:
        if name not in base.stats:
            continue
        left, right = base.mean(name), variant.mean(name)
        for layer, head in np.ndindex(left.shape):
            yield {
                "layer": layer,
                "head": head,
                "adapted": bool(variant.selected[layer, head]),
                "statistic": name,
                "unit": statistic(name).unit,
                "base": float(left[layer, head]),
                "variant": float(right[layer, head]),
                "change": float(right[layer, head] - left[layer, head]),
            }


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" and text[:1] else text
