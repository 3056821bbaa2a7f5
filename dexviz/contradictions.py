"""Contextual questions against distractors that contradict the context: does the model answer by what it has just read?

Each question of `dexviz.context_questions` is scored with its candidates: the answer by the context, and distractors that are
commonly known or stand in the context as what others say.

    log-odds = log p − log(1 − p) = ℓ_right − log Σ_wrong exp ℓ,    ℓ = log-likelihood, p = softmax(ℓ)_right

Axes: P questions, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dexviz.bootstrap import Bootstrap, Comparison
from dexviz.claims_records import ContradictionResult, ContradictionRow
from dexviz.context_questions import QUESTIONS, ContextQuestion
from dexviz.models import View, reader
from dexviz.parts import encode, encode_answers, start_ids
from dexviz.questions import Progress, score, stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A question as ids; see `dexviz.questions.Question`."""

    ids: np.ndarray
    candidates: tuple[np.ndarray, ...]


def contradictions(
    base: View,
    variant: View | None,
    *,
    bootstrap: Bootstrap | None = None,
    questions: Sequence[ContextQuestion] = QUESTIONS,
    progress: Progress | None = None,
) -> ContradictionResult:
    """Accuracy and log-odds over all questions, and by kind; `questions` have the same number of candidates.

    Raises:
        PromptError: the models' context is too short, or their tokenizer cannot tell answers apart.
        ModelError: there is no tokenizer.
    """
    views = [view for view in (base, variant) if view is not None]
    scores = [
        score(
            view,
            [_encoded(reader(view, base), each) for each in questions],
            stage(progress, f"contextual questions, {view.name}"),
        )
        for view in views
    ]
    odds = [log_odds(scores_PC) for scores_PC in scores]
    right = [(scores_PC[:, 0] > scores_PC[:, 1:].max(axis=1)).astype(np.float64) for scores_PC in scores]
    kinds = np.array([each.kind for each in questions])
    draws = bootstrap or Bootstrap()

    def compare(values: Sequence[np.ndarray], chosen: np.ndarray) -> Comparison:
        first, *second = (each[chosen] for each in values)
        return draws.compare(first, second[0] if second else None, unit="question")

    def row(chosen: np.ndarray, kind: str | None = None) -> ContradictionRow:
        chance = 1 / scores[0].shape[1]
        return ContradictionRow(kind, int(chosen.sum()), chance, compare(right, chosen), compare(odds, chosen))

    return ContradictionResult(
        (row(np.ones(len(questions), dtype=bool)), *(row(kinds == kind, kind) for kind in dict.fromkeys(kinds.tolist()))),
        tuple(each.text for each in questions),
        tuple(each.candidates for each in questions),
        tuple(odds[0].tolist()),
        tuple(odds[1].tolist()) if variant is not None else None,
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, question: ContextQuestion) -> _Encoded:
    ids = np.concatenate([start_ids(tokenizer), encode(tokenizer, question.text)])
    return _Encoded(ids, encode_answers(tokenizer, question.candidates))


def log_odds(scores_PC: np.ndarray) -> np.ndarray:
    """Log-odds of the first candidate against all others, from log-likelihoods: float64 [P]."""
    return scores_PC[:, 0] - np.logaddexp.reduce(scores_PC[:, 1:], axis=1)
