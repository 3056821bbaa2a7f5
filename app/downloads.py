"""Numbers on screen as files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dexviz.probes.heads import statistic
from dexviz.records import Capture, HeadMap


def statistics_csv(base: Capture, variant: Capture) -> bytes:
    """One row a head and statistic: mean over the query rows in base and variant, and the change."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["layer", "head", "adapted", "statistic", "unit", "base", "variant", "change"])
    writer.writeheader()
    writer.writerows(_records(base, variant))
    return buffer.getvalue().encode()


def statistics_json(base: Capture, variant: Capture) -> bytes:
    """The same table with definitions and provenance."""
    names = [name for name in variant.stats if name in base.stats]
    table = {
        "definitions": {name: statistic(name).definition for name in names},
        "provenance": {"base": dict(base.provenance), "variant": dict(variant.provenance)},
        "heads": [{k: _json_number(v) for k, v in record.items()} for record in _records(base, variant)],
    }
    return json.dumps(table, ensure_ascii=False, indent=1, default=str).encode()


def map_csv(base: HeadMap, variant: HeadMap, labels: tuple[str, ...]) -> bytes:
    """One row an entry on or below the diagonal: query and key positions with their tokens, base, variant, change."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(
        ["query_start", "query_stop", "key_start", "key_stop", "query_token", "key_token", "base", "variant", "change"]
    )
    rows, columns = base.row_edges, base.col_edges
    for r in range(len(rows) - 1):
        for c in range(len(columns) - 1):
            if columns[c] < rows[r + 1]:
                left, right = float(base.scores[r, c]), float(variant.scores[r, c])
                names = [_cell(labels[rows[r]]), _cell(labels[columns[c]])]
                places = [rows[r], rows[r + 1], columns[c], columns[c + 1]]
                writer.writerow([*places, *names, f"{left:.6g}", f"{right:.6g}", f"{right - left:.6g}"])
    return buffer.getvalue().encode("utf-8", "replace")


def map_npy(base: HeadMap, variant: HeadMap) -> bytes:
    """Both maps stacked, base first: float32 [2, R, C]."""
    buffer = io.BytesIO()
    np.save(buffer, np.stack([base.scores, variant.scores]).astype(np.float32))
    return buffer.getvalue()


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
