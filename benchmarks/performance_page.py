"""docs/performance.md and its plot, from the files of `benchmarks.performance`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.performance_plot import plot
from benchmarks.performance_targets import targets_table
from dexviz.bench_cases import TITLES

PEER = "TransformerLens"
NAMES = {**TITLES, "peer": f"{PEER} cache, numpy"}
NOT_MEASURED = "not measured"
PLOT = "performance.svg"
Step = Mapping[str, Any]


@dataclass
class Runs:
    """What is there, by tokens and name of the case."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Medians over rounds."""
    ratios: dict[int, dict[str, float]] = field(default_factory=dict)
    """To the stock SDPA forward of the same rounds."""
    extra: dict[int, dict[str, int]] = field(default_factory=dict)
    """Peak extra memory, bytes."""
    quiet: dict[int, float] = field(default_factory=dict)
    """Fastest SDPA forward as a share of the median one."""
    rounds: dict[int, int] = field(default_factory=dict)
    left_out: dict[int, dict[str, str]] = field(default_factory=dict)
    """Why a case is missing."""
    dex: Step | None = None
    browser: dict[int, Step] = field(default_factory=dict)
    machine: Step | None = None
    sizes: Step | None = None
    """Bytes that a capture of the base holds: `qkv` and `statistics` a token, `tiles`."""
    peer_versions: Step = field(default_factory=dict)
    profile: Step | None = None
    gpu: Step | None = None
    codes: set[str] = field(default_factory=set)
    """Digests of the code that was measured; more than one where some steps are older."""


def read_runs(folder: Path) -> Runs:
    """Everything that `benchmarks.performance` has kept, and what the GPU script and the profile left there."""
    runs = Runs()
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if path.stem in ("profile", "gpu"):
            setattr(runs, path.stem, data)
            continue
        runs.codes.add(data["code"])
        kind, *rest = path.stem.replace("peer-", "peer").split("-")
        _take(runs, kind, rest, data["result"])
    return runs


def _take(runs: Runs, kind: str, rest: list[str], result: Step) -> None:
    if kind in ("dex", "machine", "sizes"):
        setattr(runs, kind, result)
        return
    count = int(rest[0])
    if kind == "browser":
        runs.browser[count] = result
    elif kind == "time":
        runs.rounds[count] = result["rounds"]
        runs.left_out.setdefault(count, {}).update(result["left_out"])
        if "sdpa" in result["timings"]:
            runs.quiet[count] = result["timings"]["sdpa"]["fastest"] / result["timings"]["sdpa"]["median"]
        for name, timing in result["timings"].items():
            _take_timing(runs, count, name, timing)
    elif "left_out" in result:
        runs.left_out.setdefault(count, {})[rest[1] if kind == "memory" else "peer"] = result["left_out"]
    elif kind == "memory":
        runs.extra.setdefault(count, {})[rest[1]] = result["extra_bytes"]
    elif kind == "peertime":
        runs.peer_versions = result["versions"]
        _take_timing(runs, count, "peer", result["timing"])
    elif kind == "peermemory":
        runs.extra.setdefault(count, {})["peer"] = result["peak"]["extra_bytes"]


def _take_timing(runs: Runs, count: int, name: str, timing: Step) -> None:
    runs.seconds.setdefault(count, {})[name] = timing["median"]
    runs.ratios.setdefault(count, {})[name] = timing["ratio"]


def write_page(folder: Path, docs: Path) -> None:
    """Write performance.md and performance.svg into `docs` from the files in `folder`."""
    runs = read_runs(folder)
    (docs / "performance.md").write_text(page(runs), encoding="utf-8")
    plot(runs.seconds, runs.extra, NAMES).write_image(docs / PLOT, format="svg")


def page(runs: Runs) -> str:
    """The page's text."""
    return f"""# Performance

Written by `make bench` (`python -m benchmarks.performance`) from its runs.

{_facts(runs)}

{_lengths(runs)}

## Targets

{targets_table(runs)}

## Time and memory against the number of tokens

![Time and peak extra memory against tokens, both axes logarithmic]({PLOT})

Seconds, and the ratio to the stock SDPA forward of the same rounds:

{_table(runs, runs.seconds, _time_cell)}

Peak extra memory, MB:

{_table(runs, runs.extra, lambda runs, count, name: f"{runs.extra[count][name] / 1e6:,.0f}")}

{_left_out(runs)}

## How it was measured

{_METHOD}

## DEX

{_dex(runs.dex)}

## Bytes to the browser

{_browser(runs.browser)}

## Where the time goes

{_profile(runs.profile)}

## GPU

{_gpu(runs.gpu)}
"""


_METHOD = f"""- **Time**: every round runs each case once, in an order drawn anew; a cell is the median, a ratio the median over
  rounds of the ratio in one round. Cases that hold all maps take part in three rounds at most. {PEER} is timed in its own
  environment against a stock SDPA forward there, in turns.
- **Memory**: each case once in a process of its own; the largest resident set of the call, above what the process held after
  loading and a warm-up on 16 tokens. Weights do not count; the results, and what the call keeps, do.
- Forward passes make the logits of the last position alone. “Stock” is the model as transformers builds it, on the same
  weights, never touched by dexviz. A *capture* is `dexviz.capture` with `pool=128, similarity=True`: statistics of every row,
  tiles, the Gram matrix behind the cosine, and CKA, of all layers and heads, with Q, K and V kept. *Another head's full map* is
  made from these.
- The dense cases compute the same numbers from all attention maps with `dexviz/dense_statistics.py` (numpy, float32, layer by
  layer, maps dropped after use); a test holds them against a capture.
- Prompt: the start of the State of the Union address of 2026."""


def _facts(runs: Runs) -> str:
    facts = runs.machine
    if facts is None:
        return "Nothing is measured yet."
    versions = ", ".join(f"{name} {number}" for name, number in {**facts["versions"], **runs.peer_versions}.items())
    code = ", ".join(sorted(runs.codes))
    mixed = " **Some steps were measured with other code than the rest.**" if len(runs.codes) > 1 else ""
    return (
        f"Measured on {facts['date'][:10]}: {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, "
        f"{facts['memory_bytes'] / 2**30:.1f} GiB; {facts['model']}, {facts['dtype']}.\n"
        f"Versions: {versions}.\nEngine code {code}.{mixed}"
    )


def _lengths(runs: Runs) -> str:
    rounds = ", ".join(f"{count:,} tokens: {number}" for count, number in sorted(runs.rounds.items()))
    quiet = ", ".join(f"{count:,} tokens: {share:.2f}" for count, share in sorted(runs.quiet.items()))
    return (
        f"Rounds of timing: {rounds or NOT_MEASURED}.\n"
        f"The fastest SDPA forward over the median one, near 1 on a quiet machine: {quiet or NOT_MEASURED}."
    )


def _table(runs: Runs, values: Mapping[int, Mapping[str, Any]], cell: Any) -> str:
    """Cases by tokens; what is missing is named as such."""
    counts = sorted(values)
    if not counts:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = [f"| | {' | '.join(f'{count:,}' for count in counts)} |", "|---" * (len(counts) + 1) + "|"]
    for name, title in NAMES.items():
        cells = [cell(runs, count, name) if name in values[count] else _missing(runs, count, name) for count in counts]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _missing(runs: Runs, count: int, name: str) -> str:
    return "left out" if name in runs.left_out.get(count, {}) else NOT_MEASURED


def _time_cell(runs: Runs, count: int, name: str) -> str:
    seconds = runs.seconds[count][name]
    shown = f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"
    ratio = runs.ratios[count][name]
    return f"{shown} ({ratio:.2f} ×)" if ratio >= 0.1 else f"{shown} ({ratio:.4f} ×)"


def _left_out(runs: Runs) -> str:
    lines = [
        f"- {NAMES[name]}, {count:,} tokens: {reason}"
        for count, reasons in sorted(runs.left_out.items())
        for name, reason in reasons.items()
    ]
    return "Left out:\n\n" + "\n".join(lines) if lines else "Nothing was left out."


def _dex(dex: Step | None) -> str:
    if dex is None:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = [f"Forward passes over {dex['tokens']:,} tokens with all logits, {dex['rounds']} paired rounds:", ""]
    lines += ["| | seconds | fastest | ratio to the base |", "|---|---|---|---|"]
    for name in ("base", "variant", "merged"):
        timing = dex[name]
        cells = [NOT_MEASURED] * 3 if timing is None else [f"{timing[k]:.3f}" for k in ("median", "fastest", "ratio")]
        title = {"base": "base", "variant": "DEX, unmerged", "merged": "DEX, merged"}[name]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _browser(browser: Mapping[int, Step]) -> str:
    if not browser:
        return f"{NOT_MEASURED.capitalize()} yet."
    lines = ["One head's maps of base and variant together, and the grid of all heads, before compression:", ""]
    lines += ["| tokens | maps | | grid | together |", "|---|---|---|---|---|"]
    for count, found in sorted(browser.items()):
        kind = "exact" if found["exact"] else "tiles"
        lines.append(f"| {count:,} | {found['map']:,} | {kind} | {found['grid']:,} | {found['map'] + found['grid']:,} |")
    return "\n".join(lines)


def _profile(profile: Step | None) -> str:
    """`profile.json`: tokens, rows of part, seconds and, where known, floor_seconds; a note."""
    if profile is None:
        return f"{NOT_MEASURED.capitalize()} yet."
    whole = sum(row["seconds"] for row in profile["rows"])
    lines = [f"A capture of {profile['tokens']:,} tokens, summed over the layers, {whole:.3f} s:", ""]
    lines += ["| part | seconds | share | floor, seconds |", "|---|---|---|---|"]
    for row in profile["rows"]:
        floor = f"{row['floor_seconds']:.3f}" if row.get("floor_seconds") is not None else ""
        lines.append(f"| {row['part']} | {row['seconds']:.3f} | {row['seconds'] / whole:.0%} | {floor} |")
    return "\n".join([*lines, *(["", profile["note"]] if profile.get("note") else [])])


def _gpu(gpu: Step | None) -> str:
    """`gpu.json`: rows of equal keys; `device` and `note` beside them."""
    if gpu is None or not gpu.get("rows"):
        return "Not measured yet: `python -m benchmarks.gpu` has not run on a GPU."
    keys = list(gpu["rows"][0])
    lines = [gpu.get("device", ""), "", f"| {' | '.join(key.replace('_', ' ') for key in keys)} |", "|---" * len(keys) + "|"]
    lines += [f"| {' | '.join(_plain(row.get(key)) for key in keys)} |" for row in gpu["rows"]]
    return "\n".join([*lines, *(["", gpu["note"]] if gpu.get("note") else [])]).strip()


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
