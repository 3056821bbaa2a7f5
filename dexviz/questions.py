"""Scoring answers: the log-likelihood of each candidate after its question, in one view.

A context is read once and its key/value cache is copied for all that follows it: the questions asked about it, each with its
candidates, as one batch that is padded at the end. A cache belongs to one view; each view fills its own. Models whose cache is
no plain one read context, question and candidate anew.

Axes: C candidates, P questions, R rows of a batch, A tokens of the longest row, Q tokens that are predicted, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from dexviz.errors import PromptError
from dexviz.models import View

Path = tuple[int, ...]
"""Token ids between a context and the last token of an answer, which predicts nothing that is wanted."""
Progress = Callable[[str, int, int], None]
"""Called with what is measured, the steps done and their number; what it raises stops the measurement."""
OnStep = Callable[[int, int], None]
"""The same of one stage."""
_BATCH_TOKENS = 1024
"""Tokens that follow a context in one batch, padding included: bounds the logits that are held at a time."""
_CACHED_TOKENS = 1 << 15
"""Tokens of a batch whose keys and values are held at a time, the context counted once a row."""


def stage(progress: Progress | None, name: str) -> OnStep | None:
    """Progress of the stage of that name."""
    return None if progress is None else lambda done, total: progress(name, done, total)


class Question(Protocol):
    """A prompt with candidate answers, such as `dexviz.needles.Needle`."""

    @property
    def ids(self) -> np.ndarray:
        """The prompt up to the answer, int64 [N]."""

    @property
    def candidates(self) -> Sequence[np.ndarray]:
        """Token ids of the answers, int64 each."""


def log_likelihoods(view: View, question: Question) -> np.ndarray:
    """Sum of the log-probabilities of each candidate's tokens after the prompt, in nats: float64 [C]."""
    return log_likelihoods_after(view, question.ids, [np.zeros(0, dtype=np.int64)], [question.candidates])[0]


def score(view: View, questions: Sequence[Question], progress: OnStep | None = None) -> np.ndarray:
    """Log-likelihoods of all candidates of questions with the same number of them, in nats: float64 [P, C]."""
    rows = []
    for done, question in enumerate(questions, start=1):
        rows.append(log_likelihoods(view, question))
        if progress is not None:
            progress(done, len(questions))
    return np.stack(rows)


@torch.inference_mode()
def log_likelihoods_after(
    view: View, context: np.ndarray, stems: Sequence[np.ndarray], candidates: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """The same of several questions that share a context.

    Args:
        context: int64 [N], at least one token.
        stems: what follows the context in each question; may be empty.
        candidates: of each question.

    Returns:
        Log-likelihoods of each question's candidates in nats, float64 [C] each.

    Raises:
        PromptError: context, question and answer are longer than the model reads.
    """
    waiting: dict[Path, list[tuple[int, int]]] = {}
    for i, (stem, answers) in enumerate(zip(stems, candidates, strict=True)):
        for c, answer in enumerate(answers):
            waiting.setdefault((*stem.tolist(), *answer[:-1].tolist()), []).append((i, c))
    longest, limit = len(context) + max(map(len, waiting)), view.loaded.max_tokens
    if longest > limit:
        raise PromptError(f"questions of at most {limit:,} tokens", f"{longest:,}", "Choose shorter ones, or another model.")
    scores = [np.zeros(len(answers)) for answers in candidates]
    with view.active():
        for path, logits_QV in _read(view, context, list(waiting)):
            for i, c in waiting[path]:
                answer_Q = torch.from_numpy(candidates[i][c]).to(logits_QV.device)
                log_QV = F.log_softmax(logits_QV[len(stems[i]) :].float(), dim=-1)
                scores[i][c] = float(log_QV.gather(1, answer_Q[:, None]).double().sum())
    return scores


def _read(view: View, context: np.ndarray, paths: Sequence[Path]) -> Iterator[tuple[Path, Tensor]]:
    """Logits after the context and after each token of a path, [1 + tokens of the path, V], path by path."""
    model: Any = view.model
    accepted = inspect.signature(model.forward).parameters
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    name = "cache" if "cache" in accepted else "past_key_values"
    context_N = torch.from_numpy(context).to(model.device)
    for batch in _batches(paths, len(context)):
        ids_RA = torch.zeros(len(batch), len(batch[-1]), dtype=torch.int64)
        for row, path in enumerate(batch):
            ids_RA[row, : len(path)] = torch.tensor(path)
        ids_RA = ids_RA.to(model.device)
        output = model(context_N[None], use_cache=True, **last_only)
        first_1V: Tensor = output.logits[0, -1:]
        cache: Any = dict(output).get(name)
        if not ids_RA.shape[1]:
            yield batch[0], first_1V
        elif _plain(cache):
            cache.batch_repeat_interleave(len(batch))
            rest_RAV = model(ids_RA, use_cache=True, **{name: cache}).logits
            for path, rest_AV in zip(batch, rest_RAV, strict=True):
                yield path, torch.cat([first_1V, rest_AV[: len(path)]])
        else:
            for path, ids_A in zip(batch, ids_RA, strict=True):
                whole = torch.cat([context_N, ids_A[: len(path)]])
                yield path, model(whole[None], use_cache=False).logits[0, len(context) - 1 :]


def _batches(paths: Sequence[Path], context: int) -> Iterator[list[Path]]:
    """Paths in batches from short to long, which after a context of so many tokens keep to the bounds, or hold one path."""
    batch: list[Path] = []
    for path in sorted(paths, key=len):
        rows, tokens = len(batch) + 1, len(path)
        if batch and (rows * tokens > _BATCH_TOKENS or rows * (context + tokens) > _CACHED_TOKENS):
            yield batch
            batch = []
        batch.append(path)
    yield batch


def _plain(cache: Any) -> bool:
    """True for a cache that can be copied for several continuations: keys and values of every layer, windows included."""
    return isinstance(cache, DynamicCache) and all(isinstance(layer, DynamicLayer) for layer in cache.layers)
