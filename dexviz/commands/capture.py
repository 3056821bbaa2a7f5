"""Measuring one view on a prompt."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dexviz.commands.common import Answer, load, new_file, note_progress, numbers
from dexviz.errors import CaptureError, PromptError
from dexviz.records import Capture, CaptureRequest, Tokens, TopTokens

if TYPE_CHECKING:
    from dexviz.models import View

_HEAD = re.compile(r"L(-?\d{1,9})·?H(-?\d{1,9})", re.IGNORECASE)
_SPAN = re.compile(r"(.+)=(-?\d{1,9}):(-?\d{1,9})")


def capture(arguments: Namespace) -> Answer:
    """Measure one view, and save the snapshot where --out asks for it."""
    from dexviz.recorder import capture as measure
    from dexviz.snapshot import save_snapshot

    request, text = capture_request(arguments), read_prompt(arguments)
    out = new_file(arguments.out) if arguments.out else None
    pair = load(arguments)
    tokens = pair.tokenize(text, chat=arguments.chat)
    view = pair.base if arguments.view == "base" else pair.variant
    if arguments.dry_run:
        return _dry_run(view, tokens, request)
    taken = measure(view, tokens, request, progress=lambda done, total: note_progress("capture", done, total))
    answer = describe(taken)
    summary = f"{view.title}: {len(tokens)} tokens, {taken.layers} layers × {taken.heads} heads; next {_next(taken.logits_top)}"
    if out is None:
        return answer, summary
    save_snapshot(taken, out, compact=arguments.compact)
    return {**answer, "out": str(out)}, f"{summary}\nsaved to {out}"


def _dry_run(view: View, tokens: Tokens, request: CaptureRequest) -> Answer:
    """What the capture would cost.

    Raises:
        BudgetError: it does not fit.
    """
    from dexviz.recorder import check_tokens
    from dexviz.room import estimate

    check_tokens(view, tokens)
    request.check_against(view.layout.layers, view.layout.heads, len(tokens))
    cost = estimate(view, tokens, request)
    cost.check()
    parts = "\n".join(f"  {name}: {value / 1e6:,.1f} MB" for name, value in cost.memory.items())
    free = "" if cost.available is None else f" of {cost.available / 1e6:,.0f} MB that are free"
    longest = "" if cost.longest is None else f"\nmemory holds up to {cost.longest:,} tokens of such a capture"
    answer = {
        "model": view.loaded.name,
        "view": view.name,
        "tokens": cost.tokens,
        "seconds": cost.seconds,
        "bytes": cost.total,
        "parts": dict(cost.memory),
        "available": cost.available,
        "longest": cost.longest,
    }
    head = f"{view.title}: {cost.tokens:,} tokens, about {cost.seconds:.1f} s and {cost.total / 1e6:,.0f} MB{free}"
    return answer, f"{head}\n{parts}{longest}\nnothing was run"


def capture_request(arguments: Namespace) -> CaptureRequest:
    """The request that the options spell.

    Raises:
        CaptureError: a head, a span or a value that cannot be, or two spans of one name.
    """
    return CaptureRequest(
        maps=tuple(parse_head(text) for text in arguments.maps),
        pool=arguments.pool,
        similarity=tuple(arguments.similarity.split(",")) if arguments.similarity else False,
        spans=_parse_spans(arguments.span),
        score=arguments.score,
        space=arguments.space,
        sink=arguments.sink,
        local=arguments.local,
        threshold=arguments.threshold,
    )


def read_prompt(arguments: Namespace) -> str:
    """The prompt from the command line, a file or standard input.

    Raises:
        PromptError: the file cannot be read as UTF-8.
    """
    if arguments.prompt is not None:
        return str(arguments.prompt)
    name = arguments.prompt_file
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"UTF-8 text in {name}", str(error), "Check the path and the encoding.") from None


def describe(taken: Capture) -> dict[str, Any]:
    """A capture for `--json`: means over query rows, [layer][head]; null where a statistic has no denominator."""
    similarity = {name: numbers(_off_diagonal(values)) for name, values in taken.similarity.items()}
    return {
        "model": taken.provenance["model"],
        "view": taken.provenance["view"],
        "layers": taken.layers,
        "heads": taken.heads,
        "tokens": [{"id": int(i), "label": label} for i, label in zip(taken.tokens.ids, taken.tokens.labels, strict=True)],
        "stats": {name: numbers(taken.mean(name)) for name in taken.stats},
        "lambda": numbers(taken.lam),
        "selected": [np.flatnonzero(heads).tolist() for heads in taken.selected],
        "similarity": similarity,
        "top": top_tokens(taken.logits_top),
        "request": taken.request.to_json(),
        "provenance": dict(taken.provenance),
    }


def top_tokens(top: TopTokens) -> list[dict[str, Any]]:
    """Most probable next tokens for `--json`."""
    rows = zip(top.ids, top.labels, top.prob, strict=True)
    return [{"id": int(i), "token": label, "prob": float(prob)} for i, label, prob in rows]


def _off_diagonal(values: np.ndarray) -> np.ndarray:
    """Mean similarity of the pairs of different heads, per layer: [L] of [L, H, H]."""
    heads = values.shape[-1]
    if heads < 2:
        return np.full(len(values), np.nan)
    return (values.sum((1, 2)) - np.trace(values, axis1=1, axis2=2)) / (heads * (heads - 1))


def _next(top: TopTokens) -> str:
    return ", ".join(f"{label} {prob:.3f}" for label, prob in list(zip(top.labels, top.prob, strict=True))[:3])


def parse_head(text: str, option: str = "--maps") -> tuple[int, int]:
    """(layer, head) of a name such as L12H3, that was given with an option."""
    if not (match := _HEAD.fullmatch(text)):
        raise CaptureError("a head written like L12H3", repr(text), f"Change {option}.")
    return int(match[1]), int(match[2])


def _parse_span(text: str) -> tuple[str, tuple[int, int]]:
    if not (match := _SPAN.fullmatch(text)):
        raise CaptureError("a span written like needle=10:18", repr(text), "Change --span.")
    return match[1], (int(match[2]), int(match[3]))


def _parse_spans(texts: list[str]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for name, span in map(_parse_span, texts):
        if name in spans:
            raise CaptureError("spans with different names", f"{name!r} twice", "Change --span.")
        spans[name] = span
    return spans
