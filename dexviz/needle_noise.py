"""Signal and noise of every head on one marked prompt: only the chosen query rows are made, from the Q, K and V of one pass.

Marks are spans of characters; each view reads the prompt with its own tokenizer, so that models with different tokenizers are
compared on the same text. Source: README, "What is computed". Axes: L layers, S score heads, C keys of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dexviz import provenance
from dexviz.errors import Cancelled, CaptureError, PromptError
from dexviz.kernels.terms import score_rows
from dexviz.layer_records import LayerCalls, SeenLayer
from dexviz.models import ModelPair, View, no_tokenizer
from dexviz.noise_records import MEASURES, HeadNoise, MarkedTokens, Marks, NoiseOnPrompt, Span
from dexviz.parts import encode
from dexviz.questions import log_likelihoods_after
from dexviz.recorder import check_tokens, last_only
from dexviz.records import SCORES, SPACES, Score, Space, Tokens
from dexviz.scores import score_map
from dexviz.tokens import tokenize, typed_at

if TYPE_CHECKING:
    from dexviz.records import ViewName

Mark = str | Span
"""A piece of the prompt that occurs once, or its characters [start, stop)."""


def noise(
    pair: ModelPair,
    text: str,
    needle: Mark | Sequence[Mark],
    *,
    question: Mark | None = None,
    answer: str | None = None,
    rows: Sequence[int] | None = None,
    score: Score = "signed",
    space: Space = "value",
    chat: bool = False,
    cancel: Event | None = None,
) -> NoiseOnPrompt:
    """Signal, noise and SNR of every head of both views on a prompt with a marked needle.

    Args:
        needle: what the answer depends on: a piece of the text that occurs once, its characters (start, stop), or several such.
        question: one that is left out of the noise, as it repeats the needle's words; likewise.
        answer: text whose log-probability after the prompt is wanted, nats, with a space before it where the language has one.
        rows: query rows by token of the base's prompt, negative ones from its end; default the last.
        score: "signed", "attention" or "contribution".
        space: where DEX gains are measured, "value" or "residual".

    Raises:
        PromptError: a mark that is not in the text, occurs more than once or leaves no noise; a row that does not see the
            needle; a prompt longer than a model reads.
        CaptureError: a score or space that a view does not have.
        Cancelled: `cancel` was set.
    """
    marks = Marks(tuple(find(text, mark) for mark in _several(needle)), None if question is None else find(text, question))
    return measure(
        pair,
        text,
        marks,
        rows=None if rows is None else tuple(rows),
        score=score,
        space=space,
        answer=answer,
        chat=chat,
        cancel=cancel,
    )


def _several(needle: Mark | Sequence[Mark]) -> Sequence[Mark]:
    if isinstance(needle, str):
        return [needle]
    if len(needle) == 2 and all(isinstance(edge, int) for edge in needle):
        return [cast(Span, tuple(needle))]
    return cast("Sequence[Mark]", needle)


def find(text: str, mark: Mark) -> Span:
    """Characters [start, stop) of a mark in the text.

    Raises:
        PromptError: it is empty, not there, or there more than once.
    """
    if not isinstance(mark, str):
        return int(mark[0]), int(mark[1])
    starts, at = [], text.find(mark) if mark else -1
    while at >= 0:
        starts.append(at)
        at = text.find(mark, at + 1)
    if len(starts) == 1:
        return starts[0], starts[0] + len(mark)
    got = "nothing to look for" if not mark else f"{mark!r}, which is not in it"
    if starts:
        got = f"{mark!r}, which is there {len(starts)} times, at characters {', '.join(map(str, starts[:5]))}"
    raise PromptError(
        "a mark that occurs once in the prompt", got, "Mark more of the text, or give its characters as (start, stop)."
    )


def measure(
    pair: ModelPair,
    text: str,
    marks: Marks,
    *,
    rows: tuple[int, ...] | None = None,
    score: Score = "signed",
    space: Space = "value",
    answer: str | None = None,
    chat: bool = False,
    cancel: Event | None = None,
) -> NoiseOnPrompt:
    """As `noise`, with marks by characters."""
    base_read = read_marked(pair.base, text, marks, rows, chat=chat)
    base = heads_noise(pair.base, base_read, score, space, cancel)
    second = provenance.second_view(pair)
    variant_read = variant = None
    if second is not None:
        variant_read = base_read if pair.same_tokenizer else read_marked(second, text, marks, None, chat=chat)
        if not pair.same_tokenizer:
            variant_read = _with_rows_of(variant_read, base_read)
        variant = heads_noise(second, variant_read, score, space, cancel)
    answers: dict[ViewName, float] | None = None
    if answer is not None:
        answers = {"base": answer_log_probability(pair.base, base_read.tokens, answer)}
        if second is not None and variant_read is not None:
            answers["variant"] = answer_log_probability(second, variant_read.tokens, answer)
    facts = provenance.of_pair(pair)
    return NoiseOnPrompt(marks, score, space, base_read, variant_read, base, variant, answer, answers, facts)


def read_marked(view: View, text: str, marks: Marks, rows: tuple[int, ...] | None, *, chat: bool = False) -> MarkedTokens:
    """The prompt as the view reads it, with the tokens that the marks cover.

    Raises:
        PromptError: see `noise`.
    """
    tokenizer = view.loaded.tokenizer
    if tokenizer is None:
        raise no_tokenizer(view.loaded)
    spans = [*marks.needle, *([] if marks.question is None else [marks.question])]
    if outside := [span for span in spans if span[1] > len(text)]:
        raise PromptError(
            f"marks within the prompt's {len(text):,} characters",
            f"[{outside[0][0]}, {outside[0][1]})",
            "Mark text that is there.",
        )
    tokens = tokenize(tokenizer, text, chat=chat, max_tokens=view.loaded.max_tokens)
    shift = typed_at(tokenizer, text) if chat else 0
    try:
        needle = tuple(tokens.span_of(start + shift, stop + shift) for start, stop in marks.needle)
        question = None if marks.question is None else tokens.span_of(*(edge + shift for edge in marks.question))
    except CaptureError as error:
        raise PromptError("marks that tokens cover", error.got, "Mark text that the tokenizer does not drop.") from error
    read = MarkedTokens(tokens, needle, question, _rows(rows, len(tokens)))
    masks(len(tokens), read.needle, read.question, read.rows)
    return read


def _rows(rows: tuple[int, ...] | None, n: int) -> tuple[int, ...]:
    found = tuple(row + n if row < 0 else row for row in (rows if rows is not None else (-1,)))
    if not found or not all(0 <= row < n for row in found):
        raise PromptError(f"query rows within the prompt's {n} tokens", str(rows), "Choose rows that are there.")
    return found


def _with_rows_of(read: MarkedTokens, other: MarkedTokens) -> MarkedTokens:
    """The same prompt with the rows whose tokens end where those of another tokenizer do, or right after."""
    ends = np.maximum.accumulate(read.tokens.offsets[:, 1])
    wanted = [int(np.searchsorted(ends, other.tokens.offsets[row, 1])) for row in other.rows]
    last = len(read.tokens) - 1
    rows = tuple(last if row == len(other.tokens) - 1 else min(at, last) for row, at in zip(other.rows, wanted, strict=True))
    masks(len(read.tokens), read.needle, read.question, rows)
    return MarkedTokens(read.tokens, read.needle, read.question, rows)


def masks(n: int, needle: Sequence[Span], question: Span | None, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which of a prompt's tokens are needle, and which are noise: bool [N] each. The first token, the sink, is neither.

    Raises:
        PromptError: a needle that is the first token alone; a row that does not see all of the needle, or has no other token to
            compare it with.
    """
    is_needle, is_noise = np.zeros(n, dtype=bool), np.ones(n, dtype=bool)
    is_noise[0] = False
    for start, stop in needle:
        is_needle[start:stop] = True
    is_needle[0] = False
    if not is_needle.any():
        raise PromptError("a needle beyond the first token, the sink", "that token alone", "Mark more of the text.")
    if question is not None:
        is_noise[slice(*question)] = False
    is_noise &= ~is_needle
    for row in rows:
        if is_needle[row + 1 :].any():
            raise PromptError("query rows that see all of the needle", f"row {row}", "Choose rows after the needle.")
        if not is_noise[: row + 1].any():
            raise PromptError(
                "tokens beside needle, question and the first token",
                f"none that row {row} sees",
                "Mark less, or write more around the needle.",
            )
    return is_needle, is_noise


def heads_noise(
    view: View, read: MarkedTokens, score: Score = "signed", space: Space = "value", cancel: Event | None = None
) -> HeadNoise:
    """Every head of one view, by one pass; the pass itself is the view's plain forward.

    Raises:
        CaptureError: a score or space that the view does not have.
        Cancelled: `cancel` was set.
    """
    if score not in SCORES or space not in SPACES:
        raise CaptureError(
            f"a score out of {', '.join(SCORES)}, a space out of {', '.join(SPACES)}", f"{score!r}, {space!r}", "Correct it."
        )
    check_tokens(view, read.tokens)
    rows = _RowsSeen(view, read, score, space, cancel or Event())
    ids = torch.from_numpy(read.tokens.ids)[None].to(view.model.device)
    with torch.inference_mode(), view.active(rows.calls):
        view.model(input_ids=ids, use_cache=False, **last_only(view))
    return rows.result()


class _RowsSeen:
    """Takes the chosen rows of every head out of a pass."""

    def __init__(self, view: View, read: MarkedTokens, score: Score, space: Space, cancel: Event) -> None:
        self.view, self.read, self.score, self.space, self.cancel = view, read, score, space, cancel
        self.calls = LayerCalls(view, self._take)
        self.needle, self.noise = masks(len(read.tokens), read.needle, read.question, read.rows)
        self.layers: dict[int, np.ndarray] = {}

    def _take(self, seen: SeenLayer) -> None:
        if self.cancel.is_set():
            raise Cancelled
        score = score_map(seen.record, self.score, self.space, seen.o_HNE)
        rows = []
        for row in self.read.rows:
            block = score_rows(score, row, row + 1)
            s_SC = np.zeros((score.heads, row + 1))
            s_SC[:, block.c0 : min(block.c1, row + 1)] = block.s_SRC[:, 0, : row + 1 - block.c0].double().cpu().numpy()
            rows.append(row_measures(s_SC, self.needle[: row + 1], self.noise[: row + 1]))
        self.layers[seen.record.layer] = mean_of(np.stack(rows))

    def result(self) -> HeadNoise:
        """All layers; NaN in those without attention."""
        heads = next(iter(self.layers.values())).shape[-1]
        found_MLS = np.full((len(MEASURES), self.view.layout.layers, heads), np.nan)
        for layer, measures_MS in self.layers.items():
            found_MLS[:, layer] = measures_MS
        by_name = dict(zip(MEASURES, found_MLS, strict=True))
        return HeadNoise(**{**by_name, "snr": divided(by_name["signal"], by_name["noise"])})


def row_measures(s_SC: np.ndarray, needle_C: np.ndarray, noise_C: np.ndarray) -> np.ndarray:
    """Of one row's scores, in the order of `MEASURES`: float64 [M, S]; NaN where the row has no mass."""
    mass_SC = np.abs(s_SC)
    total_S = mass_SC.sum(axis=-1)
    signal_S = divided(mass_SC[:, needle_C].sum(axis=-1), total_S * needle_C.sum())
    noise_S = divided(mass_SC[:, noise_C].sum(axis=-1), total_S * noise_C.sum())
    negative_S = divided(np.where(s_SC < 0, mass_SC, 0.0).sum(axis=-1), total_S)
    return np.stack(
        [signal_S, noise_S, divided(signal_S, noise_S), divided(mass_SC[:, 0], total_S), negative_S, s_SC.sum(axis=-1)]
    )


def divided(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; NaN where there is nothing to divide by."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def mean_of(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is not NaN; NaN where nothing is left."""
    known = ~np.isnan(values)
    return divided(np.where(known, values, 0.0).sum(axis=0), known.sum(axis=0).astype(np.float64))


def answer_log_probability(view: View, tokens: Tokens, answer: str) -> float:
    """Log-probability of the answer's tokens after the prompt, in nats.

    Raises:
        PromptError: the answer has no tokens, or is too long for the model after the prompt.
    """
    assert view.loaded.tokenizer is not None
    ids = encode(view.loaded.tokenizer, answer)
    if not len(ids):
        raise PromptError("an answer of at least one token", repr(answer), "Give some text.")
    return float(log_likelihoods_after(view, tokens.ids, [np.zeros(0, dtype=np.int64)], [[ids]])[0][0])
