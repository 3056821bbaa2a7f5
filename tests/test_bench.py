"""`dexviz bench`: cases compute what they say, times are paired, memory is what a call adds, what is left out says why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dexviz import bench_cases, benchmark, peak_memory
from dexviz.bench_cases import TITLES, Cases, reading, stock_model
from dexviz.benchmark import Bench, BenchConfig, Peak, bench, peak_of, time_cases
from dexviz.errors import EvaluationError, PromptError
from dexviz.models import ModelPair, load_model, load_pair, make_pair, wrap_model
from dexviz.speed import in_turns
from tests.adapters import random_adapter, tiny_model
from tests.cli_runs import ROOT, check_refused, runner
from tests.families import build

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with grouped queries, and an adapter for it."""
    root = tmp_path_factory.mktemp("bench")
    random_adapter(load_model(str(tiny_model(root / "base", "llama"))), root / "dex")
    return root


def random_pair(root: Path) -> ModelPair:
    """The pair without its tokenizer, so that prompts are random ids."""
    return make_pair(load_model(str(root / "base"), tokenizer=False), adapter=str(root / "dex"))


@pytest.mark.parametrize("tokens", [2, 63, 100, 257])
def test_dense_maps_give_the_captures_numbers(root: Path, tokens: int) -> None:
    cases = Cases(random_pair(root), reading(random_pair(root), tokens))
    with torch.inference_mode():
        capture, layers = cases.call("base")(), cases.call("dense")()
    dense = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    ours = {**capture.stats, **capture.similarity, "pooled": capture.pooled, "extreme": capture.pooled_extreme}
    assert set(ours) <= set(dense)
    entry = 1 / np.arange(1, tokens + 1)
    for name, values in ours.items():
        np.testing.assert_array_equal(np.isnan(values), np.isnan(dense[name]), err_msg=name)
        if name == "sparsity":  # an entry beside the threshold may fall on either side of it
            assert (np.abs(values - dense[name]) <= 1.01 * entry).all()
            assert np.mean(values != dense[name]) < 0.02
        elif name == "argmax":
            assert np.mean(values != dense[name]) < 0.02
        else:
            np.testing.assert_allclose(dense[name], values, atol=2e-5, rtol=2e-5, err_msg=name)


def test_a_stock_model_shares_the_weights_and_knows_nothing_of_us(root: Path) -> None:
    pair = random_pair(root)
    stock = stock_model(pair.base.model, "sdpa")
    own, other = dict(pair.base.model.named_parameters()), dict(stock.named_parameters())
    assert {name: p.data_ptr() for name, p in own.items()} == {name: p.data_ptr() for name, p in other.items()}
    assert stock.config._attn_implementation == "sdpa"
    assert pair.base.model.config._attn_implementation == "dexviz"
    assert not stock._forward_hooks
    assert not stock._forward_pre_hooks
    cases = Cases(pair, reading(pair, 40))
    with torch.inference_mode():
        plain, seam = cases.call("sdpa")(), cases.call("seam")()
    assert plain.shape == seam.shape == (1, 1, pair.base.model.config.vocab_size)
    torch.testing.assert_close(plain, seam)


def test_the_map_is_the_adapted_heads(root: Path) -> None:
    pair = random_pair(root)
    found = Cases(pair, reading(pair, 20)).call("map")()
    assert (found.layer, found.head, found.scores.shape) == (1, 0, (20, 20))
    assert found.gain is not None


def test_a_slow_call_takes_part_in_fewer_rounds_and_ratios_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = {"a": iter([9.0, 1.0, 2.0, 4.0]), "b": iter([9.0, 3.0, 4.0, 4.0]), "slow": iter([9.0, 5.0])}
    calls = {name: (lambda name=name: order.append(name)) for name in clock}

    def timed(call: Any, device: torch.device) -> float:
        call()
        return next(clock[order[-1]])

    monkeypatch.setattr("dexviz.speed._timed", timed)
    found = in_turns(calls, torch.device("cpu"), 3, warm_up=1, at_most={"slow": 1})
    assert order.count("slow") == 2
    assert (found["a"].ratio, found["a"].median) == (1.0, 2.0)
    assert found["b"].ratio == 2.0  # of 3, 2 and 1
    assert (found["slow"].median, found["slow"].ratio) == (5.0, 5.0)


def test_every_case_is_timed_and_what_is_missing_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BenchConfig((24,), rounds=2)
    timings, left_out = time_cases(random_pair(root), 24, config)
    assert list(timings) == list(TITLES)
    assert left_out == {}
    assert timings["sdpa"].ratio == 1.0
    assert all(0 < timing.fastest <= timing.median for timing in timings.values())
    monkeypatch.setattr(bench_cases, "_DENSE_SHARE", 1e-9)
    timings, left_out = time_cases(load_pair(str(root / "base")), 24, config)
    assert set(timings) == {"sdpa", "seam", "base", "map"}
    assert left_out["variant"] == "There is no variant."
    assert re.fullmatch(r"The maps alone take 0\.0 GB of the [\d.]+ GB of this machine\.", left_out["dense"])


def test_long_prompts_are_warmed_up_on_short_ones(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LONG", 64)
    monkeypatch.setattr(benchmark, "_SHORT", 8)
    read: list[int] = []
    monkeypatch.setattr(benchmark, "reading", lambda *args: read.append(args[1]) or reading(*args))
    timings, _ = time_cases(random_pair(root), 100, BenchConfig((100,), rounds=1))
    assert read == [100, 8]
    assert set(timings) == set(TITLES)


@pytest.mark.parametrize("family", ["gemma2", "diffllama"])
def test_families_without_a_comparison_say_so(family: str) -> None:
    pair = make_pair(wrap_model(build(family)))
    timings, left_out = time_cases(pair, 12, BenchConfig((12,), rounds=1))
    assert set(timings) | set(left_out) == set(TITLES)
    assert {"base", "seam"} <= set(timings)
    if family == "diffllama":
        assert "cannot be read before the output projection" in left_out["dense"]


def test_memory_is_what_the_work_adds_to_what_was_held_before() -> None:
    before_that = bytearray(200 * MEGABYTE)
    del before_that
    held = peak_memory.settle()
    passing = bytearray(64 * MEGABYTE)
    del passing
    assert 60 * MEGABYTE < peak_memory.extra(held) < 100 * MEGABYTE
    assert peak_memory.extra(held + 500 * MEGABYTE) == 0


def test_a_case_runs_in_a_process_of_its_own(root: Path) -> None:
    source = {"base": str(root / "base"), "adapter": str(root / "dex")}
    found = peak_of("dense", 400, source)
    assert isinstance(found, Peak), found
    maps = 2 * 6 * 400**2 * 4
    assert maps / 2 < found.extra_bytes < 20 * maps
    assert found.held_bytes > 50 * MEGABYTE
    assert found.seconds > 0


def test_a_process_that_fails_says_why(root: Path) -> None:
    assert "a folder, or a hub id" in str(peak_of("base", 8, {"base": str(root / "nothing")}))


def test_the_command_answers_with_the_documented_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--adapter", root / "dex", "--lengths", "8,16", "--rounds", "1")
    status, out, err = runner(capsys)("bench", *options, "--no-memory", "--json")
    assert status == 0, err
    answer = json.loads(out)
    documented = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("\n## bench\n")[2].partition("\n## ")[0]
    keys = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", documented.partition("| key |")[2], re.MULTILINE))
    assert set(answer) == set(keys)
    assert set(answer["machine"]) == set(re.findall(r"`(\w+)`", keys["machine"]))
    assert [length["tokens"] for length in answer["lengths"]] == [8, 16]
    for length in answer["lengths"]:
        assert set(length) <= set(re.findall(r"`(\w+)`", keys["lengths"]))
        assert set(length["timings"]) == set(TITLES)
        assert length["peaks"] == {}
        assert set(length["timings"]["base"]) == {"median", "fastest", "ratio"}
    assert answer["dex"]["merged"]["ratio"] > 0


def test_the_table_shows_every_case_and_its_memory(root: Path) -> None:
    pair = random_pair(root)
    length = benchmark.Length(8, 1, time_cases(pair, 8, BenchConfig((8,), 1))[0], {"base": Peak(1_500_000, 0, 0.1)}, {})
    shown = Bench((length,), None, benchmark.machine(pair)).table()
    assert all(title in shown for title in TITLES.values())
    assert re.search(r"capture of the base +[\d.]+ s +[\d.]+ × +1\.5 MB", shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "8,x"), "expected a whole number within"),
        (("--lengths", "8,"), "expected a whole number within"),
        (("--lengths", "1"), "Expected 2 to 512 tokens, got 1"),
        (("--lengths", "8,513"), "Expected 2 to 512 tokens, got 513"),
        (("--rounds", "0"), "at least one length and one round"),
    ],
)
def test_lengths_and_rounds_that_cannot_be(
    root: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str], message: str
) -> None:
    check_refused(*runner(capsys)("bench", "--model", root / "base", *options), message)


def test_the_library_refuses_the_same(root: Path) -> None:
    with pytest.raises(EvaluationError, match="at least one length"):
        BenchConfig(())
    with pytest.raises(PromptError, match="2 to 512 tokens"):
        bench(random_pair(root), BenchConfig((8, 600), rounds=1))
