"""The papers' claims: items, scores against plain forward passes, statistics against numpy, refusals, and the engine's way."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dexviz import claims, noise_claims
from dexviz.bootstrap import Bootstrap
from dexviz.claims_records import CLAIMS, ClaimsReport, ClaimsRequest
from dexviz.context_questions import AMONG_SOURCES, KINDS, QUESTIONS
from dexviz.contradictions import contradictions, log_odds
from dexviz.engine import LocalEngine
from dexviz.errors import Cancelled, EvaluationError, ModelError, PromptError
from dexviz.heldout import PROTOCOL
from dexviz.incontext import in_context, make_trial, measure
from dexviz.incontext_tasks import TASKS, Task
from dexviz.models import ModelPair, View, make_pair, wrap_model
from dexviz.requests import CheckClaims, PairSpec, from_json, to_json
from dexviz.retrieval import WORDS, make_tokenizer, save_tokenizer
from tests.adapters import tiny_model
from tests.families import build
from tests.readers import byte_pair, byte_tokenizer, log_probabilities

TOKENIZER = byte_tokenizer()
SMALL = Task(
    "size",
    "Thing",
    "Size",
    (("big", ("a house", "a ship")), ("small", ("a nail", "a pea"))),
    (("big", ("a whale", "a tower", "the sun")), ("small", ("an ant", "a crumb", "a seed"))),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return byte_pair("llama", tmp_path_factory.mktemp("dex"), lam=0.9)


@pytest.fixture(scope="module")
def report(pair: ModelPair) -> ClaimsReport:
    return noise_claims(pair, ClaimsRequest(orders=2, prompts=2, tokens=64, resamples=200))


def likelihoods(view: View, prompt: str, answers: tuple[str, ...]) -> list[float]:
    """Log-likelihoods of answers from one plain forward pass each."""
    scores = []
    for answer in answers:
        start, ids = (np.asarray(TOKENIZER(text)["input_ids"]) for text in (prompt, f"{prompt} {answer}"))
        with view.active():
            log = log_probabilities(view.model, ids)
        scores.append(sum(log[at - 1, ids[at]] for at in range(len(start), len(ids))))
    return scores


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_tasks_are_balanced_and_large_enough(task: Task) -> None:
    counts = {len(texts) for _, texts in task.tests}, {len(texts) for _, texts in task.examples}
    texts = [text for group in (task.tests, task.examples) for _, texts in group for text in texts]
    assert tuple(map(len, counts)) == (1, 1)
    assert [label for label, _ in task.examples] == list(task.labels)
    assert sum(len(texts) for _, texts in task.tests) >= 24
    assert len(set(texts)) == len(texts)


def test_contextual_questions_hold_what_they_name() -> None:
    places = []
    for each in QUESTIONS:
        found = [each.context.lower().find(candidate.lower()) for candidate in each.candidates]
        assert found[0] >= 0, each
        assert len(set(each.candidates)) == 3
        if each.kind == AMONG_SOURCES:
            assert min(found) >= 0, each
            places.append(sorted(found).index(found[0]))
    assert len(QUESTIONS) >= 32
    assert len({each.text for each in QUESTIONS}) == len(QUESTIONS)
    assert [places.count(place) for place in range(3)] == [len(places) / 3] * 3


def test_orders_hold_the_same_examples() -> None:
    trial = make_trial(TOKENIZER, SMALL, 5, seed=3)
    decoded = [TOKENIZER.decode(ids) for ids in trial.contexts]
    assert len(set(decoded)) == 5
    assert len({tuple(sorted(text.split("\n\n"))) for text in decoded}) == 1
    assert "Thing: a nail\nSize: small\n\n" in decoded[0]
    assert TOKENIZER.decode(trial.stems[0]) == "Thing: a whale\nSize:"
    again, other = (make_trial(TOKENIZER, SMALL, 5, seed) for seed in (3, 4))
    assert [ids.tolist() for ids in again.contexts] == [ids.tolist() for ids in trial.contexts]
    assert [ids.tolist() for ids in other.contexts] != [ids.tolist() for ids in trial.contexts]


def test_right_answers_are_those_of_plain_forward_passes(pair: ModelPair) -> None:
    trial = make_trial(TOKENIZER, SMALL, 3, seed=0)
    rights = []
    for view in (pair.base, pair.variant):
        (right_IO,) = measure(view, [trial])
        items = [(text, label) for label, texts in SMALL.tests for text in texts]
        for o, context in enumerate(trial.contexts):
            for i, (text, label) in enumerate(items):
                scores = likelihoods(view, TOKENIZER.decode(context) + SMALL.asked(text), SMALL.labels)
                assert right_IO[i, o] == (np.argmax(scores) == SMALL.labels.index(label))
        rights.append(right_IO)
    rows = in_context(pair.base, pair.variant, orders=3, tasks=[SMALL, SMALL])
    for row in rows:
        for right_IO, got, name in zip(rights, (row.base, row.variant), ("base", "variant"), strict=True):
            accuracy = right_IO.mean(axis=0)
            assert got == pytest.approx(accuracy)
            assert getattr(row.accuracy, name).mean == pytest.approx(accuracy.mean())
            assert getattr(row.spread, name).mean == pytest.approx(np.ptp(accuracy))
            assert getattr(row.deviation, name).mean == pytest.approx(accuracy.std())
        assert row.spread.change.mean == pytest.approx(row.spread.variant.mean - row.spread.base.mean)
    assert [(row.task, row.items, row.chance) for row in rows] == [(None, 12, 0.5), ("size", 6, 0.5), ("size", 6, 0.5)]


def test_intervals_are_drawn_over_items_in_pairs(pair: ModelPair) -> None:
    (row, _) = in_context(pair.base, pair.base, orders=4, tasks=[SMALL])
    for name in ("accuracy", "spread", "deviation"):
        change = getattr(row, name).change
        assert (change.mean, change.low, change.high) == (0, 0, 0)
    (right_IO,) = measure(pair.base, [make_trial(TOKENIZER, SMALL, 4, seed=0)])
    draw = np.random.default_rng(1)
    resamples = []
    for chosen in draw.integers(6, size=(5000, 6)):
        big, small = chosen[chosen < 3], chosen[chosen >= 3]
        if len(big) and len(small):
            resamples.append((right_IO[big].mean(axis=0) + right_IO[small].mean(axis=0)) / 2)
    drawn = np.array(resamples)
    for name, values in (("accuracy", drawn.mean(axis=1)), ("spread", np.ptp(drawn, axis=1)), ("deviation", drawn.std(axis=1))):
        found = getattr(row, name).base
        assert (found.low, found.high) == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=0.06), name
        assert (found.units, found.unit) == (6, "test item")


def test_contextual_questions_are_scored_as_by_plain_forward_passes(pair: ModelPair) -> None:
    questions = [*QUESTIONS[:3], *QUESTIONS[-3:]]
    result = contradictions(pair.base, pair.variant, questions=questions, bootstrap=Bootstrap(200))
    odds, wins = [], []
    for view in (pair.base, pair.variant):
        scores = np.array([likelihoods(view, each.text, each.candidates) for each in questions])
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        odds.append(np.log(shares[:, 0] / (1 - shares[:, 0])))
        wins.append(scores.argmax(axis=1) == 0)
    assert result.base == pytest.approx(odds[0], abs=1e-2)
    assert result.variant == pytest.approx(odds[1], abs=1e-2)
    assert [row.kind for row in result.rows] == [None, *KINDS]
    for row, chosen in zip(result.rows, (slice(None), slice(3), slice(3, 6)), strict=True):
        assert row.accuracy.base.mean == wins[0][chosen].mean()
        assert row.accuracy.variant.mean == wins[1][chosen].mean()
        assert row.log_odds.change.mean == pytest.approx((odds[1] - odds[0])[chosen].mean(), abs=1e-2)
        assert row.questions == len(odds[0][chosen])
    assert result.texts[0] == questions[0].text
    assert result.answers[0] == questions[0].candidates


def test_log_odds() -> None:
    p = np.array([[0.2, 0.1, 0.1], [0.5, 0.25, 0.0]])
    with np.errstate(divide="ignore"):
        assert log_odds(np.log(p)) == pytest.approx([0.0, np.log(2)])


def test_a_report_has_all_that_was_asked(report: ClaimsReport, pair: ModelPair) -> None:
    assert [row.task for row in report.in_context] == [None, *(task.name for task in TASKS)]
    assert len(report.contradiction.base) == len(QUESTIONS)
    assert (report.outliers.prompts, report.outliers.tokens, report.outliers.source) == (2, 64, PROTOCOL)
    assert report.refused == {}
    assert report.provenance["seconds"] > 0
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["in_context"][0]["accuracy"]["change"]["units"] == sum(row.items for row in report.in_context[1:])
    assert data["outliers"]["rows"][0]["base"]["top"].keys() == {"1", "2", "3", "10", "100"}
    text = report.table().partition("\n")[2]
    assert "In-context learning: 96 test items after the same examples in 2 orders" in text
    assert "against knowledge (24)" in text
    assert "hidden states" in text
    assert max(map(len, text.splitlines())) <= 110


def test_one_model_alone(pair: ModelPair) -> None:
    alone = ModelPair(pair.base, View("variant", pair.base.loaded))
    found = noise_claims(alone, ClaimsRequest(claims=("outliers",), prompts=2, tokens=32))
    assert (found.in_context, found.contradiction) == (None, None)
    assert found.outliers.rows[0].variant is None
    assert "variant none" in found.table()


@pytest.fixture(scope="module")
def retrieval() -> ModelPair:
    model = build("diffllama", vocab_size=len(WORDS))
    return make_pair(wrap_model(model, make_tokenizer(), name="finder"))


def test_a_model_of_the_retrieval_language_is_asked_about_outliers_alone(retrieval: ModelPair) -> None:
    found = noise_claims(retrieval, ClaimsRequest(prompts=3, tokens=32))
    assert (found.in_context, found.contradiction) == (None, None)
    assert list(found.refused) == ["in-context", "contradiction"]
    expected = "Expected a model that reads prose, as the examples and items are written in it, got finder, whose vocabulary is"
    assert found.refused["in-context"].startswith(expected)
    assert (found.outliers.source, found.outliers.prompts, found.outliers.tokens) == ("retrieval language", 3, 31)
    assert f"Not looked into: contradiction. {found.refused['contradiction']}" in found.table()
    with pytest.raises(EvaluationError, match="got finder, whose vocabulary is the 115 words of the retrieval language"):
        noise_claims(retrieval, ClaimsRequest(claims=("contradiction", "in-context")))


def test_models_that_cannot_be_asked(pair: ModelPair, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a model with a tokenizer"):
        noise_claims(make_pair(wrap_model(build("llama"))), ClaimsRequest(claims=("in-context",)))
    short = byte_pair("llama", tmp_path, context=300)
    with pytest.raises(PromptError, match="questions of at most 300 tokens"):
        noise_claims(short, ClaimsRequest(claims=("in-context",)))
    words = make_pair(wrap_model(build("llama", vocab_size=len(WORDS)), make_tokenizer()))
    other = ModelPair(words.base, pair.base)
    with pytest.raises(ModelError, match="two models with the same tokenizer"):
        noise_claims(other, ClaimsRequest(claims=("outliers",)))


def test_texts_are_read_by_each_models_own_tokenizer(pair: ModelPair, tmp_path: Path) -> None:
    lower = byte_tokenizer()
    lower.add_tokens(["unused"])
    other = make_pair(wrap_model(byte_pair("llama", tmp_path).base.model, lower)).base
    both = ModelPair(pair.base, other)
    found = noise_claims(both, ClaimsRequest(claims=("contradiction", "outliers")))
    assert "two models with the same tokenizer" in found.refused["outliers"]
    assert found.contradiction.variant == found.contradiction.base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": ("in-context", "magic")}, "some of the claims in-context, contradiction, outliers"),
        ({"claims": ()}, "some of the claims"),
        ({"orders": 1}, "2 to 1,000 orders"),
        ({"prompts": 0}, "1 to 1,000 prompts"),
        ({"tokens": 1}, "prompts of at least 2 tokens"),
        ({"seed": -1}, "a seed of 0 or more"),
        ({"resamples": 3}, "at least 100 resamples"),
    ],
)
def test_requests_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        ClaimsRequest(**changes)


def test_the_engines_request_has_the_same_fields() -> None:
    own = {field.name: field.default for field in fields(ClaimsRequest)}
    assert {field.name: field.default for field in fields(CheckClaims) if field.name != "pair"} == own
    request = CheckClaims(PairSpec("a", "b"), CLAIMS[:2], seed=3)
    assert from_json(json.loads(json.dumps(to_json(request)))) == request


def test_claims_through_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "base", "llama")
    save_tokenizer(folder)
    engine = LocalEngine()
    try:
        stages: list[str] = []
        spec = PairSpec(str(folder))
        found = engine.run(
            CheckClaims(spec, ("outliers",), prompts=40, tokens=64), lambda progress: stages.append(progress.stage)
        )
        assert found.outliers.prompts == 40
        ticket = ""

        def stop(*args: Any) -> bool:
            engine.cancel(ticket)
            return speaks(*args)

        speaks = claims.speaks_retrieval
        monkeypatch.setattr(claims, "speaks_retrieval", stop)
        ticket = engine.submit(CheckClaims(spec, ("outliers",), prompts=500, tokens=128))
        with pytest.raises(Cancelled):
            engine.result(ticket, timeout=60)
    finally:
        engine.close()
    assert stages
