"""Snapshots: what goes in comes out bit for bit, nothing half-written, and no file can do more than be refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings, strategies as st

from dexviz import snapshot
from dexviz.errors import CaptureError, SnapshotError
from dexviz.records import Capture, CaptureRequest
from dexviz.snapshot import load_snapshot, read_snapshot_bytes, save_snapshot, snapshot_bytes
from tests.captures import arrays_of, assert_same, make_capture

GALLERY = Path(__file__).resolve().parent.parent / "app" / "gallery"


def rewritten(capture: Capture, arrays: dict | None = None, drop: tuple[str, ...] = (), **header: object) -> bytes:
    """A snapshot file with some arrays or header entries replaced: what a hostile or damaged file may hold."""
    data = snapshot_bytes(capture)
    size = int.from_bytes(data[:8], "little")
    written = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][snapshot.FORMAT])
    metadata = {snapshot.FORMAT: json.dumps({**written, **header})}
    held = {**safetensors.numpy.load(data), **(arrays or {})}
    return safetensors.numpy.save({name: a for name, a in held.items() if name not in drop}, metadata)


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 99),
    full=st.booleans(),
    text=st.text(max_size=8),
)
def test_round_trip_is_exact(layers, heads, tokens, seed, full, text):
    capture = make_capture(layers, heads, tokens, seed, full=full, text=text)
    assert_same(read_snapshot_bytes(snapshot_bytes(capture)), capture)


def test_file_round_trip_is_exact_and_leaves_one_file(tmp_path):
    capture, path = make_capture(), tmp_path / "view.safetensors"
    assert save_snapshot(capture, path) == path
    save_snapshot(capture, path)
    assert_same(load_snapshot(str(path)), capture)
    assert [p.name for p in tmp_path.iterdir()] == ["view.safetensors"]
    assert path.read_bytes() == snapshot_bytes(capture)


@pytest.mark.parametrize("compact", [False, True])
def test_strongest_keys_are_kept_as_they_are_and_older_snapshots_have_none(compact):
    capture = make_capture(strongest=np.full((2, 3, 5), 100_003, dtype=np.int32))
    held = read_snapshot_bytes(snapshot_bytes(capture, compact=compact)).strongest
    assert held.dtype == np.int32
    assert np.array_equal(held, capture.strongest)
    older = replace(capture, strongest=None)
    assert read_snapshot_bytes(snapshot_bytes(older, compact=compact)).strongest is None


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.safetensors")), ids=lambda path: path.stem)
def test_the_gallerys_snapshots_load(path):
    capture = load_snapshot(path)
    assert capture.strongest is None or capture.strongest.shape == capture.stats["entropy"].shape


def test_loaded_arrays_are_read_only():
    loaded = read_snapshot_bytes(snapshot_bytes(make_capture()))
    assert not any(array.flags.writeable for array in arrays_of(loaded).values())


def test_views_that_are_not_contiguous_are_stored_as_they_look():
    capture = make_capture()
    flipped = replace(capture, lam=capture.lam[::-1], pooled=capture.pooled.swapaxes(2, 3))
    assert_same(read_snapshot_bytes(snapshot_bytes(flipped)), flipped)


def test_compact_halves_the_file_and_says_so():
    capture = make_capture(3, 4, 60, seed=1)
    data = snapshot_bytes(capture, compact=True)
    loaded = read_snapshot_bytes(data)
    assert len(data) < 0.65 * len(snapshot_bytes(capture))
    assert loaded.provenance == {**capture.provenance, "stored_as": "float16"}
    for name, array in arrays_of(capture).items():
        np.testing.assert_allclose(arrays_of(loaded)[name], array, rtol=2**-11, atol=1e-7, err_msg=name)


def test_compact_never_overflows():
    capture = make_capture(delta_norm=np.full((2, 3), 1e6, np.float32))
    assert (read_snapshot_bytes(snapshot_bytes(capture, compact=True)).delta_norm == 1e6).all()


def test_every_truncation_is_one_clear_error():
    data = snapshot_bytes(make_capture(1, 1, 2))
    for size in [*range(0, len(data), 37), len(data) - 1]:
        with pytest.raises(SnapshotError) as error:
            read_snapshot_bytes(data[:size])
        assert "\n" not in str(error.value)
    with pytest.raises(SnapshotError):
        read_snapshot_bytes(data + b"x")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_is_refused_or_harmless(data):
    content = bytearray(snapshot_bytes(make_capture(1, 2, 2)))
    size = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, size - 1))
    content[place] = data.draw(st.integers(0, 255))
    try:
        loaded = read_snapshot_bytes(bytes(content))
    except SnapshotError:
        return
    snapshot_bytes(loaded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "without its header"),
        (b"PK\x03\x04 a zip or pickle of some kind", "without its header"),
        ((2**40).to_bytes(8, "little") + b"{}", "without its header"),
        (len(b"[" * 9000).to_bytes(8, "little") + b"[" * 9000, "unreadable header"),
        (safetensors.numpy.save({"w": np.zeros(3)}), "another kind of safetensors file"),
        (safetensors.numpy.save({"w": np.zeros(3)}, {"format": "pt"}), "another kind of safetensors file"),
        (safetensors.numpy.save({}, {snapshot.FORMAT: '{"version": 2}'}), "got version 2"),
        (safetensors.numpy.save({}, {snapshot.FORMAT: "{}"}), "got version None"),
        (safetensors.numpy.save({}, {snapshot.FORMAT: '{"version": NaN}'}), "unreadable header"),
        (safetensors.numpy.save({}, {snapshot.FORMAT: '{"version": 1e999}'}), "unreadable header"),
        (safetensors.numpy.save({}, {snapshot.FORMAT: "[]"}), "unreadable header"),
        (safetensors.numpy.save({}, {snapshot.FORMAT: "version 1"}), "unreadable header"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=message):
        load_snapshot(path)


WRONG = {
    "labels too few": {"labels": ["one"]},
    "labels no text": {"labels": [1, 2, 3, 4, 5]},
    "text no text": {"text": 7},
    "text too short": {"text": "", "arrays": {"tokens.offsets": np.ones((5, 2), np.int64)}},
    "offsets backwards": {"arrays": {"tokens.offsets": np.tile([2, 1], (5, 1))}},
    "top labels": {"top_labels": []},
    "request of unknown field": {"request": {"colour": "red"}},
    "request out of range": {"request": {"pool": -1}},
    "request of wrong type": {"request": {"pool": "big"}},
    "request no object": {"request": 3},
    "span outside": {"request": {"spans": {"a": [0, 99]}}},
    "provenance no object": {"provenance": [1]},
    "stats without entropy": {"stats": [f"s{k}" for k in range(8)]},
    "stats missing": {"stats": ["entropy"]},
    "stats twice": {"stats": ["entropy"] * 8},
    "maps missing": {"maps": []},
    "map outside": {"maps": [{"layer": 9, "head": 0, "score": "signed", "terms": 2}]},
    "map of text": {"maps": [{"layer": "0", "head": 0, "score": "signed", "terms": 2}]},
    "maps without number": {"maps": [{}]},
    "map twice": {"maps": [{"layer": 1, "head": 0, "score": "signed", "terms": t} for t in (2, 0)]},
    "map of unknown score": {"maps": [{"layer": k, "head": k, "score": "magic", "terms": 2 - 2 * k} for k in (0, 1)]},
    "maps no list": {"maps": 5},
    "ids of another length": {"arrays": {"tokens.ids": np.arange(4)}},
    "ids as floats": {"arrays": {"tokens.ids": np.arange(5.0)}},
    "ids scalar": {"arrays": {"tokens.ids": np.array(3)}},
    "lam of another length": {"arrays": {"lam": np.zeros(3, np.float32)}},
    "entropy flat": {"arrays": {"stats.0": np.zeros(30, np.float32)}},
    "entropy empty": {"arrays": {"stats.0": np.zeros((0, 3, 5), np.float32)}},
    "tiles not square": {"arrays": {"pooled": np.zeros((2, 3, 4, 3), np.float32)}},
    "tiles scalar": {"arrays": {"pooled": np.zeros((), np.float32)}},
    "edges beyond the prompt": {"arrays": {"maps.0.row_edges": np.arange(6) + 1}},
    "edges falling": {"arrays": {"maps.0.row_edges": np.arange(6)[::-1]}},
    "edges scalar": {"arrays": {"maps.0.row_edges": np.array(1)}},
    "gain of another length": {"arrays": {"maps.0.gain": np.zeros(4, np.float32)}},
    "array missing": {"drop": ("maps.0.scores",)},
    "array too many": {"arrays": {"extra": np.zeros(1)}},
    "unknown dtype": {"arrays": {"lam": np.zeros(2, np.uint16)}},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_inconsistent_files_are_refused(change):
    with pytest.raises(SnapshotError) as error:
        read_snapshot_bytes(rewritten(make_capture(), **change))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_odd_booleans_become_plain_ones():
    capture = make_capture()
    data = bytearray(snapshot_bytes(capture))
    size = 8 + int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8:size])["selected"]["data_offsets"]
    data[size + start : size + stop] = bytes(7 * int(x) for x in capture.selected.ravel())
    assert read_snapshot_bytes(bytes(data)).selected.tobytes() == capture.selected.tobytes()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"provenance": {"loss": float("nan")}}, SnapshotError, "provenance that JSON can hold"),
        ({"provenance": {"model": object()}}, SnapshotError, "provenance that JSON can hold"),
        ({"lam": np.zeros(2)}, SnapshotError, "lam as float32"),
        ({"stats": {}}, SnapshotError, "statistics"),
        ({"request": CaptureRequest(maps=((9, 9),))}, CaptureError, "L9·H9"),
    ],
)
def test_a_capture_that_cannot_come_back_is_not_written(tmp_path, changes, kind, message):
    with pytest.raises(kind, match=message):
        save_snapshot(make_capture(**changes), tmp_path / "view")
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written_or_read(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no" / "view", tmp_path / "file" / "view", tmp_path, "nul\0byte", tmp_path / ("n" * 300)):
        with pytest.raises(SnapshotError):
            save_snapshot(make_capture(), path)
        with pytest.raises(SnapshotError):
            load_snapshot(path)
    with pytest.raises(SnapshotError, match="to be a file"):
        load_snapshot(os.devnull)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    """The child may write 4 KiB per file at most, as on a disk that fills up half way."""
    path = tmp_path / "view"
    save_snapshot(make_capture(seed=1), path)
    before = path.read_bytes()
    script = (
        "import sys; from dexviz.errors import SnapshotError; from dexviz.snapshot import load_snapshot, save_snapshot\n"
        "try: save_snapshot(load_snapshot(sys.argv[1]), sys.argv[1])\n"
        "except SnapshotError as error: print(error)"
    )

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=small_files,
        cwd=Path(__file__).parents[1],
        env=environment,
    )
    assert "Free some space" in done.stdout
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["view"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def stop(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save_snapshot(make_capture(), tmp_path / "view")
    assert not list(tmp_path.iterdir())
