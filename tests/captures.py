"""Captures of random numbers, for tests of what is done with a capture rather than of how it is made."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from dexviz.records import STATISTICS, Capture, CaptureRequest, HeadMap, Tokens, TopTokens

ODD_TEXT = "héλλo 猫 \u200d🙂<script>\x00\ud800\u202e"


def make_capture(
    layers: int = 2, heads: int = 3, tokens: int = 5, seed: int = 0, *, full: bool = True, text: str = ODD_TEXT, **changes
) -> Capture:
    """Random arrays with NaN in them; `full` adds tiles, maps, similarity and DEX deltas."""
    random = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        values = random.normal(size=shape).astype(np.float32)
        return np.where(random.random(shape) < 0.1, np.float32(np.nan), values)

    request = CaptureRequest(spans={"needle λ": (0, tokens)}, pool=4 if full else None, score="contribution")
    head_map = HeadMap(
        layer=layers - 1,
        head=0,
        score="contribution",
        scores=floats(tokens, tokens),
        attention=floats(tokens, tokens),
        row_edges=np.arange(tokens + 1),
        col_edges=np.arange(tokens + 1),
        gain=floats(tokens),
        residue=floats(tokens),
        terms=(floats(tokens, tokens), floats(tokens, tokens)),
    )
    window = HeadMap(0, heads - 1, "signed", floats(1, 1), floats(1, 1), np.array([0, tokens]), np.array([0, 1]), floats(1, 1))
    tiles = min(4, tokens)
    optional = {
        "maps": {(m.layer, m.head): m for m in (head_map, window)},
        "pooled": floats(layers, heads, tiles, tiles),
        "pooled_extreme": floats(layers, heads, tiles, tiles),
        "similarity": {"cosine": floats(layers, heads, heads), "js": floats(layers, heads, heads)},
        "strongest": np.random.default_rng(seed).integers(-1, tokens, (layers, heads, tokens)).astype(np.int32),
        "delta_norm": floats(layers, heads),
        "delta_cosine": floats(layers, heads),
    }
    return replace(
        Capture(
            tokens=Tokens(
                ids=random.integers(0, 99, tokens),
                labels=tuple(f"{text}{k}" for k in range(tokens)),
                text=text,
                offsets=np.zeros((tokens, 2), np.int64),
                special=random.random(tokens) < 0.5,
            ),
            request=request,
            stats={name: floats(layers, heads, tokens) for name in [*STATISTICS, "span:needle λ"]},
            lam=floats(layers),
            selected=random.random((layers, heads)) < 0.5,
            logits_top=TopTokens(np.arange(3), ("a", "", ODD_TEXT), np.float32([0.5, 0.25, 0.1])),
            provenance={"model": "tiny", "view": "variant", "versions": {"torch": "2.13.0"}, "λ": [0.1, 1e-300], "none": None},
            **(optional if full else {}),
        ),
        **changes,
    )


def arrays_of(value: object, path: str = "") -> dict[str, np.ndarray]:
    """Every array inside a record, by its path."""
    if isinstance(value, np.ndarray):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    items = items if items is not None else vars(value).items() if hasattr(value, "__dict__") else ()
    return {name: array for key, inner in items for name, array in arrays_of(inner, f"{path}.{key}").items()}


def assert_same(loaded: Capture, saved: Capture) -> None:
    before, after = arrays_of(saved), arrays_of(loaded)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert (after[name].dtype, after[name].shape) == (array.dtype, array.shape), name
        assert after[name].tobytes() == array.tobytes(), name
    assert list(loaded.stats) == list(saved.stats)
    assert loaded.request == saved.request
    assert dict(loaded.provenance) == json.loads(json.dumps(dict(saved.provenance)))
    assert (loaded.tokens.text, loaded.tokens.labels) == (saved.tokens.text, saved.tokens.labels)
    assert loaded.logits_top.labels == saved.logits_top.labels
    assert [(m.layer, m.head, m.score) for m in loaded.maps.values()] == [
        (m.layer, m.head, m.score) for m in saved.maps.values()
    ]
