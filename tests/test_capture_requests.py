"""Requests and prompts that cannot be served: one clear error each, before any work is done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dexviz import room
from dexviz.errors import BudgetError, CaptureError, PromptError
from dexviz.headmaps import head_map
from dexviz.models import ModelPair, make_pair, wrap_model
from dexviz.recorder import capture
from dexviz.records import CaptureRequest, Tokens
from dexviz.room import check_room
from dexviz.scores import LayerRecord
from tests import families
from tests.adapters import random_adapter


def tokens_of(*ids: int) -> Tokens:
    n = len(ids)
    return Tokens(np.array(ids, dtype=np.int64), ("x",) * n, "x" * n, np.zeros((n, 2), dtype=np.int64), np.zeros(n, dtype=bool))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    base = wrap_model(families.build("llama"))
    return make_pair(base, adapter=str(random_adapter(base, tmp_path_factory.mktemp("adapters") / "a")))


@pytest.mark.parametrize(
    "fields",
    [
        {"maps": [(1,)]},
        {"maps": ["ab"]},
        {"maps": 3},
        {"pool": "a"},
        {"pool": 2.5},
        {"pool": 0},
        {"pool": 10_000},
        {"spans": {"x": 3}},
        {"similarity": ("nonsense",)},
        {"similarity": 3},
        {"score": "nonsense"},
        {"space": "nonsense"},
        {"sink": 0},
        {"local": 0},
        {"threshold": 0},
        {"threshold": float("nan")},
    ],
)
def test_malformed_requests(fields: dict) -> None:
    with pytest.raises(CaptureError) as caught:
        CaptureRequest(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [(), (1,) * 5000, (1, 128), (-1, 2)])
def test_prompts_that_the_model_cannot_read(pair: ModelPair, ids: tuple[int, ...]) -> None:
    with pytest.raises(PromptError, match="token"):
        capture(pair.base, tokens_of(*ids))


@pytest.mark.parametrize(
    "fields",
    [{"maps": [(2, 0)]}, {"maps": [(0, -1)]}, {"spans": {"a": (2, 2)}}, {"spans": {"a": (0, 9)}}, {"spans": {"a": (-1, 1)}}],
)
def test_requests_outside_the_model_or_the_prompt(pair: ModelPair, fields: dict) -> None:
    with pytest.raises(CaptureError):
        capture(pair.base, tokens_of(3, 4, 5), CaptureRequest(**fields))


def test_maps_that_do_not_fit_are_refused_with_numbers(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match=r"\d+\.\d GB"):
        check_room(1 << 50)
    monkeypatch.setattr(room, "_BYTES_PER_ENTRY", 1 << 40)
    records = []
    capture(pair.base, tokens_of(3, 4, 5), keep=records.append)
    with pytest.raises(BudgetError):
        head_map(records[0], 0)


def test_one_token(pair: ModelPair) -> None:
    taken = capture(pair.variant, tokens_of(7), CaptureRequest(pool=8, similarity=("cosine", "cka", "js"), maps=[(1, 5)]))
    assert taken.maps[1, 5].attention.tolist() == [[1.0]]
    assert taken.pooled is not None
    assert taken.pooled.shape == (2, 6, 1, 1)
    np.testing.assert_allclose(taken.stats["entropy"], 0, atol=1e-6)
    np.testing.assert_allclose(taken.similarity["js"], 1, atol=1e-6)


def test_provenance_tells_adapters_apart(pair: ModelPair, tmp_path: Path) -> None:
    other = make_pair(pair.base.loaded, adapter=str(random_adapter(pair.base.loaded, tmp_path / "b", seed=9)))
    facts = [capture(p.variant, tokens_of(3, 4)).provenance["adapter"] for p in (pair, other)]
    assert facts[0]["heads"] == facts[1]["heads"]
    assert facts[0]["fingerprint"] != facts[1]["fingerprint"]


@pytest.mark.parametrize("fields", [{"pool": 0}, {"score": "nonsense"}, {"space": "nonsense"}, {"window": (0, 9, 0, 1)}])
def test_maps_that_cannot_be_made(pair: ModelPair, fields: dict) -> None:
    kept: list[LayerRecord] = []
    capture(pair.variant, tokens_of(3, 4, 5), keep=kept.append)
    with pytest.raises(CaptureError):
        head_map(kept[0], 0, **fields)


def test_diff_tiles_keep_both_terms() -> None:
    view = make_pair(wrap_model(families.build("diffllama"))).base
    kept: list[LayerRecord] = []
    capture(view, tokens_of(*range(3, 20)), keep=kept.append)
    exact, tiled = head_map(kept[1], 2), head_map(kept[1], 2, pool=4)
    assert len(tiled.terms) == len(exact.terms) == 2
    lower = torch.ones(17, 17, dtype=torch.bool).tril().numpy()
    for whole, tiles in zip(exact.terms, tiled.terms, strict=True):
        assert tiles[3, 0] == pytest.approx(whole[12:, :4][lower[12:, :4]].mean(), rel=1e-5)
    with pytest.raises(CaptureError, match="value space"):
        head_map(kept[1], 2, space="residual")
