"""Captures on the compiled loops, and what becomes of one where they fail: eager numbers, and a note that says why."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dexviz.kernels import backend
from dexviz.kernels.compiled import loops
from dexviz.models import ModelPair, load_pair
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest
from tests.adapters import random_adapter, tiny_model
from tests.captures import arrays_of

REQUEST = CaptureRequest(maps=((0, 1),), pool=3, similarity=True, spans={"a": (1, 3)})
PROMPT = "w1 w2 w3 w1 w2 w5 w1"
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    folder = tmp_path_factory.mktemp("model")
    model = str(tiny_model(folder / "base", "llama"))
    adapter = random_adapter(load_pair(model, dtype="float32").base.loaded, folder / "adapter")
    return load_pair(model, adapter=str(adapter), dtype="float32")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(backend, "_failures", {})
    monkeypatch.delenv(backend.VARIABLE, raising=False)


def taken(pair: ModelPair, score: str = "signed") -> Capture:
    return capture(pair.variant, pair.tokenize(PROMPT), replace(REQUEST, score=score))


def eager(pair: ModelPair, monkeypatch, score: str = "signed") -> Capture:
    with monkeypatch.context() as patched:
        patched.setenv(backend.VARIABLE, "eager")
        made = taken(pair, score)
    assert (made.provenance["kernels"], made.provenance["kernels_note"]) == ("eager", None)
    return made


def assert_same_numbers(mine: Capture, other: Capture, tolerance: float) -> None:
    found, expected = arrays_of(mine), arrays_of(other)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=tolerance, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("score", ["attention", "signed", "contribution"])
def test_compiled_and_eager_captures_have_the_same_numbers(pair, monkeypatch, score):
    made = taken(pair, score)
    assert (made.provenance["kernels"], made.provenance["kernels_note"]) == ("compiled", None)
    assert_same_numbers(made, eager(pair, monkeypatch, score), 2e-5)


def assert_fell_back(pair: ModelPair, monkeypatch, caplog, reason: str) -> None:
    with caplog.at_level(logging.WARNING, logger=backend.__name__):
        made, again = taken(pair), taken(pair)
    note = f"Compiled loops failed on cpu, eager kernels took over. {reason}"
    assert [record.message for record in caplog.records] == [note]
    for one in (made, again):
        assert (one.provenance["kernels"], one.provenance["kernels_note"]) == ("eager", note)
        assert_same_numbers(one, eager(pair, monkeypatch), 0.0)


def test_without_numba_captures_are_eager_and_say_so(pair, monkeypatch, caplog):
    expected = "ModuleNotFoundError: import of numba halted; None in sys.modules"
    for name in [name for name in sys.modules if name.startswith("dexviz.kernels.compiled")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delattr("dexviz.kernels.compiled", raising=False)
    assert_fell_back(pair, monkeypatch, caplog, expected)


@pytest.mark.parametrize("loop", ["softmax", "row_sums", "tiles", "gram"])
def test_a_loop_that_fails_leaves_eager_numbers(pair, monkeypatch, caplog, loop):
    def broken(*_):
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(loops, loop, broken)
    assert_fell_back(pair, monkeypatch, caplog, "RuntimeError: no such instruction")


def test_a_loop_that_fails_in_a_later_layer_spoils_nothing(pair, monkeypatch):
    """That layer is done again from its start; the layers before it keep compiled numbers."""
    whole, calls = loops.row_sums, []

    def late(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("later")
        whole(*args)

    monkeypatch.setattr(loops, "row_sums", late)
    made = taken(pair)
    assert len(calls) == 2
    assert made.provenance["kernels_note"].endswith("RuntimeError: later")
    assert_same_numbers(made, eager(pair, monkeypatch), 2e-5)


def test_loops_need_no_folder_to_keep_them_in():
    """Where neither the package nor the user has a folder that can be written, loops are compiled for this process alone."""
    code = (
        "from numba.core import caching; caching.CompileResultCacheImpl._locator_classes = [];"
        "import numpy as np; from dexviz.kernels.compiled import loops;"
        "s = np.ones((2, 3, 4), np.float32); g = np.zeros((2, 2)); loops.gram(s, g); print(g.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[[12.0, 12.0], [0.0, 12.0]]"
