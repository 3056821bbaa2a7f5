"""The choice of kernels: made once, overridden by a variable, and never changed in silence."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dexviz.errors import CaptureError, DexvizError
from dexviz.kernels import backend
from tests.fallbacks import check_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(backend, "_failures", {})
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    backend._choice.cache_clear()
    yield
    backend._choice.cache_clear()


@pytest.mark.parametrize(
    ("asked", "device", "name"),
    [
        (None, CPU, "compiled"),
        (None, CUDA, "eager"),
        ("", CPU, "compiled"),
        ("", CUDA, "eager"),
        ("eager", CPU, "eager"),
        ("eager", CUDA, "eager"),
        ("compiled", CPU, "compiled"),
        ("triton", CUDA, "triton"),
    ],
)
def test_each_device_has_its_kernels_unless_the_variable_says_otherwise(monkeypatch, asked, device, name):
    if asked is not None:
        monkeypatch.setenv(backend.VARIABLE, asked)
    assert backend.chosen(device) == backend.Backend(name)


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    with pytest.raises(DexvizError, match="Expected DEXVIZ_KERNELS to be eager, compiled or triton, got 'cuda'"):
        backend.chosen(CPU)


def test_compiled_loops_are_for_the_cpu(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "compiled")
    with pytest.raises(DexvizError, match="Expected a CPU for DEXVIZ_KERNELS=compiled, got cuda"):
        backend.chosen(CUDA)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(DexvizError, match="Expected a CUDA device for DEXVIZ_KERNELS=triton, got cpu"):
        backend.chosen(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.chosen(CPU).name == "triton"


def broken() -> str:
    raise RuntimeError("out of\nregisters")


def test_a_failure_falls_back_once_and_says_why(monkeypatch, caplog):
    monkeypatch.setenv(backend.VARIABLE, "triton")
    with caplog.at_level(logging.WARNING):
        assert backend.attempt(CUDA, broken, lambda: "eager") == "eager"
    assert backend.attempt(CUDA, lambda: "triton", lambda: "eager") == "eager"
    note = "Triton failed on cuda, eager kernels took over. RuntimeError: out of registers"
    assert backend.chosen(CUDA) == backend.Backend("eager", note)
    assert [record.message for record in caplog.records] == [note]


def test_what_is_no_fault_of_triton_is_raised(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "triton")

    def refused() -> str:
        raise CaptureError("a", "b", "C.")

    with pytest.raises(CaptureError):
        backend.attempt(CUDA, refused, lambda: "eager")
    assert backend.chosen(CUDA).name == "triton"


def test_a_fallback_that_no_test_asked_for_is_a_failure(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "compiled")
    backend.attempt(CPU, broken, lambda: "eager")
    with pytest.raises(pytest.fail.Exception, match=r"fell back to their eager twins: .*out of registers"):
        check_kernels()
    check_kernels()
    assert backend.chosen(CPU).name == "compiled", "the next test starts afresh"


def test_the_eager_path_loads_no_triton_kernel():
    code = (
        "import sys, torch; before = set(sys.modules); from dexviz import recorder, training; from dexviz.kernels.dex import *;"
        "dex_output(torch.ones(1, 1, 1, 1), torch.ones(1, 1), torch.ones(()), torch.tensor([0]));"
        "print(*(n for n in set(sys.modules) - before if n.startswith('dexviz.kernels.triton')))"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "DEXVIZ_KERNELS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []
