"""docs/performance.md from kept runs: numbers stand in their cells, what is missing is named, a stopped run goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser_bytes import browser_bytes
from benchmarks.performance import ROOT, Run, code_digest
from benchmarks.performance_page import NAMES, page, read_runs
from benchmarks.performance_plot import plot
from dexviz.bench_cases import TITLES
from dexviz.models import load_model, load_pair
from tests.adapters import random_adapter, tiny_model

GIB = 1 << 30
TIMES = {
    2048: {"sdpa": 2.0, "seam": 2.02, "base": 2.4, "variant": 2.6, "map": 0.05, "dense": 14.0},
    8192: {"sdpa": 40.0, "seam": 41.0, "base": 60.0, "variant": 68.0, "map": 0.9},
}
EXTRA = {
    2048: {"sdpa": 90e6, "seam": 80e6, "base": 300e6, "variant": 310e6, "map": 40e6, "dense": 4.5e9},
    8192: {"sdpa": 400e6, "seam": 380e6, "base": 1.5 * GIB, "variant": 1.75 * GIB, "map": 600e6},
}
TOO_LARGE = "The maps alone take 72.5 GB of the 25.3 GB of this machine."


def keep(folder: Path, name: str, result: Any, code: str = "abc") -> None:
    (folder / f"{name}.json").write_text(json.dumps({"code": code, "result": result}), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs of two lengths; the dense cases are left out of the longer one."""
    for count, seconds in TIMES.items():
        timings = {
            name: {"median": value, "fastest": 0.9 * value, "ratio": value / seconds["sdpa"]} for name, value in seconds.items()
        }
        left_out = {} if "dense" in seconds else {"dense": TOO_LARGE}
        keep(tmp_path, f"time-{count}", {"rounds": 3, "timings": timings, "left_out": left_out})
        for name, extra in EXTRA[count].items():
            keep(tmp_path, f"memory-{count}-{name}", {"extra_bytes": int(extra), "held_bytes": 1, "seconds": 1.0})
    versions = {"transformer-lens": "4.3.0"}
    peer = {"timing": {"median": 15.0, "fastest": 14.0, "ratio": 7.5}, "versions": versions}
    keep(tmp_path, "peer-time-2048", peer)
    keep(tmp_path, "peer-memory-2048", {"peak": {"extra_bytes": int(4.8e9)}, "versions": versions})
    for step in ("time", "memory"):
        keep(tmp_path, f"peer-{step}-8192", {"left_out": TOO_LARGE})
    timing = {"median": 1.0, "fastest": 0.9}
    ratios = {"base": 1.0, "variant": 1.021, "merged": 0.998}
    speeds = {name: {**timing, "ratio": ratio} for name, ratio in ratios.items()}
    keep(tmp_path, "dex", {"tokens": 2048, "rounds": 15, **speeds, "operations_share": 0.0045})
    keep(tmp_path, "browser-680", {"map": 1_000_000, "grid": 100_000, "exact": True})
    keep(tmp_path, "sizes", {"qkv": 115_200, "statistics": 8_640, "tiles": 35_000_000})
    machine = {"date": "2026-12-01T05:00:00+00:00", "cpu": "Some CPU", "cores": 2, "threads": 2, "memory_bytes": 24 * GIB}
    keep(tmp_path, "machine", {**machine, "model": "smollm2-135m", "dtype": "float32", "versions": {"torch": "2.13.0"}})
    return tmp_path


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """First cell → the other cells, of the table rows after a heading or line."""
    part = text.partition(heading)[2]
    found = re.findall(r"^\|(.+)\|$", part.partition("\n\n")[2].partition("\n\n")[0], re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in found]
    return {first: rest for first, *rest in cells}


def test_numbers_land_in_their_cells(folder: Path) -> None:
    text = page(read_runs(folder))
    time = rows(text, "Seconds, and the ratio")
    assert time[""] == ["2,048", "8,192"]
    assert time[NAMES["base"]] == ["2.400 (1.20 ×)", "60.0 (1.50 ×)"]
    assert time[NAMES["map"]] == ["0.0500 (0.0250 ×)", "0.900 (0.0225 ×)"]
    assert time[NAMES["peer"]] == ["15.0 (7.50 ×)", "left out"]
    memory = rows(text, "Peak extra memory, MB:")
    assert memory[NAMES["dense"]] == ["4,500", "left out"]
    assert memory[NAMES["sdpa"]] == ["90", "400"]
    assert f"- {NAMES['dense']}, 8,192 tokens: {TOO_LARGE}" in text
    assert f"- {NAMES['peer']}, 8,192 tokens: {TOO_LARGE}" in text
    assert rows(text, "paired rounds:")["DEX, unmerged"] == ["1.000", "0.900", "1.021"]
    assert "| 680 | 1,000,000 | exact | 100,000 | 1,100,000 |" in text
    assert "Measured on 2026-12-01: Some CPU, 2 cores" in text
    assert "torch 2.13.0, transformer-lens 4.3.0" in text
    assert "near 1 on a quiet machine: 2,048 tokens: 0.90, 8,192 tokens: 0.90." in text
    assert "other code" not in text


def test_every_target_is_a_row_with_its_verdict(folder: Path) -> None:
    found = rows(page(read_runs(folder)), "## Targets")
    shown = {what: cells for what, cells in found.items() if what not in ("what", "---")}
    assert len(shown) == 13
    assert shown["capture of the base, 2,048 tokens, CPU"][1:3] == ["1.20 ×", "yes"]
    assert shown["capture of the variant, 2,048 tokens, CPU"][1:3] == ["1.30 ×", "**no**"]
    assert shown["capture of the base, 8,192 tokens, CPU"][1:3] == ["1.50 ×", "yes"]
    assert shown["capture of the variant, 8,192 tokens, CPU"] == [
        "≤ 1.6 × SDPA forward",
        "1.70 ×",
        "**no**",
        "no profile was made",
    ]
    dense = "capture of the base against output_attentions=True with numpy, 2,048 tokens"
    assert shown[f"{dense}: time"][:3] == ["≥ 5 × faster", "5.8 ×", "yes"]
    assert shown[f"{dense}: extra memory"][:3] == ["≥ 10 × less", "15.0 ×", "yes"]
    assert shown["extra memory of a capture, Q, K, V included, 8,192 tokens (larger of both views)"][:3] == [
        "≤ 2 GiB",
        "1.75 GiB",
        "yes",
    ]
    assert shown["another head's full map after a capture, 2,048 tokens"][1:3] == ["50 ms", "yes"]
    assert shown["DEX switched on, unmerged"][1:3] == ["1.021 ×", "yes"]
    assert shown["DEX merged"][1:3] == ["0.998 ×", "yes"]
    assert shown["capture, GPU, 32,768 tokens"][1:3] == ["not measured", ""]
    assert shown["bytes to the browser for one view"][1:3] == ["1.05 MiB at 680 tokens, maps of both views and grid", "**no**"]


def test_a_missed_target_says_what_limits_it(folder: Path) -> None:
    parts = {"QKᵀ": 0.9, "AV": 0.6, "statistics": 0.3, "tiles": 0.2}
    profile = {"tokens": 2048, "rows": [{"part": name, "seconds": seconds} for name, seconds in parts.items()], "note": "Why."}
    (folder / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    keep(folder, "memory-2048-base", {"extra_bytes": int(900e6), "held_bytes": 1, "seconds": 1.0})
    text = page(read_runs(folder))
    found = rows(text, "## Targets")
    assert found["capture of the variant, 2,048 tokens, CPU"][3] == "QKᵀ 45%; AV 30%; statistics 15% of the time"
    memory = found["capture of the base against output_attentions=True with numpy, 2,048 tokens: extra memory"]
    kept = "kept: Q, K and V 236 MB, statistics 18 MB, tiles 35 MB; the forward pass itself takes 80 MB"
    assert memory[1:] == ["5.0 ×", "**no**", kept]
    assert "| AV | 0.600 | 30% |  |" in text
    assert "Why." in text


def test_a_gpus_rows_are_shown(folder: Path) -> None:
    assert "has not run on a GPU" in page(read_runs(folder))
    gpu = {
        "device": "Some GPU",
        "rows": [{"tokens": 32768, "floor_ratio": 1.23456, "holds": True, "note": None}],
        "targets": {"capture_ratio": 1.21, "floor_ratio": 1.8, "limit": "registers"},
    }
    (folder / "gpu.json").write_text(json.dumps(gpu), encoding="utf-8")
    text = page(read_runs(folder))
    assert "Some GPU" in text
    assert "| tokens | floor ratio | holds | note |" in text
    assert "| 32,768 | 1.235 | True |  |" in text
    found = rows(text, "## Targets")
    assert found["capture, GPU, 32,768 tokens"][1:3] == ["1.21 ×", "yes"]
    assert found["Triton kernels, GPU"][1:] == ["1.80 ×", "**no**", "registers"]


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "peer-memory-2048.json").unlink()
    keep(folder, "memory-2048-map", {"extra_bytes": 1, "held_bytes": 1, "seconds": 1.0}, code="def")
    text = page(read_runs(folder))
    assert rows(text, "Peak extra memory, MB:")[NAMES["peer"]] == ["not measured", "left out"]
    assert "Engine code abc, def. **Some steps were measured with other code than the rest.**" in text
    (tmp_path / "empty").mkdir()
    empty = page(read_runs(tmp_path / "empty"))
    assert "Nothing is measured yet." in empty
    assert rows(empty, "## Targets")["capture of the base, 2,048 tokens, CPU"][1] == "not measured"


def test_the_plot_has_a_line_a_case_on_logarithmic_axes(folder: Path) -> None:
    runs = read_runs(folder)
    figure = plot(runs.seconds, runs.extra, NAMES)
    assert len(figure.data) == 2 * len(NAMES)
    lines = {(trace.name, trace.xaxis): (list(trace.x), list(trace.y)) for trace in figure.data}
    assert lines[NAMES["base"], "x"] == ([2048, 8192], [2.4, 60.0])
    assert lines[NAMES["dense"], "x2"] == ([2048], [4500.0])
    assert {figure.layout[axis].type for axis in ("xaxis", "xaxis2", "yaxis", "yaxis2")} == {"log"}
    assert list(figure.layout.xaxis.ticktext) == ["2,048", "8,192"]


def test_a_stopped_run_goes_on_and_other_code_is_measured_again(tmp_path: Path) -> None:
    run, made = Run(tmp_path, "base", "dex"), []

    def step() -> dict[str, int]:
        made.append(1)
        return {"value": len(made)}

    assert run.kept("a", step) == run.kept("a", step) == {"value": 1}
    assert Run(tmp_path, "base", "dex").kept("a", step) == {"value": 1}
    run.code = "other"
    assert run.kept("a", step) == {"value": 2}
    assert run.kept("b", lambda: {"left_out": "no peer", "retry": True}) == {"left_out": "no peer", "retry": True}
    assert run.kept("b", lambda: {"value": 3}) == {"value": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_the_code_that_is_measured_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "dexviz" / "kernels").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "peer.py").write_text("", encoding="utf-8")
    empty = code_digest(tmp_path)
    (tmp_path / "dexviz" / "training.py").write_text("other = 1", encoding="utf-8")
    assert code_digest(tmp_path) == empty
    (tmp_path / "dexviz" / "kernels" / "rows.cpp").write_text("// one", encoding="utf-8")
    assert code_digest(tmp_path) != empty
    assert code_digest(ROOT) == code_digest(ROOT)


def test_a_length_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_adapter(load_model(str(tiny_model(tmp_path / "base", "llama"))), tmp_path / "dex")
    run = Run(tmp_path / "runs", str(tmp_path / "base"), str(tmp_path / "dex"))
    monkeypatch.setattr("dexviz.benchmark.peak_of", lambda *args: "too large")
    monkeypatch.setattr(run, "_peer", lambda ids, rounds: {"left_out": f"{len(ids)} ids, {rounds} rounds", "retry": True})
    run.length(32, 1)
    run.sizes()
    run.dex()
    runs = read_runs(run.folder)
    assert set(runs.seconds[32]) == set(TITLES)
    assert runs.left_out[32] == {**dict.fromkeys(TITLES, "too large"), "peer": "32 ids, 3 rounds"}
    assert runs.sizes is not None
    assert runs.sizes["qkv"] == 2 * (6 + 2 + 2) * 8 * 4
    assert runs.dex is not None
    assert 0 < runs.dex["operations_share"] < 1


@pytest.mark.parametrize(("tokens", "exact"), [(60, True), (300, False)])
def test_bytes_to_the_browser(tmp_path: Path, tokens: int, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.browser_bytes.pool_for", lambda count: None if exact else 64)
    random_adapter(load_model(str(tiny_model(tmp_path / "base", "llama"))), tmp_path / "dex")
    found = browser_bytes(load_pair(str(tmp_path / "base"), adapter=str(tmp_path / "dex")), tokens)
    side = tokens if exact else 64
    planes = 2 if exact else 4
    codes = planes * side * (side + 1) // 2 * 2
    assert found["exact"] is exact
    assert codes < found["map"] < codes + 20_000
    assert 1_000 < found["grid"] < 200_000
