"""An Evaluation as a readable table: one number a line, base | variant | change, intervals in brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dexviz.needle_scores import NeedleRow
from dexviz.speed import Speed, Timing
from dexviz.text_table import ABSENT, comparison, interval, row

if TYPE_CHECKING:
    from dexviz.evaluation import Evaluation, HeldOutResult, NeedleResult


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
    lines += [row("", "base", "variant", "change"), comparison("loss, nats/token", result.loss, 4)]
    lines += [row("loss, change in %", "", "", interval(result.loss_percent, 2, signed=True))]
    lines += [comparison("perplexity, change in %", result.perplexity, 2)]
    if result.kl is not None:
        lines.append(row("KL(base‖variant), nats", "", f"{interval(result.kl, 4)}", f"largest of a token {result.kl_max:.3f}"))
    elif result.loss.variant is not None:
        lines.append("KL: none, since the two models' vocabularies differ in size.")
    return lines


def _needles(result: NeedleResult) -> list[str]:
    chance = 100 / result.candidates
    accuracy = [comparison(_which(part), part.accuracy, 0, scale=100) for part in result.rows]
    margin = [comparison(_which(part), part.margin, 2) for part in result.rows]
    return [
        f"Needle task: {result.prompts} prompts, right answer out of {result.candidates}, all of them in the prose; chance is "
        f"{chance:g} %.",
        row("accuracy, %", "base", "variant", "change, points"),
        *accuracy,
        row("margin, nats", "base", "variant", "change"),
        *margin,
    ]


def _which(part: NeedleRow) -> str:
    if part.length is not None:
        return f"  {part.length:,} tokens"
    return f"  depth {part.depth:g}" if part.depth is not None else "  all"


def _speed(speed: Speed) -> list[str]:
    lines = [
        f"Speed: forward pass of {speed.tokens:,} tokens, {speed.rounds} rounds in turns, {speed.threads} threads.",
        row("", "median", "fastest", "× base, median of rounds"),
    ]
    for name, timing in (("base", speed.base), ("variant, unmerged", speed.variant), ("merged", speed.merged)):
        lines.append(row(name, *_timing(timing)))
    if speed.reason:
        lines.append(f"Not merged: {speed.reason}")
    return lines


def _timing(timing: Timing | None) -> tuple[str, ...]:
    if timing is None:
        return (ABSENT, ABSENT, ABSENT)
    return f"{1000 * timing.median:.1f} ms", f"{1000 * timing.fastest:.1f} ms", f"{timing.ratio:.3f}"
