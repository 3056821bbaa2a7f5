"""The targets of the capture engine, each beside what was measured and, where it is missed, what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.performance_page import Runs

MIDDLE, LONG = 2048, 8192
_NOT_MEASURED = "not measured"
_MERGED_TOLERANCE = 0.01
"""How far from 1.00 a ratio may lie and still be within the noise of the rounds."""
_PARTS = 3


@dataclass(frozen=True)
class Target:
    """One row: `value` against `bound`, the larger or the smaller the better; `value` is None where it is not measured."""

    what: str
    wanted: str
    value: float | None
    shown: str
    bound: float
    at_least: bool = False
    limit: str = ""
    """What limits it, told where it is missed."""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def targets_table(runs: Runs) -> str:
    """Markdown, every target a row."""
    lines = ["| what | target | measured | met | what limits it |", "|---|---|---|---|---|"]
    for row in targets(runs):
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        shown = _NOT_MEASURED if row.value is None else row.shown
        lines.append(f"| {row.what} | {row.wanted} | {shown} | {met} | {row.limit if row.met is False else ''} |")
    return "\n".join(lines)


def targets(runs: Runs) -> Iterator[Target]:
    """In the order of the design."""
    yield from _captures(runs)
    seconds = _at(runs.seconds, MIDDLE, "map")
    shown = f"{1000 * (seconds or 0):.0f} ms"
    yield Target(
        f"another head's full map after a capture, {MIDDLE:,} tokens",
        "≤ 200 ms",
        seconds,
        shown,
        0.2,
        limit="one head's QKᵀ, softmax and copies of N² entries",
    )
    yield from _dex(runs)
    yield from _gpu(runs)
    sizes = {count: step["map"] + step["grid"] for count, step in runs.browser.items()}
    worst = max(sizes, key=lambda count: sizes[count]) if sizes else 0
    size = sizes.get(worst)
    shown = f"{(size or 0) / 2**20:.2f} MiB at {worst:,} tokens, maps of both views and grid"
    yield Target(
        "bytes to the browser for one view",
        "≤ 1 MiB",
        size,
        shown,
        2**20,
        limit="the grid's figure, beside maps of up to 1 MiB",
    )


def _captures(runs: Runs) -> Iterator[Target]:
    for count, bound in ((MIDDLE, 1.25), (LONG, 1.6)):
        for view in ("base", "variant"):
            ratio = _at(runs.ratios, count, view)
            yield Target(
                f"capture of {'the base' if view == 'base' else 'the variant'}, {count:,} tokens, CPU",
                f"≤ {bound} × SDPA forward",
                ratio,
                f"{ratio or 0:.2f} ×",
                bound,
                limit=_slow(runs.profile),
            )
        if count == MIDDLE:
            yield from _against_dense(runs)
    extra = max((_at(runs.extra, LONG, view) or 0 for view in ("base", "variant")), default=0) or None
    shown = f"{(extra or 0) / 2**30:.2f} GiB"
    yield Target(
        f"extra memory of a capture, Q, K, V included, {LONG:,} tokens (larger of both views)",
        "≤ 2 GiB",
        extra,
        shown,
        2 * 2**30,
        limit=_held(runs, LONG),
    )


def _against_dense(runs: Runs) -> Iterator[Target]:
    """The capture of the base against `output_attentions=True` with numpy."""
    words = f"capture of the base against output_attentions=True with numpy, {MIDDLE:,} tokens"
    faster = _quotient(_at(runs.seconds, MIDDLE, "dense"), _at(runs.seconds, MIDDLE, "base"))
    less = _quotient(_at(runs.extra, MIDDLE, "dense"), _at(runs.extra, MIDDLE, "base"))
    yield Target(f"{words}: time", "≥ 5 × faster", faster, f"{faster or 0:.1f} ×", 5, True, _slow(runs.profile))
    yield Target(f"{words}: extra memory", "≥ 10 × less", less, f"{less or 0:.1f} ×", 10, True, _held(runs, MIDDLE))


def _dex(runs: Runs) -> Iterator[Target]:
    step = runs.dex or {}
    unmerged, merged = (None if step.get(name) is None else step[name]["ratio"] for name in ("variant", "merged"))
    share = f"O W_D adds {step.get('operations_share', 0):.1%} to the multiplications, and a layer reads and writes O once more"
    yield Target("DEX switched on, unmerged", "≤ 1.03 × base forward", unmerged, f"{unmerged or 0:.3f} ×", 1.03, limit=share)
    same = "it does the base's operations with other weights; what is left is exchanging them for the call, and noise"
    yield Target("DEX merged", "1.00 ×", merged, f"{merged or 0:.3f} ×", 1 + _MERGED_TOLERANCE, limit=same)


def _gpu(runs: Runs) -> Iterator[Target]:
    """`gpu.json` may bring its own measured values: `targets` with `capture_ratio` and `floor_ratio`."""
    found = (runs.gpu or {}).get("targets", {})
    ratio, floor = found.get("capture_ratio"), found.get("floor_ratio")
    limit = found.get("limit", "")
    yield Target("capture, GPU, 32,768 tokens", "≤ 1.3 × SDPA forward", ratio, f"{ratio or 0:.2f} ×", 1.3, limit=limit)
    yield Target("Triton kernels, GPU", "≤ 1.5 × of the floor", floor, f"{floor or 0:.2f} ×", 1.5, limit=limit)


def _at(values: Mapping[int, Mapping[str, Any]], count: int, name: str) -> Any:
    return values.get(count, {}).get(name)


def _quotient(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _slow(profile: Mapping[str, Any] | None) -> str:
    """The largest parts of a capture's time."""
    if profile is None:
        return "no profile was made"
    whole = sum(row["seconds"] for row in profile["rows"])
    largest = sorted(profile["rows"], key=lambda row: -row["seconds"])[:_PARTS]
    return "; ".join(f"{row['part']} {row['seconds'] / whole:.0%}" for row in largest) + " of the time"


def _held(runs: Runs, count: int) -> str:
    """What the memory of a capture of `count` tokens is made of."""
    if runs.sizes is None:
        return "the sizes of its parts were not measured"
    qkv, statistics = (runs.sizes[name] * count / 1e6 for name in ("qkv", "statistics"))
    forward = _at(runs.extra, count, "seam")
    own = "" if forward is None else f"; the forward pass itself takes {forward / 1e6:,.0f} MB"
    tiles = runs.sizes["tiles"] / 1e6
    return f"kept: Q, K and V {qkv:,.0f} MB, statistics {statistics:,.0f} MB, tiles {tiles:,.0f} MB{own}"
