"""Batteries of needle prompts: what is asked, numbers against plain loops over prompts and heads, intervals, both languages."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

import dexviz
from dexviz import retrieval
from dexviz.battery import RETRIEVAL_FACTS, noise_battery, prompts_of, speaks_retrieval
from dexviz.bootstrap import Bootstrap
from dexviz.engine import LocalEngine
from dexviz.errors import Cancelled, PromptError
from dexviz.models import ModelPair, make_pair, wrap_model
from dexviz.needle_noise import heads_noise
from dexviz.needles import NeedleMaker
from dexviz.noise_records import MEASURES, BatteryReport, BatteryRequest
from dexviz.requests import PairSpec, RunBattery, from_json, to_json
from tests.families import build
from tests.readers import byte_pair

REQUEST = BatteryRequest(lengths=(700, 760), depths=(0.0, 1.0), per_cell=2, seed=3)
RESAMPLES = Bootstrap(resamples=200, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return byte_pair("llama", tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def report(pair: ModelPair) -> BatteryReport:
    return noise_battery(pair, REQUEST, bootstrap=RESAMPLES)


def retrieval_model(family: str = "llama", seed: int = 0):
    model = build(family, seed, vocab_size=len(retrieval.WORDS))
    return wrap_model(model, retrieval.make_tokenizer(), name=family)


def test_prompts_are_those_of_the_needle_maker(pair, report):
    maker = NeedleMaker(pair.base.loaded.tokenizer, pair.base.loaded.max_tokens)
    for made, record in zip(prompts_of(pair, REQUEST), report.prompts, strict=True):
        needle = maker.make(record.length, record.depth, record.seed)
        np.testing.assert_array_equal(made.ids, needle.ids)
        assert made.needle == needle.needle
        assert made.question == needle.question
        assert record.position == needle.position
        assert (record.kind, record.tokens) == (needle.kind, len(needle.ids))
    assert [(p.length, p.depth) for p in report.prompts] == [(n, d) for n in (700, 760) for d in (0.0, 1.0) for _ in range(2)]
    assert len({p.seed for p in report.prompts}) == 8


def test_numbers_are_means_over_prompts_and_heads_snr_a_ratio_of_means(pair, report):
    made = prompts_of(pair, REQUEST)
    by_view = {view.name: [heads_noise(view, prompt.read()) for prompt in made] for view in (pair.base, pair.variant)}
    for name in MEASURES:
        for view, found in by_view.items():
            mine = getattr(report.heads[name], view).mean
            if name == "snr":
                signal, noise = (np.mean([getattr(f, part) for f in found], axis=0) for part in ("signal", "noise"))
                np.testing.assert_allclose(mine, signal / noise, rtol=1e-9)
                average = signal.mean() / noise.mean()
            else:
                np.testing.assert_allclose(mine, np.mean([getattr(f, name) for f in found], axis=0), atol=1e-12)
                average = np.mean([getattr(f, name) for f in found])
            assert getattr(report.overall.measures[name], view).mean == pytest.approx(average, rel=1e-9)
        parts = report.heads[name]
        np.testing.assert_allclose(parts.change.mean, parts.variant.mean - parts.base.mean, atol=1e-12)
    assert np.abs(report.heads["snr"].change.mean).max() > 0.1


def test_rows_are_all_then_by_length_by_depth_by_cell(report):
    assert [(row.length, row.depth, row.prompts) for row in report.rows] == [
        (None, None, 8),
        (700, None, 4),
        (760, None, 4),
        (None, 0.0, 4),
        (None, 1.0, 4),
        *((n, d, 2) for n in (700, 760) for d in (0.0, 1.0)),
    ]
    assert [row.depth for row in report.by_depth()] == [0.0, 1.0]
    assert [row.length for row in report.by_length()] == [700, 760]
    assert len(report.cells()) == 4
    chosen = [i for i, p in enumerate(report.prompts) if p.depth == 1.0]
    right = [report.prompts[i].right["variant"] for i in chosen]
    answers = [report.prompts[i].answer_log_probability["base"] for i in chosen]
    row = report.by_depth()[1]
    assert row.measures["accuracy"].variant.mean == np.mean(right)
    assert row.measures["answer"].base.mean == pytest.approx(np.mean(answers))


def test_intervals_are_those_of_a_plain_loop_over_resamples(pair, report):
    made = prompts_of(pair, REQUEST)
    base, variant = ([heads_noise(view, prompt.read()) for prompt in made] for view in (pair.base, pair.variant))
    drawn = np.random.default_rng(3).integers(8, size=(200, 8))

    def snr(found, chosen, head=None):
        signal = np.mean([found[i].signal for i in chosen], axis=0)
        noise = np.mean([found[i].noise for i in chosen], axis=0)
        return signal.mean() / noise.mean() if head is None else signal[head] / noise[head]

    for head in (None, (1, 2)):
        plain = np.quantile([snr(variant, c, head) - snr(base, c, head) for c in drawn], [0.025, 0.975])
        change = report.overall.measures["snr"].change if head is None else report.heads["snr"].change
        low, high = (change.low, change.high) if head is None else (change.low[head], change.high[head])
        np.testing.assert_allclose((low, high), plain, rtol=1e-9)


def test_one_prompt_has_no_interval_and_a_base_alone_no_change(pair):
    alone = make_pair(pair.base.loaded)
    found = noise_battery(alone, BatteryRequest(lengths=(700,), depths=(0.5,), per_cell=1))
    snr = found.overall.measures["snr"]
    assert (snr.base.low, snr.base.high, snr.variant, snr.change) == (None, None, None, None)
    assert np.isnan(found.heads["snr"].base.low).all()
    assert found.heads["snr"].variant is None
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["heads"]["snr"]["base"]["low"][0][0] is None
    assert set(data["prompts"][0]["right"]) == {"base"}


def test_a_report_is_json_with_what_made_it(report):
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert BatteryRequest.from_json(data["request"]) == REQUEST
    assert data["language"] == "prose"
    assert data["rows"][0]["snr"]["change"]["mean"] == pytest.approx(report.overall.measures["snr"].change.mean)
    assert data["provenance"]["adapter"]["fingerprint"]
    assert np.array(data["heads"]["negative"]["variant"]["mean"]).shape == (2, 6)


def test_the_retrieval_language_is_asked_in_its_own_words():
    llama, diff = retrieval_model(), retrieval_model("diffllama", 1)
    pair = make_pair(llama, variant=diff)
    assert speaks_retrieval(pair.base)
    request = BatteryRequest(lengths=None, depths=(0.0, 0.4, 1.0), per_cell=2)
    made = prompts_of(pair, request)
    assert sorted({(len(prompt.ids) - 4) // 3 for prompt in made}) == list(RETRIEVAL_FACTS)
    for prompt in made:
        facts = prompt.ids[1 : prompt.question[0]].reshape(-1, 3)
        asked = prompt.ids[prompt.question[0] + 1 :]
        place = [i for i, fact in enumerate(facts) if (fact[:2] == asked).all()]
        assert place == [round(prompt.depth * (len(facts) - 1))]
        assert prompt.needle == (1 + 3 * place[0], 5 + 3 * place[0]), "the fact and the token that follows it"
        assert prompt.candidates[0].tolist() == [facts[place[0], 2]]
        assert sorted(int(c[0]) for c in prompt.candidates) == sorted(facts[:, 2].tolist())
        assert prompt.ids[prompt.question[0]] == retrieval.WORDS.index(retrieval.ASK)
    found = noise_battery(pair, BatteryRequest(lengths=(20, 400), depths=(0.5,), per_cell=3))
    assert found.language == "retrieval"
    assert [row.length for row in found.by_length()] == [19, 196]
    assert found.heads["snr"].base.mean.shape == (2, 6)
    assert found.heads["snr"].variant.mean.shape == (2, 4)
    assert found.heads["snr"].change is None, "the heads of two models are not the same heads"
    assert found.overall.measures["snr"].change is not None
    assert found.overall.measures["negative"].variant.mean > 0
    with torch.no_grad():
        logits = diff.model(torch.from_numpy(prompts_of(pair, found.request)[4].ids)[None]).logits[0, -1].log_softmax(-1)
    made = prompts_of(pair, found.request)[4]
    expected = float(logits[made.candidates[0][0]])
    assert found.prompts[4].answer_log_probability["variant"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": ()}, "lengths of at least one token"),
        ({"lengths": (0,)}, "lengths of at least one token"),
        ({"depths": (1.5,)}, "depths between 0 and 1"),
        ({"depths": ()}, "depths"),
        ({"per_cell": 0}, "at least one prompt a cell, a seed of 0 or more, got .*0 a cell"),
        ({"seed": -1}, "a seed of 0 or more"),
    ],
)
def test_batteries_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(PromptError, match=message):
        BatteryRequest(**settings)


def test_lengths_that_hold_no_needle_are_refused(pair):
    with pytest.raises(PromptError, match="room for facts, question and prose"):
        noise_battery(pair, BatteryRequest(lengths=(50,)))
    with pytest.raises(PromptError, match="prompts of at least 10 tokens, which hold two facts"):
        noise_battery(make_pair(retrieval_model()), BatteryRequest(lengths=(8,)))


def test_progress_counts_prompts_of_both_views_and_cancel_stops(pair):
    seen: list[tuple[str, int, int]] = []
    cancel = Event()

    def note(*step):
        seen.append(step)
        if len(seen) == 3:
            cancel.set()

    with pytest.raises(Cancelled):
        noise_battery(pair, REQUEST, progress=note, cancel=cancel)
    assert [(done, total) for _, done, total in seen] == [(1, 16), (2, 16), (3, 16)]
    assert seen[0][0].startswith("base: ")
    assert seen[1][0].startswith("variant: ")


def test_the_engine_runs_a_battery(tmp_path: Path):
    model = retrieval_model()
    model.model.save_pretrained(tmp_path)
    retrieval.save_tokenizer(tmp_path)
    request = RunBattery(PairSpec(str(tmp_path)), BatteryRequest(lengths=(19,), depths=(0.5,), per_cell=2))
    assert from_json(json.loads(json.dumps(to_json(request)))) == request
    engine = LocalEngine()
    found = engine.run(request)
    engine.close()
    mine = dexviz.noise_battery(dexviz.load_pair(str(tmp_path)), request.battery)
    np.testing.assert_array_equal(found.heads["snr"].base.mean, mine.heads["snr"].base.mean)
    assert found.prompts == mine.prompts
