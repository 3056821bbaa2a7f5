"""What the attention map sends to the browser: one `bytes` value, at most 1 MiB.

    u32 little-endian: length of the header | header, JSON in UTF-8, padded with spaces to an even end | i16 codes

Codes are logarithmic over eight decades below each plane's peak p, so that every value keeps three significant digits:

    0 = zero | ±k, 1 ≤ k ≤ 32767 = ±p · exp((k − 32767) · STEP) | −32768 = no value (NaN)

A code of ±1 stands for anything smaller. Two planes are sent, the base and the difference, and the browser adds them
up to the variant: a difference far smaller than the scores keeps its digits that way. Maps whose rows and columns have the
same edges hold nothing above the diagonal and travel as their lower triangle.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dexviz.errors import BudgetError, CaptureError
from dexviz.records import HeadMap

MAX_BYTES = 1 << 20
"""Largest payload of one pair of views."""
EXACT_LIMIT = 680
"""Largest prompt, in tokens, whose exact maps fit into `MAX_BYTES` together with their labels."""
POOL = 256
"""Tiles along each side of a map that is too large to be sent exactly."""
WINDOW = 256
"""Tokens along each side of the exact window opened from a tile."""
LABEL_LIMIT = 32
"""Characters of a token label that are sent; what is cut off leaves an ellipsis."""
DECADES = 8
STEP = DECADES * math.log(10) / 32766
NAN_CODE = -32768


def pool_for(tokens: int) -> int | None:
    """The `pool` to ask the engine for: None (exact entries) up to `EXACT_LIMIT` tokens, `POOL` beyond."""
    return None if tokens <= EXACT_LIMIT else POOL


def window_around(query: int, key: int, tokens: int, side: int = WINDOW) -> tuple[int, int, int, int]:
    """(row start, row stop, column start, column stop) of the exact window with the pair (query, key) at its centre."""

    def span(centre: int) -> tuple[int, int]:
        start = max(0, min(centre - side // 2, tokens - side))
        return start, min(tokens, start + side)

    return (*span(query), *span(key))


def quantise(values: np.ndarray) -> tuple[np.ndarray, float]:
    """int16 codes of the values, shape kept, and the peak |value| they refer to (0 where all are zero or blank)."""
    known = np.isfinite(values)
    size = np.where(known, np.abs(values), 0).astype(np.float64)
    peak = float(size.max(initial=0.0))
    codes = np.zeros(values.shape, np.int16)
    some = size > 0
    steps = 32767 + np.rint(np.log(size[some] / peak) / STEP) if peak else np.empty(0)
    codes[some] = np.sign(values[some]) * np.clip(steps, 1, 32767)
    codes[~known] = NAN_CODE
    return codes, peak


def _plane(name: str, values: np.ndarray, triangular: bool) -> tuple[dict[str, Any], np.ndarray]:
    codes, peak = quantise(values[np.tril_indices(len(values))] if triangular else values.ravel())
    return {"name": name, "peak": peak, "count": len(codes)}, codes


def _planes(base: HeadMap, variant: HeadMap | None, triangular: bool) -> list[tuple[dict[str, Any], np.ndarray]]:
    planes = [_plane("base", base.scores, triangular)]
    if variant is not None:
        difference = variant.scores.astype(np.float64) - base.scores
        planes.append(_plane("difference", difference, triangular))
    for name, view in (("baseExtreme", base), ("variantExtreme", variant)):
        if view is not None and view.extreme is not None:
            planes.append(_plane(name, view.extreme, triangular))
    return planes


def _check_pair(base: HeadMap, variant: HeadMap | None) -> None:
    if variant is None:
        return
    same = all(np.array_equal(getattr(base, name), getattr(variant, name)) for name in ("row_edges", "col_edges"))
    if not same:
        raise CaptureError(
            "base and variant maps over the same tokens",
            f"{base.scores.shape} and {variant.scores.shape} entries with other edges",
            "Ask the engine for both with the same window and pool.",
        )


def encode_map(base: HeadMap, variant: HeadMap | None) -> tuple[dict[str, Any], np.ndarray]:
    """Header part and codes of one pair of maps (or windows, tiles, strips of them).

    Raises:
        CaptureError: base and variant do not cover the same tokens.
    """
    _check_pair(base, variant)
    triangular = np.array_equal(base.row_edges, base.col_edges)
    planes = _planes(base, variant, triangular)
    header = {
        "rows": base.row_edges.tolist(),
        "cols": base.col_edges.tolist(),
        "triangular": triangular,
        "planes": [part for part, _ in planes],
    }
    return header, np.concatenate([codes for _, codes in planes])


def encode(
    maps: tuple[HeadMap, HeadMap | None], strips: Iterable[tuple[HeadMap, HeadMap | None]], header: Mapping[str, Any]
) -> bytes:
    """The payload: the map, then the strips, with `header` beside them; its digest names everything but the lock.

    Raises:
        CaptureError: base and variant do not cover the same tokens.
        BudgetError: the payload would be larger than `MAX_BYTES`.
    """
    parts = [encode_map(*pair) for pair in (maps, *strips)]
    body = np.concatenate([codes for _, codes in parts]).astype("<i2").tobytes()
    head = {**header, "step": STEP, "map": parts[0][0], "strips": [part for part, _ in parts[1:]]}
    shown = {name: value for name, value in head.items() if name != "lock"}
    head["digest"] = digest(json.dumps(shown, sort_keys=True).encode() + body)
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    text += b" " * (len(text) % 2)
    payload = len(text).to_bytes(4, "little") + text + body
    if len(payload) > MAX_BYTES:
        raise BudgetError(
            f"a map of at most {MAX_BYTES:,} bytes for the browser",
            f"{len(payload):,} bytes",
            f"Ask for tiles (pool={POOL}) above {EXACT_LIMIT} tokens, or for a window of {WINDOW} × {WINDOW}.",
        )
    return payload


def digest(data: bytes) -> str:
    """Short name of some bytes; equal data have equal names."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def clip_label(label: str) -> str:
    """The label, cut to `LABEL_LIMIT` characters with an ellipsis where it is longer."""
    return label if len(label) <= LABEL_LIMIT else label[: LABEL_LIMIT - 1] + "…"
