"""The cost of a capture before it is started: it grows as it should, refuses with numbers, and is near what is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import dexviz
from app.estimate import cost
from dexviz import budget, room
from dexviz.budget import Estimate, ModelSize, estimated, free_memory, keep_bytes
from dexviz.errors import BudgetError, DexvizError, PromptError
from dexviz.records import CaptureRequest
from dexviz.requests import PairInfo, PairSpec
from dexviz.serving import KeptPass
from tests.cli_runs import run_process
from tests.families import prompt
from tests.test_family_captures import pair_of, tokens_of

SIZE = ModelSize(30, 9, 3, 64, 64, 576, 1536, 0, 8192, 135_000_000, "float32", "cpu")
FULL = CaptureRequest(pool=128, similarity=True)
ROOT = Path(__file__).resolve().parent.parent


def test_memory_follows_what_is_asked_for():
    plain = estimated(SIZE, 1000).memory
    assert estimated(SIZE, 1000, FULL).memory["tiles"] == 4 * 270 * 128**2 * 4
    maps = CaptureRequest(maps=((0, 0), (1, 1)))
    assert estimated(SIZE, 1000, maps).memory["exact maps"] == 2 * 2 * 1000**2 * 4
    assert not {"tiles", "exact maps", "kept Q, K and V", "logits"} & set(plain)
    kept = 30 * 1000 * (9 + 3 + 3) * 64 * 4
    assert estimated(SIZE, 1000, keep=1 << 40).memory["kept Q, K and V"] == kept
    assert estimated(SIZE, 1000, keep=5).memory["kept Q, K and V"] == 5
    assert estimated(replace(SIZE, logits=49152), 1000).memory["logits"] == 1000 * 49152 * 4


def test_time_follows_the_rate_and_grows_faster_than_the_length():
    short, long = estimated(SIZE, 100), estimated(SIZE, 8192)
    assert long.seconds - budget.FIXED_SECONDS > 81.92 * (short.seconds - budget.FIXED_SECONDS)
    assert estimated(SIZE, 100, rate=1e9).seconds > estimated(SIZE, 100, rate=1e10).seconds


def test_what_does_not_fit_is_refused_with_numbers_and_the_longest_prompt_that_fits():
    small = estimated(SIZE, 8192, FULL, available=500 << 20)
    assert not small.fits
    with pytest.raises(BudgetError, match=r"fits into 472 MB of.*got 8,192 tokens, which need about [\d.]+ [GM]B \(") as caught:
        small.check()
    assert f"at most {small.longest:,} tokens" in str(caught.value)
    assert estimated(SIZE, small.longest, FULL, available=500 << 20).fits
    assert not estimated(SIZE, small.longest + 1, FULL, available=500 << 20).fits
    hopeless = estimated(SIZE, 10, FULL, available=1 << 20)
    with pytest.raises(BudgetError, match="Free memory"):
        hopeless.check()
    assert estimated(SIZE, 10, available=1 << 50).longest == SIZE.context
    Estimate(10, 1.0, {"all": 1 << 60}).check()


def test_a_capture_that_cannot_fit_runs_nothing(monkeypatch):
    pair = pair_of("llama")
    tokens = tokens_of(prompt(5))
    calls = []
    pair.base.model.register_forward_pre_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(room, "free_memory", lambda: 1 << 20)
    with pytest.raises(BudgetError, match="free memory"):
        dexviz.capture(pair.base, tokens)
    assert calls == []
    assert not dexviz.estimate(pair.base, tokens).fits
    with pytest.raises(PromptError, match="at least one token"):
        dexviz.estimate(pair.base, 0)


def test_free_memory_heeds_a_container(monkeypatch, tmp_path):
    machine = free_memory()
    assert machine > 1 << 28
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    assert free_memory() == pytest.approx(machine, rel=0.2)
    stat = "anon 1\ninactive_file 50\n"
    for name, text in (("memory.max", "1000\n"), ("memory.current", "300\n"), ("memory.stat", stat)):
        (tmp_path / name).write_text(text)
    assert free_memory() == 750
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    old = (("limit_in_bytes", "900"), ("usage_in_bytes", "1000"), ("stat", "total_inactive_file 150\n"))
    for name, text in old:
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    assert free_memory() == 50


@pytest.mark.parametrize("text", ["-1", "1.5", "4 GB"])
def test_a_keep_budget_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv(budget.KEEP_VARIABLE, text)
    with pytest.raises(DexvizError, match="whole number of bytes"):
        keep_bytes()
    monkeypatch.setenv(budget.KEEP_VARIABLE, "0")
    assert keep_bytes() == 0


def test_the_app_counts_both_views(monkeypatch):
    layers = SIZE.layers
    info = PairInfo(
        PairSpec("m"),
        "m",
        "m",
        layers,
        9,
        3,
        64,
        8192,
        135_000_000,
        "float32",
        "cpu",
        (0.0,) * layers,
        ((),) * layers,
        {},
        SIZE,
    )
    short, long = cost(info, 100), cost(info, 8192)
    assert short.seconds < long.seconds / 40
    assert long.memory >= 2 * 30 * 8192 * (9 + 3 + 3) * 64 * 4
    assert short.refusal is None
    assert str(short).startswith("about ") or str(short).startswith("less than")
    assert str(cost(info, 5, rate=1e12)).startswith("less than 1 s")
    monkeypatch.setattr("app.estimate.free_memory", lambda: 1 << 20)
    assert "free memory" in cost(info, 100).refusal


def test_dry_run_tells_the_cost_and_runs_nothing(tmp_path):
    out = tmp_path / "never.dexviz"
    done = run_process("capture", "--prompt", "the cat the dog", "--pool", "64", "--dry-run", "--json", "--out", str(out))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["tokens"], out.exists()) == (0, 4, False)
    assert answer["bytes"] == sum(answer["parts"].values())
    assert answer["longest"] == 8192
    assert answer["seconds"] > 0
    assert "stats" not in answer


MEASURE = """
import json, sys, torch, dexviz, numpy as np
from dexviz.peak_memory import extra, settle
from dexviz.records import Tokens
pair = dexviz.load_pair("smollm2-135m", adapter="default", device="cpu")
request = dexviz.CaptureRequest(pool=128, similarity=True)
def tokens(n):
    ids = np.arange(100, 100 + n)
    return Tokens(ids, ("x",) * n, "", np.zeros((n, 2), np.int64), np.zeros(n, bool))
dexviz.capture(pair.variant, tokens(16), request)
count = int(sys.argv[1])
before = settle()
dexviz.capture(pair.variant, tokens(count), request)
print(json.dumps([extra(before), dexviz.estimate(pair.variant, count, request).total]))
"""


@pytest.mark.parametrize("tokens", [128, 1024])
def test_the_estimate_is_near_the_measured_peak(tokens):
    """Never under the measured peak by more than a fifth, nor over it by more than twice."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tokens)], cwd=ROOT, capture_output=True, text=True, check=True)
    measured, expected = json.loads(done.stdout.splitlines()[-1])
    assert 0.8 * measured <= expected <= 2 * max(measured, 100 << 20), (measured, expected)


def record_of(layer: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(layer=layer, inputs=SimpleNamespace(nbytes=lambda: size))


@pytest.mark.parametrize(
    ("limit", "wanted", "stay"),
    [(35, 4, {3, 4, 5}), (30, 0, {0, 1, 2}), (10, 9, {9}), (0, 4, {4}), (1000, 4, set(range(10)))],
)
def test_the_wanted_layer_and_its_neighbours_stay_within_the_budget(limit, wanted, stay):
    kept = KeptPass(limit, wanted)
    for layer in range(10):
        kept.add(record_of(layer, 10))
    assert set(kept.layers) == stay
