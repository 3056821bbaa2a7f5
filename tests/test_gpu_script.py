"""The GPU script: its logic at tiny sizes in Triton's interpreter, and that it claims nothing where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_timings
from benchmarks.gpu_rows import Limit, Row, compared, table
from tests.score_cases import Case, layer

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
QUANTITIES = {
    "first pass, with O",
    "statistics",
    "tiles, 2 a side",
    "Gram",
    "Jensen-Shannon",
    "one head's map, S and A",
    "DEX on O",
    gpu_timings.LAYER,
}


def measure(limit: float = 1e6, memory: float = float("inf"), monkeypatch=None, lengths=(33,)) -> list[Row]:
    if monkeypatch is not None:
        monkeypatch.setattr(gpu_timings, "_free", lambda device: memory)
    shape = gpu_timings.Shape(2, 1, 16)
    return list(gpu_timings.measure(CPU, Limit(limit), lengths, (torch.float32,), shape, rounds=1, side=32))


def test_without_a_gpu_nothing_is_measured(tmp_path):
    target = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(target)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, target.exists()) == (0, "not measured: no GPU\n", False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels need a process that was started without a GPU")
def test_every_kernel_is_checked_timed_and_compared_with_its_floor(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_checks, "cases", lambda smoke, tiny: [(Case(20, kind="two terms", width=9), torch.bfloat16)])
    target = tmp_path / "new" / "gpu.json"
    assert gpu.main(["--device", "cpu", "--no-captures", "--json", str(target)]) == 0
    data = json.loads(target.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in data["rows"]]
    checks = [row for row in rows if row.holds is not None]
    assert {row.quantity.split(",")[0] for row in checks} == {
        "output", "map", "statistics", "size at argmax", "tile means", "tile extremes", "cosine", "Jensen-Shannon", "DEX",
    }  # fmt: skip
    timed = {row.quantity: row for row in rows if row.floor_ratio is not None and row.tokens == 32}
    assert set(timed) == QUANTITIES
    for row in timed.values():
        assert row.ratio == pytest.approx(row.seconds / row.sdpa_seconds)
        assert row.floor_ratio == pytest.approx(row.seconds / row.floor_seconds)
    assert data["targets"] == {}, "32,768 tokens were not measured"
    assert {frozenset(row) for row in data["rows"]} == {frozenset(f.name for f in fields(Row))}


def test_a_wrong_kernel_fails(monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "cases", lambda smoke, tiny: [(Case(5), torch.float32)])
    monkeypatch.setattr(gpu_checks.gram.Gram, "cosine", lambda self: torch.zeros(2, 2))
    monkeypatch.setattr(gpu_timings, "measure", lambda *_: iter(()))
    assert gpu.main(["--device", "cpu", "--no-captures"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("FAILS")] == ["cosine,"]


def test_what_is_left_out_is_named(monkeypatch):
    late = measure(limit=-1.0)
    assert [row.note for row in late[2:]] == ["not measured: the time limit was reached"]
    large = {row.quantity: row for row in measure(memory=10.0, monkeypatch=monkeypatch)}
    assert large["one head's map, S and A"].note == "not measured: 0.0 GB do not fit in memory"
    assert large["statistics"].seconds is not None

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_timings, "Setting", full)
    assert measure()[-1].note == "not measured: does not fit in memory"


def test_the_floor_counts_each_product_once():
    n, shape = 33, gpu_timings.Shape(2, 1, 16)
    found = {p.quantity: p for p in gpu_timings.parts(gpu_timings.Setting(n, shape, torch.float32, CPU))}
    pairs = sum(i + 1 for i in range(n))
    assert found["statistics"].operations == 2 * 2 * 16 * pairs
    assert found["first pass, with O"].operations == 2 * found["statistics"].operations
    assert found["Gram"].operations - found["statistics"].operations == 2 * 3 * pairs
    assert found["first pass, with O"].bytes == 4 * n * 16 * (2 + 1 + 1 + 2)
    assert gpu_timings.Peaks(10.0, 5.0).floor(100.0, 20.0) == 10.0
    assert gpu_timings.Peaks(10.0, 5.0).floor(10.0, 20.0) == 4.0


def test_targets_are_those_of_bfloat16_at_their_tokens():
    rows = [
        Row("capture, composed", 32768, "bfloat16", 1.2, 1.0, 1.2),
        Row("capture, composed", 8192, "bfloat16", 9.0, 1.0, 9.0),
        Row(gpu_timings.LAYER, 32768, "bfloat16", 3.0, 1.0, 3.0, 1.5, 2.0),
        Row("Gram", 32768, "bfloat16", 2.0, 1.0, 2.0, 0.5, 4.0),
        Row("Gram", 32768, "float32", 9.0, 1.0, 9.0, 0.5, 18.0),
    ]
    assert gpu.targets(rows) == {"capture_ratio": 1.2, "floor_ratio": 2.0, "limit": "longest kernel: Gram, 4.0 × its floor"}


def test_errors_are_relative_and_blanks_must_agree():
    expected = np.array([0.0, 10.0, np.nan])
    assert gpu_checks.error(torch.tensor([0.0, 11.0, float("nan")]), expected) == pytest.approx(0.1)
    assert gpu_checks.error(torch.tensor([0.0, 10.0, 0.0]), expected) == float("inf")
    lines = table([compared("a", 5, "float32", 2.0, 1.0), Row("b", 5, "float32", note="why not")]).splitlines()
    assert (lines[1].split()[-1], lines[2].endswith("why not")) == ("FAILS", True)


def test_the_reference_is_that_of_rounded_operands():
    exact = layer(Case(12, kind="gain"))
    given = gpu_checks.rounded(exact, torch.bfloat16)
    assert given.score.inputs.q_BHND.dtype == torch.bfloat16
    assert 1e-5 < np.abs(given.s_SNN - exact.s_SNN).max() < 0.1
    same = gpu_checks.rounded(exact, torch.float64)
    np.testing.assert_allclose(same.a_HNN, exact.a_HNN, atol=1e-12)
