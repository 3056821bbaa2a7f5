"""What is measured on a trained model of the retrieval pair: answers, attention on the answer, similarity of heads, outliers.

Every model reads the same prompts, one question each. Attention is that of the last row, from which the answer is predicted;
for DIFF it is S on logical heads, and beside it A₁ and A₂ on softmax heads. Numbers come prompt by prompt, for a paired
bootstrap.

Axes: T prompts, L layers, H heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.retrieval_training import answers
from dexviz.attention import AttentionCall
from dexviz.models import LoadedModel, View, make_pair
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest
from dexviz.retrieval import FACT, Retrieval, draw, text_of

FACTS = (4, 8, 16, 32, 48, 64)
"""Facts a prompt; all but one are distractors."""
SIMILARITIES = (0.0, 0.5, 1.0)
ANSWER = 2
"""Tokens that count as the answer's place: the value, and the token after it, which is the first that can know of both the key
and the value. All models here learn to look there."""
CROWDED = 32
"""Facts of the prompts on which similarity is varied."""
ANSWERED, CAPTURED = 400, 40
"""Prompts a cell for answers, and for attention."""
SELECTION = "selection"
"""Prompts on which the head that looks at the answer most is chosen; it is reported on the others."""


def measure(loaded: LoadedModel) -> dict[str, Any]:
    """Everything the page needs of one model, as JSON has it."""
    view = make_pair(loaded).base
    cells = {str(facts): draw(np.random.default_rng((2, facts)), CAPTURED, facts) for facts in FACTS}
    cells[SELECTION] = draw(np.random.default_rng((3, CROWDED)), CAPTURED, CROWDED)
    return {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "lambda": view.lambdas(),
        "right": {str(facts): right(loaded, facts, 0.5) for facts in FACTS},
        "right_by_similarity": {str(similarity): right(loaded, CROWDED, similarity) for similarity in SIMILARITIES},
        "attention": {name: attention_on_answers(view, sample, "signed") for name, sample in cells.items()},
        "softmax": {name: attention_on_answers(view, sample, "attention") for name, sample in cells.items()},
        "outliers": outliers(view, cells[str(CROWDED)]),
    }


def right(loaded: LoadedModel, facts: int, similarity: float) -> list[bool]:
    """Whether the most probable word is the answer, prompt by prompt."""
    sample = draw(np.random.default_rng((4, facts, round(100 * similarity))), ANSWERED, facts, similarity=similarity)
    return (answers(loaded.model, sample) == sample.answers_BQ[:, 0]).tolist()


def attention_on_answers(view: View, sample: Retrieval, score: str) -> dict[str, Any]:
    """Of the last row: share of |S| on the answer, SNR and negative share, [T, L, H]; similarity of heads, [T, L]."""
    rows = [_row(_captured(view, sample, i, score)) for i in range(len(sample.ids_BN))]
    return {name: np.round([row[name] for row in rows], 6).tolist() for name in rows[0]}


def _captured(view: View, sample: Retrieval, index: int, score: str) -> Capture:
    tokens = make_pair(view.loaded).tokenize(text_of(sample.prompts()[index]))
    assert tokens.ids.tolist() == sample.prompts()[index].tolist(), "the tokenizer reads what the generator writes"
    at = int(sample.needles_BQ[index, 0])
    spans = {"answer": (at, at + ANSWER), "question": (max(1 + FACT * sample.facts, at + ANSWER), len(tokens))}
    return capture(view, tokens, CaptureRequest(spans=spans, score=score, similarity=("cosine", "cka")))


def _row(cap: Capture) -> dict[str, np.ndarray]:
    answer, question, sink, negative = (
        cap.stats[name][:, :, -1].astype(np.float64) for name in ("span:answer", "span:question", "sink", "negative")
    )
    start, stop = cap.request.spans["question"]
    noise = np.clip(1 - answer - question - sink, 1e-9, None) / (len(cap.tokens) - 1 - ANSWER - (stop - start))
    return {
        "answer": answer,
        "snr": answer / ANSWER / noise,
        "negative": negative,
        "cosine": _between(cap.similarity["cosine"]),
        "cka": _between(cap.similarity["cka"]),
    }


def _between(similarity_LHH: np.ndarray) -> np.ndarray:
    """Mean similarity of two different heads of a layer, [L]."""
    different = ~np.eye(similarity_LHH.shape[-1], dtype=bool)
    return similarity_LHH[:, different].astype(np.float64).mean(axis=1)


@torch.inference_mode()
def outliers(view: View, sample: Retrieval) -> dict[str, Any]:
    """Hidden states after each layer: largest |x|, the same over the median, kurtosis; largest attention logit. [T, L] each."""
    found: dict[str, list[list[float]]] = {"largest": [], "over_median": [], "kurtosis": [], "logit": []}
    for ids_N in torch.from_numpy(sample.prompts()):
        calls: list[AttentionCall] = []
        with view.active(calls.append):
            states = view.model(ids_N[None], use_cache=False, output_hidden_states=True).hidden_states[1:]
        size = [state[0].abs().flatten() for state in states]
        found["largest"].append([float(x.max()) for x in size])
        found["over_median"].append([float(x.max() / x.median()) for x in size])
        found["kurtosis"].append([_kurtosis(state[0].flatten().double()) for state in states])
        found["logit"].append([_largest_logit(call) for call in {call.layer: call for call in calls}.values()])
    return found


def _kurtosis(x: torch.Tensor) -> float:
    """Fourth central moment over the squared second; 3 for a normal distribution."""
    centred = x - x.mean()
    return float(centred.pow(4).mean() / centred.pow(2).mean().square())


def _largest_logit(call: AttentionCall) -> float:
    """Largest scaled q · k over all heads and visible keys."""
    x = call.inputs
    logits_HNM = x.q_BHND[0] @ x.k_BGMD[0].repeat_interleave(x.groups, dim=0).transpose(-1, -2) * x.scale
    visible = torch.ones(logits_HNM.shape[-2:], dtype=torch.bool).tril()
    return float(logits_HNM[:, visible].max())
