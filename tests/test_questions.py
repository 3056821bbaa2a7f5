"""Scores of answers against plain forward passes over whole sequences, one at a time, normalised in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dexviz import questions
from dexviz.errors import PromptError
from dexviz.models import ModelPair
from dexviz.parts import encode, encode_answers, start_ids
from dexviz.questions import log_likelihoods_after, score
from tests.readers import byte_pair, byte_tokenizer, log_probabilities

TOKENIZER = byte_tokenizer()
CONTEXT = encode(TOKENIZER, "Word: oak\nKind: plant\n\nWord: dog\nKind: animal\n\n")
STEMS = tuple(encode(TOKENIZER, text) for text in ("", "Word: rose\nKind:", "Word: a whale in the sea\nKind:"))
ANSWERS = (("plant", "animal"), ("x", "xy", "animal"), ("q", "z"))
FAMILIES = ("llama", "gpt2", "mistral")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return byte_pair(request.param, tmp_path_factory.mktemp("dex"))


def expected(pair: ModelPair, variant: bool) -> list[list[float]]:
    """Sums of log-probabilities, from one forward pass for each candidate."""
    view = pair.variant if variant else pair.base
    scores = []
    for stem, answers in zip(STEMS, ANSWERS, strict=True):
        row = []
        for answer in encode_answers(TOKENIZER, answers):
            ids = np.concatenate([CONTEXT, stem, answer])
            with view.active():
                log = log_probabilities(view.model, ids)
            row.append(sum(log[len(ids) - len(answer) + k - 1, token] for k, token in enumerate(answer)))
        scores.append(row)
    return scores


@pytest.mark.parametrize("variant", [False, True], ids=["base", "variant"])
@pytest.mark.parametrize("batch", [questions._BATCH_TOKENS, 40], ids=["one batch", "several"])
def test_scores_after_a_shared_context(pair: ModelPair, variant: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_BATCH_TOKENS", batch)
    view = pair.variant if variant else pair.base
    got = log_likelihoods_after(view, CONTEXT, STEMS, [encode_answers(TOKENIZER, answers) for answers in ANSWERS])
    for ours, theirs in zip(got, expected(pair, variant), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)


def test_models_without_a_plain_cache(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_plain", lambda cache: False)
    got = log_likelihoods_after(pair.base, CONTEXT, STEMS, [encode_answers(TOKENIZER, answers) for answers in ANSWERS])
    for ours, theirs in zip(got, expected(pair, False), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)


def test_a_batch_never_holds_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_BATCH_TOKENS", 12)
    monkeypatch.setattr(questions, "_CACHED_TOKENS", 36)
    paths = [(1,) * n for n in (3, 0, 5, 1, 20, 4, 2, 1)]
    for context, fewest in ((1, 4), (15, 6), (50, 8)):
        batches = list(questions._batches(paths, context))
        assert sorted(path for batch in batches for path in batch) == sorted(paths)
        assert len(batches) == fewest
        for batch in batches:
            longest = max(map(len, batch))
            assert len(batch) == 1 or (len(batch) * longest <= 12 and len(batch) * (context + longest) <= 36)


def test_questions_longer_than_the_model_reads(tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path, context=len(CONTEXT) + 3)
    assert np.isfinite(log_likelihoods_after(pair.base, CONTEXT, [CONTEXT[:0]], [encode_answers(TOKENIZER, ["abc"])])[0]).all()
    with pytest.raises(PromptError, match=f"questions of at most {len(CONTEXT) + 3} tokens, got {len(CONTEXT) + 4}"):
        log_likelihoods_after(pair.base, CONTEXT, [CONTEXT[:0]], [encode_answers(TOKENIZER, ["abcd"])])


def test_answers_that_a_tokenizer_mixes_up() -> None:
    with pytest.raises(PromptError, match="a tokenizer that tells answers apart, got the same tokens for some of a, b, a"):
        encode_answers(TOKENIZER, ["a", "b", "a"])
    assert start_ids(TOKENIZER).tolist() == []


def test_progress_of_scores(tmp_path: Path) -> None:
    class Asked:
        ids, candidates = CONTEXT, encode_answers(TOKENIZER, ("plant", "animal"))

    steps: list[tuple[int, int]] = []
    scores = score(byte_pair("llama", tmp_path).base, [Asked(), Asked()], lambda done, total: steps.append((done, total)))
    assert scores.shape == (2, 2)
    assert steps == [(1, 2), (2, 2)]
