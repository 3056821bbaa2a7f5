"""A ClaimsReport as a readable table: base | variant | change, intervals in brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dexviz.text_table import ABSENT, comparison, row

if TYPE_CHECKING:
    from dexviz.claims_records import ClaimsReport, ContradictionResult, Extremes, InContextRow, OutlierResult, OutlierRow

_HEADINGS = ("base", "variant", "change")
_NARROW = 18


def table(report: ClaimsReport) -> str:
    """Lines of text, at most about 110 characters wide; numbers that were not measured are dashes."""
    facts, asked = report.provenance, report.request
    variant = facts["variant"]["name"] if facts["variant"] else "none"
    lines = [
        f"Base {facts['base']['name']}, variant {variant}, {facts['dtype']} on {facts['device']}, seed {asked.seed}.",
        f"Intervals: {100 * asked.level:g} %, bootstrap.",
    ]
    if report.in_context is not None:
        lines += ["", *_in_context(report.in_context)]
    if report.contradiction is not None:
        lines += ["", *_contradiction(report.contradiction)]
    if report.outliers is not None:
        lines += ["", *_outliers(report.outliers)]
    lines += [f"\nNot looked into: {claim}. {reason}" for claim, reason in report.refused.items()]
    return "\n".join(line.rstrip() for line in lines)


def _in_context(rows: tuple[InContextRow, ...]) -> list[str]:
    names = {each.task: f"  {each.task or 'all tasks'} ({100 * each.chance:.0f})" for each in rows}
    orders = len(rows[0].base)
    return [
        f"In-context learning: {rows[0].items} test items after the same examples in {orders} orders.",
        "Spread: largest less smallest accuracy among the orders; deviation: standard deviation. Intervals over items.",
        row("accuracy, % (chance)", "base", "variant", "change, points"),
        *(comparison(names[each.task], each.accuracy, 1, scale=100) for each in rows),
        row("spread, points", *_HEADINGS),
        *(comparison(names[each.task], each.spread, 1, scale=100) for each in rows),
        row("deviation, points", *_HEADINGS),
        *(comparison(names[each.task], each.deviation, 1, scale=100) for each in rows),
    ]


def _contradiction(result: ContradictionResult) -> list[str]:
    names = [f"  {each.kind or 'all'} ({each.questions})" for each in result.rows]
    chance = f"{100 * result.rows[0].chance:.0f} %"
    return [
        f"Contextual questions: the answer by the context against distractors that contradict it; chance is {chance}.",
        row("accuracy, %", "base", "variant", "change, points"),
        *(comparison(name, each.accuracy, 1, scale=100) for name, each in zip(names, result.rows, strict=True)),
        row("log-odds, nats", *_HEADINGS),
        *(comparison(name, each.log_odds, 2) for name, each in zip(names, result.rows, strict=True)),
    ]


def _outliers(result: OutlierResult) -> list[str]:
    lines = [f"Activations: {result.prompts} prompts of {result.tokens} tokens, {result.source}; absolute values."]
    lines.append(row("", "largest", "2nd / 3rd", "10th / 100th", "median", "kurtosis", width=_NARROW))
    for each in result.rows:
        lines.append(each.what)
        lines += [
            row(f"  {name}", *_extremes(end), width=_NARROW) for name, end in (("base", each.base), ("variant", each.variant))
        ]
    lines.append(row("mean over prompts", *_HEADINGS))
    return [*lines, *(line for each in result.rows for line in _over_prompts(each))]


def _extremes(end: Extremes | None) -> tuple[str, ...]:
    if end is None:
        return (ABSENT,) * 5
    top = {rank: _plain(value) for rank, value in end.top.items()}
    pairs = f"{top['2']} / {top['3']}", f"{top['10']} / {top['100']}"
    return top["1"], *pairs, _plain(end.median), _plain(end.kurtosis)


def _plain(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _over_prompts(each: OutlierRow) -> list[str]:
    lines = [row(each.what)]
    for name, value in (("  largest", each.largest), ("  kurtosis", each.kurtosis)):
        if value is not None:
            lines.append(comparison(name, value, 0 if abs(value.base.mean) >= 1000 else 2))
    return lines if len(lines) > 1 else []
