"""A Capture as one file: safetensors for the arrays, strict JSON in its metadata for everything else. No pickle.

A snapshot may come from anyone, so nothing in it is believed before it is checked: sizes, shapes against L, H and N, offsets,
finite JSON. Labels are text and nothing more. Axes as in `dexviz.records`.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.numpy

from dexviz.errors import DexvizError, SnapshotError
from dexviz.files import write_whole
from dexviz.records import SIMILARITIES, Capture, CaptureRequest, HeadMap, Tokens, TopTokens
from dexviz.snapshot_layout import check_capture, layout

FORMAT = "dexviz-snapshot"
VERSION = 1
MAX_HEADER = 64 << 20
"""Bytes of header that are read at most: a prompt of a million tokens needs less."""
_AGAIN = "The file is damaged or was made by something else: download or capture it again."


def save_snapshot(capture: Capture, path: str | os.PathLike[str], *, compact: bool = False) -> Path:
    """Write `capture` to `path` at once or not at all, and return the path.

    `compact` stores maps, tiles and statistics in half precision and says so in the provenance.

    Raises:
        SnapshotError: the file cannot be written, or the capture's arrays contradict each other.
    """
    data = snapshot_bytes(capture, compact=compact)
    path = Path(path)
    try:
        write_whole(path, data)
    except (OSError, ValueError) as error:
        todo = "Free some space or choose another place; no part of the snapshot was left behind."
        raise SnapshotError(f"to write {len(data):,} bytes to {str(path)!r}", _reason(error), todo) from error
    return path


def load_snapshot(path: str | os.PathLike[str]) -> Capture:
    """Read a snapshot. Its arrays are read-only, and its provenance is as JSON has it: tuples come back as lists.

    Raises:
        SnapshotError: no such file, not a snapshot, of another version, truncated, or inconsistent.
    """
    where = repr(str(path))
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SnapshotError(f"{where} to be a file", "something else", "Give the path of a snapshot file.")
            return _read(file, where)
    except SnapshotError:
        raise
    except (OSError, ValueError) as error:
        raise SnapshotError(
            f"to read {where}", _reason(error), "Give the path of a snapshot file that you may read."
        ) from error


def snapshot_bytes(capture: Capture, *, compact: bool = False) -> bytes:
    """The content of a snapshot file, for a download or an upload elsewhere. `compact` as in `save_snapshot`."""
    check_capture(capture)
    provenance = dict(capture.provenance)
    arrays = {key: np.ascontiguousarray(array) for key, array, _, _ in layout(capture)}
    if compact:
        arrays = {key: _halved(array) for key, array in arrays.items()}
        provenance["stored_as"] = "float16"
    header = {
        "version": VERSION,
        "text": capture.tokens.text,
        "labels": list(capture.tokens.labels),
        "top_labels": list(capture.logits_top.labels),
        "stats": list(capture.stats),
        "maps": [{"layer": m.layer, "head": m.head, "score": m.score, "terms": len(m.terms)} for m in capture.maps.values()],
        "request": capture.request.to_json(),
        "provenance": provenance,
    }
    try:
        text = json.dumps(header, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SnapshotError(
            "provenance that JSON can hold", str(error), "Use text, finite numbers, lists and dicts."
        ) from error
    return safetensors.numpy.save(arrays, {FORMAT: text})


def read_snapshot_bytes(data: bytes) -> Capture:
    """Inverse of `snapshot_bytes`; raises SnapshotError as `load_snapshot` does."""
    return _read(io.BytesIO(data), "the upload")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _halved(array: np.ndarray) -> np.ndarray:
    """Half precision for float32 arrays of two axes and more, unless a value would overflow."""
    if array.dtype != np.float32 or array.ndim < 2:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(np.isinf(half), np.isinf(array)) else array


# ---------------------------------------------------------------- reading


def _read(stream: BinaryIO, where: str) -> Capture:
    header = _header(stream, where)
    stream.seek(0)
    try:
        capture = _unpack(header, _Shelf(safetensors.numpy.load(stream.read())))
        check_capture(capture)
    except SnapshotError:
        raise
    except DexvizError as error:
        raise SnapshotError(f"a consistent snapshot in {where}", str(error), _AGAIN) from error
    except (safetensors.SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"a whole snapshot in {where}", f"{type(error).__name__}: {error}", _AGAIN) from error
    return capture


def _header(stream: BinaryIO, where: str) -> dict[str, Any]:
    """The JSON of the capture, read before anything else so that a large foreign file costs nothing."""
    size = int.from_bytes(prefix := stream.read(8), "little")
    if len(prefix) < 8 or not 2 <= size <= MAX_HEADER:
        raise SnapshotError(f"a dexviz snapshot in {where}", "a file without its header", _AGAIN)
    try:
        text = _strict_json(stream.read(size)).get("__metadata__", {}).get(FORMAT)
        header = None if text is None else _strict_json(text)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(
            f"a dexviz snapshot in {where}", f"an unreadable header ({type(error).__name__})", _AGAIN
        ) from error
    if header is None:
        raise SnapshotError(
            f"a dexviz snapshot in {where}", "another kind of safetensors file", "Give a file that dexviz saved."
        )
    if header.get("version") != VERSION:
        todo = "Open it with the dexviz version that wrote it, or capture again."
        raise SnapshotError(f"snapshot format version {VERSION} in {where}", f"version {header.get('version')!r}", todo)
    return header


def _strict_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object whose numbers are finite; ValueError otherwise."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is not finite")
        return value

    value = json.loads(text, parse_float=finite, parse_constant=finite)
    if not isinstance(value, dict):
        raise TypeError("the header is not an object")
    return value


class _Shelf:
    """The arrays of a file, taken one by one; whatever is left in the end does not belong there."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)

    def take(self, key: str) -> np.ndarray:
        array = self._arrays.pop(key)
        if array.dtype == np.float16:
            array = array.astype(np.float32)
        elif array.dtype == np.bool_:
            array = array.view(np.uint8) != 0
        array.setflags(write=False)
        return array

    def maybe(self, key: str) -> np.ndarray | None:
        return self.take(key) if key in self._arrays else None

    def close(self) -> None:
        if self._arrays:
            raise ValueError(f"unexpected arrays {sorted(self._arrays)[:3]}")


def _unpack(header: dict[str, Any], shelf: _Shelf) -> Capture:
    tokens = Tokens(
        ids=shelf.take("tokens.ids"),
        labels=tuple(header["labels"]),
        text=header["text"],
        offsets=shelf.take("tokens.offsets"),
        special=shelf.take("tokens.special"),
    )
    maps = [_unpack_map(index, f"maps.{k}", shelf) for k, index in enumerate(header["maps"])]
    capture = Capture(
        tokens=tokens,
        request=CaptureRequest.from_json(header["request"]),
        stats={str(name): shelf.take(f"stats.{k}") for k, name in enumerate(header["stats"])},
        lam=shelf.take("lam"),
        selected=shelf.take("selected"),
        logits_top=TopTokens(shelf.take("top.ids"), tuple(header["top_labels"]), shelf.take("top.prob")),
        provenance=header["provenance"],
        maps={(m.layer, m.head): m for m in maps},
        pooled=shelf.maybe("pooled"),
        pooled_extreme=shelf.maybe("pooled_extreme"),
        similarity={name: a for name in SIMILARITIES if (a := shelf.maybe(f"similarity.{name}")) is not None},
        strongest=shelf.maybe("strongest"),
        delta_norm=shelf.maybe("delta_norm"),
        delta_cosine=shelf.maybe("delta_cosine"),
    )
    shelf.close()
    if (len(capture.maps), len(capture.stats)) != (len(maps), len(header["stats"])):
        raise ValueError("a map or a statistic is there twice")
    return capture


def _unpack_map(index: Mapping[str, Any], key: str, shelf: _Shelf) -> HeadMap:
    return HeadMap(
        layer=index["layer"],
        head=index["head"],
        score=index["score"],
        scores=shelf.take(f"{key}.scores"),
        attention=shelf.take(f"{key}.attention"),
        row_edges=shelf.take(f"{key}.row_edges"),
        col_edges=shelf.take(f"{key}.col_edges"),
        extreme=shelf.maybe(f"{key}.extreme"),
        gain=shelf.maybe(f"{key}.gain"),
        residue=shelf.maybe(f"{key}.residue"),
        terms=tuple(shelf.take(f"{key}.terms.{t}") for t in range(index["terms"])),
    )
