"""An Evaluation as a readable table: one number a line, base | variant | change, intervals in brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dexviz.bootstrap import Comparison, Interval
from dexviz.needle_scores import NeedleRow
from dexviz.speed import Speed, Timing

if TYPE_CHECKING:
    from dexviz.evaluation import Evaluation, HeldOutResult, NeedleResult

_LABEL, _CELL = 26, 26


def table(result: Evaluation) -> str:
    """Lines of text, at most about 110 characters wide; numbers that were not measured are dashes."""
    facts = result.provenance
    variant = facts["variant"]["name"] if facts["variant"] else "none"
    lines = [
        f"Base {facts['base']['name']}, variant {variant}, {facts['dtype']} on {facts['device']}, seed {result.config.seed}.",
        _parameters(result.parameters),
        "",
        *_held_out(result.held_out),
    ]
    if result.needles is not None:
        lines += ["", *_needles(result.needles)]
    if result.speed is not None:
        lines += ["", *_speed(result.speed)]
    return "\n".join(line.rstrip() for line in lines)


def _row(label: str, *cells: str) -> str:
    return f"{label:<{_LABEL}}" + "".join(f"{cell:<{_CELL}}" for cell in cells)


def _interval(value: Interval | None, digits: int, *, signed: bool = False, scale: float = 1.0, unit: str = "") -> str:
    if value is None:
        return "—"
    form = f"{'+' if signed else ''}.{digits}f"
    text = f"{scale * value.mean:{form}}{unit}"
    if value.low is not None and value.high is not None:
        text += f" [{scale * value.low:{form}}, {scale * value.high:{form}}]"
    return text


def _comparison(label: str, value: Comparison, digits: int, *, scale: float = 1.0, unit: str = "", change: str = "") -> str:
    return _row(
        label,
        _interval(value.base, digits, scale=scale, unit=unit),
        _interval(value.variant, digits, scale=scale, unit=unit),
        _interval(value.change, digits, signed=True, scale=scale, unit=change or unit),
    )


def _parameters(counts: dict[str, int | None]) -> str:
    added = "" if counts["adapter"] is None else f"; the adapter adds {counts['adapter']:,}"
    return f"Parameters: {counts['base']:,} in the base{added}."


def _held_out(result: HeldOutResult) -> list[str]:
    level = f"{100 * result.loss.base.level:g} % intervals over {result.loss.base.units:,} {result.unit}s"
    if result.loss.base.low is None:
        level = f"no intervals, since there is one {result.unit} only"
    lines = [
        f"Held-out loss: {result.source}, {result.documents:,} document{'s' * (result.documents != 1)}.",
        f"{result.blocks:,} blocks of up to {result.block:,} tokens, {result.tokens:,} predicted tokens; {level}.",
    ]
    if result.skipped_documents or result.unread_tokens:
        lines.append(
            f"Not read: at the ends of documents {result.unread_tokens:,} tokens; of fewer than two tokens "
            f"{result.skipped_documents:,} documents."
        )
    lines += [_row("", "base", "variant", "change"), _comparison("loss, nats/token", result.loss, 4)]
    lines += [_row("loss, change in %", "", "", _interval(result.loss_percent, 2, signed=True))]
    lines += [_comparison("perplexity, change in %", result.perplexity, 2)]
    if result.kl is not None:
        lines.append(
            _row("KL(base‖variant), nats", "", f"{_interval(result.kl, 4)}", f"largest of a token {result.kl_max:.3f}")
        )
    elif result.loss.variant is not None:
        lines.append("KL: none, since the two models' vocabularies differ in size.")
    return lines


def _needles(result: NeedleResult) -> list[str]:
    chance = 100 / result.candidates
    accuracy = [_comparison(_which(row), row.accuracy, 0, scale=100) for row in result.rows]
    margin = [_comparison(_which(row), row.margin, 2) for row in result.rows]
    return [
        f"Needle task: {result.prompts} prompts, right answer out of {result.candidates}, all of them in the prose; chance is "
        f"{chance:g} %.",
        _row("accuracy, %", "base", "variant", "change, points"),
        *accuracy,
        _row("margin, nats", "base", "variant", "change"),
        *margin,
    ]


def _which(row: NeedleRow) -> str:
    if row.length is not None:
        return f"  {row.length:,} tokens"
    return f"  depth {row.depth:g}" if row.depth is not None else "  all"


def _speed(speed: Speed) -> list[str]:
    lines = [
        f"Speed: forward pass of {speed.tokens:,} tokens, {speed.rounds} rounds in turns, {speed.threads} threads.",
        _row("", "median", "fastest", "× base, median of rounds"),
    ]
    for name, timing in (("base", speed.base), ("variant, unmerged", speed.variant), ("merged", speed.merged)):
        lines.append(_row(name, *_timing(timing)))
    if speed.reason:
        lines.append(f"Not merged: {speed.reason}")
    return lines


def _timing(timing: Timing | None) -> tuple[str, ...]:
    if timing is None:
        return ("—", "—", "—")
    return f"{1000 * timing.median:.1f} ms", f"{1000 * timing.fastest:.1f} ms", f"{timing.ratio:.3f}"
