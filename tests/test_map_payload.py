"""What the attention map sends and receives, checked in Python by a decoder of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.components.attention_map import Lock, MapEvent, decode_event, tokens_name
from app.components.map_payload import (
    EXACT_LIMIT,
    LABEL_LIMIT,
    MAX_BYTES,
    clip_label,
    encode,
    encode_map,
    pool_for,
    quantise,
    window_around,
)
from dexviz.errors import BudgetError, CaptureError
from dexviz.records import HeadMap
from tests.apps.synthetic_maps import CASES, cut, dense_scores, make_tokens, synthetic_maps
from tests.browser import ROOT

APP = ROOT / "tests/apps/attention_map_app.py"


def decode(payload: bytes) -> tuple[dict, list[np.ndarray]]:
    """Header and the value arrays of the map's planes, read as the format's description says."""
    length = int.from_bytes(payload[:4], "little")
    header = json.loads(payload[4 : 4 + length])
    codes = np.frombuffer(payload, "<i2", offset=4 + length).astype(np.float64)
    planes, at = [], 0
    for plane in header["map"]["planes"]:
        own = codes[at : at + plane["count"]]
        values = np.sign(own) * plane["peak"] * np.exp((np.abs(own) - 32767) * header["step"])
        values[own == -32768] = np.nan
        values[own == 0] = 0
        planes.append(values)
        at += plane["count"]
    return header, planes


def test_values_keep_three_significant_digits() -> None:
    case = CASES["signed"]
    base, variant = dense_scores(case, seed=1)
    header, (first, second) = decode(encode((cut(base), cut(variant)), (), {"id": "x"}))
    lower = np.tril_indices(case.count)
    assert header["id"] == "x"
    assert header["map"]["triangular"]
    np.testing.assert_allclose(first, base[lower], rtol=3e-4)
    np.testing.assert_allclose(second, (variant.astype(np.float64) - base)[lower], rtol=3e-4)


def test_a_small_difference_keeps_its_digits() -> None:
    base = np.full((3, 3), 0.9, np.float32)
    variant = base.copy()
    variant[2, 1] += np.float32(1e-6)
    _, (_, difference) = decode(encode((cut(base), cut(variant)), (), {}))
    assert difference[4] == pytest.approx(float(variant[2, 1]) - 0.9, rel=0.1)
    assert np.count_nonzero(difference) == 1


def test_zero_blank_and_tiny_values_have_codes_of_their_own() -> None:
    codes, peak = quantise(np.array([0.0, np.nan, 2.0, -2.0, 1e-30, -1e-30, np.inf], np.float32))
    assert codes.tolist() == [0, -32768, 32767, -32767, 1, -1, -32768]
    assert peak == 2.0


@pytest.mark.parametrize("values", [np.zeros((2, 2)), np.full((2, 2), np.nan)], ids=["zeros", "blanks"])
def test_nothing_to_scale_by(values: np.ndarray) -> None:
    codes, peak = quantise(values)
    assert peak == 0
    assert set(codes.ravel()) <= {0, -32768}


def test_equal_views_have_no_difference() -> None:
    scores, _ = dense_scores(CASES["signed"], seed=0)
    _, (_, difference) = decode(encode((cut(scores), cut(scores.copy())), (), {}))
    assert not difference.any()


def test_a_window_beside_the_diagonal_travels_whole() -> None:
    scores, _ = dense_scores(CASES["signed"], seed=0)
    header, (values,) = decode(encode((cut(scores, (6, 10, 1, 4)), None), (), {}))
    assert not header["map"]["triangular"]
    np.testing.assert_allclose(values.reshape(4, 3), scores[6:10, 1:4], rtol=3e-4)


def test_largest_exact_map_fits_with_the_longest_labels() -> None:
    maps = synthetic_maps(CASES["limit"])
    longest = [clip_label("\N{GRINNING FACE}" * 99)] * EXACT_LIMIT
    payload = encode((maps.base, maps.variant), (), {"labels": longest})
    assert MAX_BYTES * 0.9 < len(payload) <= MAX_BYTES


@pytest.mark.parametrize("name", ["tiled", "long"])
def test_tiled_maps_fit(name: str) -> None:
    maps = synthetic_maps(CASES[name], event=MapEvent(lock=Lock(query=1400)))
    assert len(encode((maps.base, maps.variant), maps.strips, {"labels": list(maps.tokens.labels)})) < MAX_BYTES / 2


def test_a_map_that_does_not_fit_is_refused_with_numbers() -> None:
    scores = np.ones((1024, 1024), np.float32)
    with pytest.raises(BudgetError, match=r"1,048,576 bytes.*got 2,\d+,\d+ bytes.*pool=256"):
        encode((cut(scores), cut(scores)), (), {})


def test_views_over_other_tokens_are_refused() -> None:
    scores = np.ones((8, 8), np.float32)
    with pytest.raises(CaptureError, match="base and variant maps over the same tokens"):
        encode_map(cut(scores), cut(scores, (0, 4, 0, 4)))


def test_digest_names_the_data_and_not_the_lock() -> None:
    one, other = (cut(scores) for scores in dense_scores(CASES["signed"], seed=0))

    def digest(*pair: HeadMap | None, **header: object) -> str:
        return decode(encode(pair, (), header))[0]["digest"]

    assert digest(one, None) == digest(one, None, lock={"query": 1, "key": None})
    assert digest(one, None) != digest(other, None)
    assert digest(one, None) != digest(replace(one, extreme=one.scores), None)


def test_labels_are_cut_visibly() -> None:
    assert clip_label("short") == "short"
    assert len(clip_label("x" * 500)) == LABEL_LIMIT
    assert clip_label("x" * 500).endswith("…")


def test_pool_changes_at_the_limit() -> None:
    assert pool_for(EXACT_LIMIT) is None
    assert pool_for(EXACT_LIMIT + 1) == 256


@pytest.mark.parametrize(("query", "key", "tokens"), [(0, 0, 3000), (2999, 2999, 3000), (1500, 40, 3000), (5, 2, 10)])
def test_windows_lie_inside_the_prompt_around_their_centre(query: int, key: int, tokens: int) -> None:
    r0, r1, c0, c1 = window_around(query, key, tokens)
    assert 0 <= r0 <= query < r1 <= tokens
    assert 0 <= c0 <= key < c1 <= tokens
    assert r1 - r0 == c1 - c0 == min(256, tokens)
    assert window_around((r0 + r1) // 2, (c0 + c1) // 2, tokens) == (r0, r1, c0, c1)


TOKENS = make_tokens(("a", "b"), 5)


def event(**parts: object) -> MapEvent:
    return decode_event({"tokens": tokens_name(TOKENS), **parts}, TOKENS)


def test_events_are_decoded() -> None:
    assert event(lock={"query": 3, "key": None}) == MapEvent(lock=Lock(query=3))
    assert event(lock={"query": 3, "key": 0}).strip_window(5) == (3, 4, 0, 5)
    assert event(lock={"query": None, "key": 2}).strip_window(5) == (0, 5, 2, 3)
    assert event(focus={"query": 4, "key": 1}).window(5) == (0, 5, 0, 5)
    assert event().window(5) is None
    assert event().strip_window(5) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"lock": {"query": 5, "key": None}},
        {"lock": {"query": -1}},
        {"lock": {"query": True}},
        {"lock": {"query": "1"}},
        {"lock": "row"},
        {"lock": []},
        {"focus": {"query": 1}},
        {"focus": {"query": 1, "key": 99}},
        {"focus": 3},
        {"lock": {"query": 1}, "tokens": "another prompt"},
    ],
)
def test_malformed_events_count_as_no_choice(parts: dict) -> None:
    assert event(**parts) == MapEvent()


@pytest.mark.parametrize("raw", [None, "text", 3, []])
def test_nothing_sent_yet(raw: object) -> None:
    assert decode_event(raw, TOKENS) == MapEvent()


@pytest.mark.parametrize("case", sorted(CASES))
def test_component_mounts_in_apptest(case: str) -> None:
    app = AppTest.from_file(str(APP), default_timeout=60)
    app.query_params["case"] = case
    app.run()
    assert not app.exception
