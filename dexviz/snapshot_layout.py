"""Which arrays a snapshot holds, and what must be true of any capture before it is written or after it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dexviz.errors import SnapshotError
from dexviz.records import MAX_POOL, SCORES, Capture, HeadMap

Layout = Iterator[tuple[str, np.ndarray, type, tuple[int, ...]]]


def layout(capture: Capture) -> Layout:
    """(key, array, dtype, shape) of every array that is there, with the shape that L, H and N demand."""
    layers, heads, tokens = capture.stats["entropy"].shape
    top = len(capture.logits_top.ids)
    yield "tokens.ids", capture.tokens.ids, np.int64, (tokens,)
    yield "tokens.offsets", capture.tokens.offsets, np.int64, (tokens, 2)
    yield "tokens.special", capture.tokens.special, np.bool_, (tokens,)
    yield "lam", capture.lam, np.float32, (layers,)
    yield "selected", capture.selected, np.bool_, (layers, heads)
    yield "top.ids", capture.logits_top.ids, np.int64, (top,)
    yield "top.prob", capture.logits_top.prob, np.float32, (top,)
    for k, array in enumerate(capture.stats.values()):
        yield f"stats.{k}", array, np.float32, (layers, heads, tokens)
    if capture.strongest is not None:
        yield "strongest", capture.strongest, np.int32, (layers, heads, tokens)
    for name, array in capture.similarity.items():
        yield f"similarity.{name}", array, np.float32, (layers, heads, heads)
    tiles = 0 if capture.pooled is None else min(capture.pooled.shape[-1], tokens, MAX_POOL)
    for name, shape in (
        ("pooled", (layers, heads, tiles, tiles)),
        ("pooled_extreme", (layers, heads, tiles, tiles)),
        ("delta_norm", (layers, heads)),
        ("delta_cosine", (layers, heads)),
    ):
        if (array := getattr(capture, name)) is not None:
            yield name, array, np.float32, shape
    for k, head_map in enumerate(capture.maps.values()):
        yield from _map_layout(head_map, f"maps.{k}", tokens)


def _map_layout(head_map: HeadMap, key: str, tokens: int) -> Layout:
    rows, cols = len(head_map.row_edges) - 1, len(head_map.col_edges) - 1
    yield f"{key}.row_edges", head_map.row_edges, np.int64, (rows + 1,)
    yield f"{key}.col_edges", head_map.col_edges, np.int64, (cols + 1,)
    for name in ("scores", "attention", "extreme"):
        if (array := getattr(head_map, name)) is not None:
            yield f"{key}.{name}", array, np.float32, (rows, cols)
    for name in ("gain", "residue"):
        if (array := getattr(head_map, name)) is not None:
            yield f"{key}.{name}", array, np.float32, (tokens,)
    for t, array in enumerate(head_map.terms):
        yield f"{key}.terms.{t}", array, np.float32, (rows, cols)


def check_capture(capture: Capture) -> None:
    """Check that arrays, labels, indices and request fit each other.

    Raises:
        SnapshotError: arrays, labels or indices contradict each other.
        CaptureError: the request asks for heads or tokens that are not there.
    """
    entropy = capture.stats.get("entropy")
    _demand(entropy is not None and entropy.ndim == 3 and entropy.size > 0, "statistics [L, H, N]", list(capture.stats))
    for key, array, dtype, shape in layout(capture):
        held = f"{array.dtype} {array.shape}"
        _demand((array.dtype, array.shape) == (dtype, shape), f"{key} as {np.dtype(dtype)} {shape}", held)
    _check_texts(capture)
    capture.request.check_against(capture.layers, capture.heads, len(capture.tokens))
    for place, head_map in capture.maps.items():
        _check_map(capture, place, head_map)


def _demand(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise SnapshotError(expected, str(got), "Parts of this capture do not belong together: capture again.")


def _check_texts(capture: Capture) -> None:
    tokens, top = capture.tokens, capture.logits_top
    for name, labels, count in (("token labels", tokens.labels, len(tokens)), ("top labels", top.labels, len(top.ids))):
        _demand(len(labels) == count and all(isinstance(x, str) for x in labels), f"{count} {name}", f"{len(labels)} labels")
    _demand(isinstance(tokens.text, str), "the prompt as text", type(tokens.text).__name__)
    _demand(isinstance(capture.provenance, Mapping), "provenance as an object", type(capture.provenance).__name__)
    start, stop = tokens.offsets.T
    inside = (start >= 0) & (start <= stop) & (stop <= len(tokens.text))
    _demand(inside.all(), f"token offsets within 0..{len(tokens.text)}", tokens.offsets[~inside][:1].tolist())


def _check_map(capture: Capture, place: tuple[int, int], head_map: HeadMap) -> None:
    named = (head_map.layer, head_map.head, head_map.score)
    integers = all(isinstance(index, int) for index in place)
    _demand(integers and named[:2] == place and head_map.score in SCORES, f"a score map of head {place}", named)
    inside = 0 <= head_map.layer < capture.layers and 0 <= head_map.head < capture.heads
    _demand(inside, f"a head within {capture.layers} layers and {capture.heads} heads", place)
    for edges in (head_map.row_edges, head_map.col_edges):
        rising = len(edges) > 1 and edges[0] >= 0 and edges[-1] <= len(capture.tokens) and (np.diff(edges) > 0).all()
        _demand(bool(rising), f"rising map edges within 0..{len(capture.tokens)}", edges[:4].tolist())
