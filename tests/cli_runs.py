"""Running the command line in tests: in this process or in one of its own, and what a refusal looks like."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dexviz.adapter import save_adapter
from dexviz.cli import main
from dexviz.dex import DexAdapter, DexConfig
from dexviz.models import load_model

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., tuple[int, str, str]]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process → (exit status, standard output, standard error)."""

    def call(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(part) for part in argv])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def run_process(*argv: str | Path, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own, in which no file may grow past `limit` bytes: what a full disk looks like."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "dexviz", *map(str, argv)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=restrict)


def check_refused(status: int, out: str, err: str, message: str) -> None:
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert message in err
    assert "Traceback" not in err


def tiny_adapter(folder: Path, base: Path) -> Path:
    """An adapter with λ = 0.5 on two heads of each layer."""
    loaded = load_model(str(base))
    layout = loaded.layout
    adapter = DexAdapter(DexConfig(heads=((0, 1),) * layout.layers, width=layout.value_width, query_heads=layout.heads))
    for operator in adapter.operators.values():
        torch.nn.init.constant_(operator.lambda_learn, 0.5)
    return save_adapter(adapter, folder, loaded)
