"""Captures through Triton kernels, and what becomes of a capture where they fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dexviz.headmaps import head_map
from dexviz.kernels import backend, operators
from dexviz.models import ModelPair, load_pair
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest
from tests.adapters import tiny_model

REQUEST = CaptureRequest(maps=((0, 1),), pool=3, similarity=True, spans={"a": (1, 3)}, score="contribution")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return load_pair(str(tiny_model(tmp_path_factory.mktemp("model"), "llama")), dtype="float32")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(backend, "_failures", {})


def taken(pair: ModelPair, monkeypatch, kernels: str, score: str = "contribution") -> tuple[Capture, np.ndarray]:
    monkeypatch.setenv(backend.VARIABLE, kernels)
    kept = []
    made = capture(pair.base, pair.tokenize("w1 w2 w3 w1 w2"), replace(REQUEST, score=score), keep=kept.append)
    return made, head_map(kept[0], 1, score=score).scores


@pytest.mark.parametrize("score", ["contribution", "attention"])
def test_triton_captures_what_eager_kernels_capture(pair, monkeypatch, score):
    names = ("eager", "triton")
    (eager, one), (mine, other) = (taken(pair, monkeypatch, kernels, score) for kernels in names)
    assert (eager.provenance["kernels"], mine.provenance["kernels"]) == names
    assert mine.provenance["kernels_note"] is None
    np.testing.assert_allclose(other, one, atol=1e-5)
    for name, values in eager.stats.items():
        np.testing.assert_allclose(mine.stats[name], values, atol=1e-5, err_msg=name)
    for name, matrix in eager.similarity.items():
        np.testing.assert_allclose(mine.similarity[name], matrix, atol=1e-5, err_msg=name)
    for part in ("pooled", "pooled_extreme"):
        np.testing.assert_allclose(getattr(mine, part), getattr(eager, part), atol=1e-5, err_msg=part)
    np.testing.assert_allclose(mine.maps[0, 1].scores, eager.maps[0, 1].scores, atol=1e-5)


def test_a_capture_whose_kernels_fail_is_eager_and_says_why(pair, monkeypatch):
    eager, one = taken(pair, monkeypatch, "eager")

    def broken(*_, **__):
        raise RuntimeError("no such instruction")

    whole = operators._triton()
    monkeypatch.setattr(operators, "_triton", lambda: replace(whole, row_sums=broken))
    mine, other = taken(pair, monkeypatch, "triton")
    assert mine.provenance["kernels"] == "eager"
    assert mine.provenance["kernels_note"].endswith("eager kernels took over. RuntimeError: no such instruction")
    assert torch.equal(torch.from_numpy(other), torch.from_numpy(one))
    for name, values in eager.stats.items():
        np.testing.assert_array_equal(mine.stats[name], values, err_msg=name)
