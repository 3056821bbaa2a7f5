"""Looking into the papers' claims for any pair: in-context learning, contradicted contexts, activation outliers.

The first two need a model that reads prose. The language of `dexviz.retrieval` has no word that they use, so for its models
they are refused, and activations are read on sequences of that language. Their texts are read by each model's own tokenizer;
activations are compared on the same tokens, so two models with different tokenizers are refused there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event

import numpy as np

from dexviz.battery import speaks_retrieval
from dexviz.claims_records import CONTRADICTION, IN_CONTEXT, OUTLIERS, ClaimsReport, ClaimsRequest
from dexviz.contradictions import contradictions
from dexviz.errors import Cancelled, DexvizError, EvaluationError
from dexviz.heldout import PROTOCOL, held_out_blocks
from dexviz.incontext import in_context
from dexviz.models import ModelPair
from dexviz.outliers import outliers
from dexviz.provenance import of_pair, second_view
from dexviz.questions import Progress
from dexviz.retrieval import FACT, MOST_FACTS, WORDS, draw

_PROSE = {IN_CONTEXT: "examples and items", CONTRADICTION: "contexts and questions"}


def noise_claims(
    pair: ModelPair, request: ClaimsRequest | None = None, *, progress: Progress | None = None, cancel: Event | None = None
) -> ClaimsReport:
    """Measure the claims that are asked for, in base and variant; without a variant, in the base alone.

    Args:
        progress: called with what is measured, the steps done and their number.
        cancel: set it from another thread to stop at the next step.

    Raises:
        EvaluationError, ModelError: none of the claims can be looked into in this pair, and why the first cannot; no tokenizer.
        PromptError: the models' context is too short, or their tokenizer cannot tell answers apart.
        Cancelled: `cancel` was set.
    """
    request = request or ClaimsRequest()
    start = time.perf_counter()
    refused = _refused(pair, request)
    wanted = [claim for claim in request.claims if claim not in refused]
    base, variant, draws, step = pair.base, second_view(pair), request.bootstrap(), _step(progress, cancel)
    answered = contradiction = activations = None
    if IN_CONTEXT in wanted:
        answered = in_context(base, variant, orders=request.orders, seed=request.seed, bootstrap=draws, progress=step)
    if CONTRADICTION in wanted:
        contradiction = contradictions(base, variant, bootstrap=draws, progress=step)
    if OUTLIERS in wanted:
        prompts, source = _prompts(pair, request)
        activations = outliers(base, variant, prompts, source, bootstrap=draws, progress=step)
    provenance = {**of_pair(pair), "seconds": round(time.perf_counter() - start, 3)}
    return ClaimsReport(request, answered, contradiction, activations, refused, provenance)


def _refused(pair: ModelPair, request: ClaimsRequest) -> dict[str, str]:
    """Claims that the pair cannot be asked about → why.

    Raises:
        DexvizError: the first of them, where nothing is left.
    """
    errors: dict[str, DexvizError] = {}
    for claim in dict.fromkeys(request.claims):
        try:
            _check(pair, claim)
        except DexvizError as error:
            errors[claim] = error
    if len(errors) == len(set(request.claims)):
        raise next(iter(errors.values()))
    return {claim: str(error) for claim, error in errors.items()}


def _check(pair: ModelPair, claim: str) -> None:
    if claim == OUTLIERS:
        pair.check_tokenizers()
    for view in (pair.base, pair.variant):
        if claim in _PROSE and speaks_retrieval(view):
            raise EvaluationError(
                f"a model that reads prose, as the {_PROSE[claim]} are written in it",
                f"{view.loaded.name}, whose vocabulary is the {len(WORDS)} words of the retrieval language",
                "Ask for outliers alone.",
            )


def _step(progress: Progress | None, cancel: Event | None) -> Progress:
    def step(name: str, done: int, total: int) -> None:
        if cancel is not None and cancel.is_set():
            raise Cancelled
        if progress is not None:
            progress(name, done, total)

    return step


def _prompts(pair: ModelPair, request: ClaimsRequest) -> tuple[Sequence[np.ndarray], str]:
    """Token ids of the prompts whose activations are read, int64 [N] each, and what they are."""
    tokens = min(request.tokens, pair.base.loaded.max_tokens, pair.variant.loaded.max_tokens)
    if speaks_retrieval(pair.base):
        facts = max(1, min(MOST_FACTS, (tokens - FACT - 1) // FACT))
        return list(draw(np.random.default_rng(request.seed), request.prompts, facts).prompts()), "retrieval language"
    blocks = held_out_blocks(pair.base, tokens)
    chosen = np.unique(np.linspace(0, len(blocks) - 1, min(request.prompts, len(blocks))).round().astype(int))
    return list(blocks[chosen]), PROTOCOL
