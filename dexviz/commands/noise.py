"""Noise cancellation: one marked prompt, a battery of needle prompts, or the papers' other claims."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dexviz.bootstrap import Bootstrap
from dexviz.claims_records import ClaimsRequest
from dexviz.commands.capture import parse_head, read_prompt
from dexviz.commands.common import Answer, load, new_file, note_progress
from dexviz.errors import PromptError, SnapshotError
from dexviz.files import write_whole
from dexviz.noise_records import BatteryRequest
from dexviz.noise_table import battery_table, prompt_table, terms_table

if TYPE_CHECKING:
    from dexviz.models import ModelPair

_AT = re.compile(r"(\d{1,9}):(\d{1,9})")
_ONLY_FOR = {
    "prompt": ("chat", "needle", "needle_at", "question", "question_at", "answer", "rows", "terms"),
    "battery": ("lengths", "depths", "per_cell"),
    "claims": ("orders", "prompts", "tokens"),
}
"""Options that one kind of measurement takes alone."""
_NOT_FOR = {"prompt": ("resamples", "level"), "battery": (), "claims": ("score", "space", "heads")}
_HEADS = 10


def noise(arguments: Namespace) -> Answer:
    """Measure what was asked for, and write it to a file as well where --out asks for it."""
    kind = "battery" if arguments.battery else "claims" if arguments.claims is not None else "prompt"
    _check_options(arguments, kind)
    measure = {"prompt": _prompt, "battery": _battery, "claims": _claims}[kind](arguments)
    out = new_file(arguments.out) if arguments.out else None
    answer, text = measure(load(arguments))
    if out is None:
        return answer, text
    _write(out, answer)
    return {**answer, "out": str(out)}, f"{text}\nwritten to {out}"


def _check_options(arguments: Namespace, kind: str) -> None:
    """Refuse options that would have no effect."""
    refused = [name for other, names in _ONLY_FOR.items() if other != kind for name in names]
    for name in (*refused, *_NOT_FOR[kind]):
        value = getattr(arguments, name)
        if value is not None and value is not False and value != []:
            what = "a marked prompt" if kind == "prompt" else f"--{kind}"
            raise PromptError(f"options of {what}", f"--{name.replace('_', '-')}", "Leave it out, or ask for something else.")


_Measure = Callable[["ModelPair"], Answer]
"""What is left to do once the pair is loaded."""


def _prompt(arguments: Namespace) -> _Measure:
    text = read_prompt(arguments)
    needle = [*arguments.needle, *map(_characters, arguments.needle_at)]
    if not needle:
        raise PromptError("a needle, the text that the answer depends on", "none", "Give --needle TEXT, or --needle-at.")
    question = arguments.question if arguments.question_at is None else _characters(arguments.question_at)

    wanted = [parse_head(name, "--terms") for name in arguments.terms]

    def measure(pair: ModelPair) -> Answer:
        from dexviz.head_terms import noise_terms
        from dexviz.needle_noise import noise as run

        found = run(
            pair,
            text,
            needle,
            question=question,
            answer=arguments.answer,
            rows=arguments.rows,
            chat=arguments.chat,
            **_given(arguments, "score", "space"),
        )
        answer, text_lines = found.to_json(), prompt_table(found, _heads(arguments))
        if not wanted:
            return answer, text_lines
        view, read = (pair.base, found.base_read) if found.variant_read is None else (pair.variant, found.variant_read)
        terms = noise_terms(view, read.tokens, wanted, **_given(arguments, "space"))
        return {**answer, "terms": [term.to_json() for term in terms]}, f"{text_lines}\n\n{terms_table(terms)}"

    return measure


def _battery(arguments: Namespace) -> _Measure:
    request = BatteryRequest(**_given(arguments, "lengths", "depths", "per_cell", "seed", "score", "space"))
    bootstrap = Bootstrap(**_given(arguments, "resamples", "level", "seed"))

    def measure(pair: ModelPair) -> Answer:
        from dexviz.battery import noise_battery

        report = noise_battery(pair, request, bootstrap=bootstrap, progress=note_progress)
        return report.to_json(), battery_table(report, _heads(arguments))

    return measure


def _claims(arguments: Namespace) -> _Measure:
    claims = tuple(arguments.claims.split(","))
    settings = _given(arguments, "seed", "orders", "prompts", "tokens", "resamples", "level")
    request = ClaimsRequest(claims, **settings)

    def measure(pair: ModelPair) -> Answer:
        from dexviz.claims import noise_claims

        report = noise_claims(pair, request, progress=note_progress)
        return report.to_json(), report.table()

    return measure


def _given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """Options that were given; lists as tuples. Their defaults are those of what they are handed to."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None}


def _heads(arguments: Namespace) -> int:
    return _HEADS if arguments.heads is None else max(0, arguments.heads)


def _characters(text: str) -> tuple[int, int]:
    if not (match := _AT.fullmatch(text)):
        raise PromptError("characters written like 10:18", repr(text), "Change --needle-at or --question-at.")
    return int(match[1]), int(match[2])


def _write(out: Path, answer: dict[str, Any]) -> None:
    text = json.dumps(answer, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_whole(out, text.encode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SnapshotError(f"to write {str(out)!r}", reason, "Free some space or choose another place.") from error
