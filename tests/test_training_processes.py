"""Several processes that train together, as `torchrun` starts them: the same losses as one process, one folder, one answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_runs import ROOT
from tests.training_runs import base_and_text, options

LIMIT = 400
"""Seconds after which processes count as hanging; they take about 15 on an idle machine."""
RUN = {"steps": 10, "save_every": 4, "evaluate_every": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_and_text(tmp_path_factory.mktemp("processes"))


def start(processes: int, *argv: str | Path) -> subprocess.Popen[str]:
    """Processes of one run, which speak to each other over the loopback device alone."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    command = [sys.executable, *torchrun, "-m", "dexviz", "train", *map(str, argv)]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **quiet}, stdout=pipe, stderr=pipe, text=True)


def stop(started: subprocess.Popen[str]) -> None:
    """End a run: torchrun passes the signal on to its processes, which die of it at once."""
    started.terminate()
    started.communicate(timeout=60)


def finished(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; ends all processes that hang."""
    try:
        out, err = started.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        stop(started)
        raise
    return started.returncode, out, err


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def together(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("together")
    status, out, err = finished(start(2, *options(root, **RUN, batch=2), "--out", folder / "out", "--json"))
    assert status == 0, err
    return folder, out, err


def test_two_processes_are_one_with_twice_the_batch(root: Path, tmp_path: Path, together: tuple[Path, str, str]) -> None:
    from dexviz.cli import main

    folder, out, err = together
    assert [p.name for p in folder.iterdir()] == ["out"]
    answer = json.loads(out)
    assert answer["steps"] == 10
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [f"step {step}/10" for step in range(1, 11)], err
    assert main(["train", *options(root, **RUN, batch=4), "--out", str(tmp_path / "one")]) == 0
    two, one = log_of(folder / "out"), log_of(tmp_path / "one")
    for name in ("loss", "validation", "held_out"):
        for a, b in zip(two, one, strict=True):
            assert a[name] == (b[name] and pytest.approx(b[name], rel=1e-5)), (name, a["step"])
    told = json.loads((tmp_path / "one" / "adapter_config.json").read_text())["training"]["held_out"]
    assert answer["held_out"]["base"] == pytest.approx(told["base"], rel=1e-6)
    assert answer["held_out"]["variant"]["mean"] == pytest.approx(told["variant"]["mean"], rel=1e-5)


def test_an_error_ends_all_processes(root: Path, tmp_path: Path) -> None:
    status, out, err = finished(start(2, *options(root, data=tmp_path / "none.txt"), "--out", tmp_path / "out"))
    assert status != 0
    assert out == ""
    assert "none.txt" in err
    assert f'File "{ROOT / "dexviz"}' not in err, "torchrun's own traceback stays, ours does not come"
    assert list(tmp_path.iterdir()) == []
