"""Noise on a prompt and over a battery as readable tables: averages first, then the heads that stand out.

Heads are ranked by signal, or its change, as shares: SNR has no bound where a head has hardly any mass beside the needle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dexviz.records import head_name
from dexviz.text_table import ABSENT, comparison, row

if TYPE_CHECKING:
    from dexviz.noise_records import BatteryReport, BatteryRow, HeadIntervals, HeadNoise, NoiseOnPrompt, NoiseTerm

_WIDTH = 14
_SHARES = ("signal", "noise", "sink", "negative")
"""Given in percent of a row's mass; signal and noise for each token."""
_LABELS = {
    "signal": "signal, % a token",
    "noise": "noise, % a token",
    "snr": "SNR",
    "sink": "sink, %",
    "negative": "negative, %",
}
_HEADINGS = ("signal, %", "noise, %", "SNR", "sink, %", "negative, %", "net")


def prompt_table(found: NoiseOnPrompt, heads: int) -> str:
    """Averages, then `heads` heads, by change of signal where both views have the same heads, by signal elsewhere."""
    read = found.base_read
    spans = ", ".join(f"[{start}, {stop})" for start, stop in read.needle)
    lines = [
        f"{len(read.tokens)} tokens, needle at {spans}, query rows {', '.join(map(str, read.rows))}; {found.score} scores.",
        _cells("", *_HEADINGS),
    ]
    views = [("base", found.base), *([("variant", found.variant)] if found.variant is not None else [])]
    for name, noise in views:
        lines.append(_cells(f"{name}, mean over heads", *_measures(noise.over_heads())))
    if found.answer_log_probability is not None:
        log = ", ".join(f"{name} {nats:.3f}" for name, nats in found.answer_log_probability.items())
        lines.append(f"Log-probability of {found.answer!r}, nats: {log}.")
    if found.variant is not None and found.same_heads:
        lines += ["", *_changed(found.base, found.variant, heads)]
    else:
        for name, noise in views:
            lines += ["", *_strongest(f"{name}, highest signal", noise, heads)]
    return _joined(lines)


def terms_table(terms: Sequence[NoiseTerm]) -> str:
    """Noise terms of heads, one a line."""
    lines = [_cells("noise term N = A − S", "|N| / |A|", "rank of N", "rank of A", "corr salient", "corr rest", "rows")]
    for term in terms:
        known = (term.rank, term.attention_rank, term.correlation_salient, term.correlation_rest)
        rank, whole, salient, rest = (ABSENT if value is None else f"{value:.3f}" for value in known)
        lines.append(
            _cells(f"  {head_name(term.layer, term.head)}", f"{term.energy:.3f}", rank, whole, salient, rest, str(term.rows))
        )
    return "\n".join(lines)


def battery_table(report: BatteryReport, heads: int) -> str:
    """All prompts, then by length and by depth, then the heads whose signal changed most, or is highest in the base."""
    asked, overall = report.request, report.overall
    level = f"{100 * overall.measures['snr'].base.level:g} % intervals over prompts"
    lines = [
        f"{overall.prompts} needle prompts of {report.language}, seed {asked.seed}; {asked.score} scores; {level}.",
        row("mean over heads", "base", "variant", "change"),
        *(comparison(f"  {_LABELS[name]}", overall.measures[name], 3, scale=_scale(name)) for name in _LABELS),
        comparison("  answer, nats", overall.measures["answer"], 3),
        comparison("  accuracy, %", overall.measures["accuracy"], 1, scale=100),
    ]
    for title, rows in (("SNR by length", report.by_length()), ("SNR by depth", report.by_depth())):
        lines += [
            row(title, "base", "variant", "change"),
            *(comparison(_which(each), each.measures["snr"], 3) for each in rows),
        ]
    signal = report.heads["signal"]
    found = _ranked(signal.base.mean if signal.change is None else np.abs(signal.change.mean), heads)
    if found:
        lines += ["", row("signal of heads, %", "base", "variant", "change")]
    for layer, head in found:
        ends = (signal.base, signal.variant if signal.change is not None else None, signal.change)
        lines.append(
            row(f"  {head_name(layer, head)}", *(_of_head(end, layer, head, signed=end is signal.change) for end in ends))
        )
    return _joined(lines)


def _changed(base: HeadNoise, variant: HeadNoise, heads: int) -> list[str]:
    """Heads by the size of their change of signal."""
    change = variant.snr - base.snr
    found = _ranked(np.abs(variant.signal - base.signal), heads)
    lines = [_cells("heads of largest change", "SNR, base", "variant", "change", "signal, %", "change", "noise, %", "change")]
    for at in found:
        signal, noise = (100 * getattr(base, name)[at] for name in ("signal", "noise"))
        moved = [100 * (getattr(variant, name) - getattr(base, name))[at] for name in ("signal", "noise")]
        values = [f"{base.snr[at]:.3f}", f"{variant.snr[at]:.3f}", f"{change[at]:+.3f}"]
        values += [f"{signal:.3f}", f"{moved[0]:+.3f}", f"{noise:.3f}", f"{moved[1]:+.3f}"]
        lines.append(_cells(f"  {head_name(*at)}", *values))
    return lines if found else []


def _strongest(title: str, noise: HeadNoise, heads: int) -> list[str]:
    found = _ranked(noise.signal, heads)
    lines = [_cells(title, *_HEADINGS)]
    for at in found:
        measures = {name: float(getattr(noise, name)[at]) for name in (*_LABELS, "net")}
        lines.append(_cells(f"  {head_name(*at)}", *_measures(measures)))
    return lines if found else []


def _of_head(found: HeadIntervals | None, layer: int, head: int, *, signed: bool) -> str:
    """A head's share in percent with its interval, where there is one."""
    if found is None:
        return ABSENT
    mean, low, high = (100 * float(part[layer, head]) for part in (found.mean, found.low, found.high))
    form = "+.3f" if signed else ".3f"
    return f"{mean:{form}}" if np.isnan(low) else f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def _ranked(values: np.ndarray, count: int) -> list[tuple[int, int]]:
    """(layer, head) of the largest values, NaN left out."""
    flat = np.where(np.isfinite(values), values, -np.inf).ravel()
    order = [int(i) for i in np.argsort(-flat, kind="stable")[:count] if np.isfinite(flat[i])]
    return [(i // values.shape[1], i % values.shape[1]) for i in order]


def _measures(values: dict[str, float]) -> list[str]:
    return [ABSENT if np.isnan(values[name]) else f"{_scale(name) * values[name]:.3f}" for name in (*_LABELS, "net")]


def _scale(name: str) -> float:
    return 100.0 if name in _SHARES else 1.0


def _which(each: BatteryRow) -> str:
    return f"  {each.length:,} tokens" if each.length is not None else f"  depth {each.depth:g}"


def _cells(label: str, *cells: str) -> str:
    return row(label, *(f"{cell:>{_WIDTH - 1}} " for cell in cells), width=_WIDTH)


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)
