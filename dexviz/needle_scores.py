"""Scoring needle prompts: the log-likelihood of each candidate answer after the prompt, in one view.

The prompt is read once and its key/value cache is copied for the candidates, which follow as one batch, padded at the end. A
cache belongs to one view; each view fills its own. Models whose cache is no plain one read prompt and candidates anew.

Axes: C candidates, A tokens of the longest candidate, V vocabulary, P prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from dexviz.bootstrap import Bootstrap, Comparison
from dexviz.models import View
from dexviz.needles import Needle


@dataclass(frozen=True)
class NeedleRow:
    """Results over some of the prompts: all, those of one length, or those of one depth."""

    length: int | None
    """Tokens; None: all lengths."""
    depth: float | None
    """Share of the prose; None: all depths."""
    prompts: int
    accuracy: Comparison
    """Share of prompts whose right answer is likelier than each wrong one."""
    margin: Comparison
    """Log-likelihood of the right answer less that of the likeliest wrong one, mean in nats."""


@torch.inference_mode()
def candidate_log_likelihoods(view: View, needle: Needle) -> np.ndarray:
    """Sum of the log-probabilities of each candidate's tokens after the prompt, in nats: float64 [C]."""
    lengths = [len(ids) for ids in needle.candidates]
    ids_CA = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, ids in enumerate(needle.candidates):
        ids_CA[row, : len(ids)] = torch.from_numpy(ids)
    ids_CA = ids_CA.to(view.model.device)
    with view.active():
        log_CAV = F.log_softmax(_answer_logits(view, torch.from_numpy(needle.ids).to(ids_CA.device), ids_CA).float(), dim=-1)
    log_CA = log_CAV.gather(2, ids_CA[:, :, None])[:, :, 0].double().cpu().numpy()
    return np.where(np.arange(max(lengths)) < np.array(lengths)[:, None], log_CA, 0.0).sum(axis=1)


def score(view: View, needles: Sequence[Needle], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
    """Log-likelihoods of all candidates of all prompts, float64 [P, C], the right answers in column 0."""
    rows = []
    for done, needle in enumerate(needles, start=1):
        rows.append(candidate_log_likelihoods(view, needle))
        if progress is not None:
            progress(done, len(needles))
    return np.stack(rows)


def summarise(
    needles: Sequence[Needle], base_PC: np.ndarray, variant_PC: np.ndarray | None, bootstrap: Bootstrap
) -> tuple[NeedleRow, ...]:
    """Accuracy and margin over all prompts, then by length, then by depth, with intervals over prompts."""
    lengths = np.array([needle.length for needle in needles])
    depths = np.array([needle.depth for needle in needles])
    views = [base_PC] if variant_PC is None else [base_PC, variant_PC]
    margins = [scores[:, 0] - scores[:, 1:].max(axis=1) for scores in views]

    def row(chosen: np.ndarray, length: int | None = None, depth: float | None = None) -> NeedleRow:
        own = [margin[chosen] for margin in margins]
        right = [(margin > 0).astype(np.float64) for margin in own]
        accuracy, margin = (
            bootstrap.compare(values[0], values[1] if len(values) > 1 else None, unit="prompt") for values in (right, own)
        )
        return NeedleRow(length, depth, int(chosen.sum()), accuracy, margin)

    return (
        row(np.ones(len(needles), dtype=bool)),
        *(row(lengths == length, length=int(length)) for length in np.unique(lengths)),
        *(row(depths == depth, depth=float(depth)) for depth in np.unique(depths)),
    )


def _answer_logits(view: View, prompt_N: Tensor, ids_CA: Tensor) -> Tensor:
    """Logits that predict each candidate's tokens, [C, A, V]."""
    candidates, model = len(ids_CA), view.model
    accepted = inspect.signature(model.forward).parameters
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    output = model(prompt_N[None], use_cache=True, **last_only)
    first_1V = output.logits[:, -1:]
    if ids_CA.shape[1] == 1:
        return first_1V.expand(candidates, -1, -1)
    name = "cache" if "cache" in accepted else "past_key_values"
    cache: Any = dict(output).get(name)
    if not _plain(cache):
        logits = [model(torch.cat([prompt_N, ids_A[:-1]])[None], use_cache=False).logits for ids_A in ids_CA]
        return torch.cat([part[:, len(prompt_N) - 1 :] for part in logits])
    cache.batch_repeat_interleave(candidates)
    rest_CAV = model(ids_CA[:, :-1], use_cache=True, **{name: cache}).logits
    return torch.cat([first_1V.expand(candidates, -1, -1), rest_CAV], dim=1)


def _plain(cache: Any) -> bool:
    """True for a cache that can be copied for several continuations: keys and values of every layer, windows included."""
    return isinstance(cache, DynamicCache) and all(isinstance(layer, DynamicLayer) for layer in cache.layers)
