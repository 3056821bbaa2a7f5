"""The pair of models that speak the retrieval language: same size, same data, training that can be stopped, its page."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import retrieval_measure, retrieval_page, retrieval_pair
from benchmarks.retrieval_measure import SELECTION, measure
from benchmarks.retrieval_page import compare, write_page
from benchmarks.retrieval_training import CHECKPOINT, KINDS, Recipe, build, losses, sequences, train
from dexviz.models import load_model, load_pair
from dexviz.recorder import capture
from dexviz.records import CaptureRequest
from dexviz.retrieval import draw, text_of

TINY = Recipe(
    hidden=16,
    heads=4,
    intermediate=32,
    steps=40,
    tokens=256,
    first_facts=4,
    most_facts=4,
    rate=1e-2,
    warmup=5,
    fade_from=20,
    fade_to=30,
    checkpoint_every=20,
)
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_both_models_have_as_many_parameters():
    llama, diff = (sum(p.numel() for p in build(kind, Recipe(), 0).parameters()) for kind in KINDS)
    assert abs(diff / llama - 1) < 1e-3
    assert diff > llama, "λ is what DIFF adds"
    assert 4 * diff < 4e6, "a model that ships is a few MB"


def test_both_models_read_the_same_and_seeds_differ():
    first, again, other, later = (sequences(Recipe(), seed, step).ids_BN for seed, step in ((0, 7), (0, 7), (1, 7), (0, 8)))
    np.testing.assert_array_equal(first, again)
    assert all(first.shape != x.shape or (first != x).any() for x in (other, later))


def test_facts_grow_to_what_the_recipe_says():
    recipe, random = Recipe(first_facts=4, most_facts=48, grow_from=10, grow_to=100), np.random.default_rng(0)
    early, late = ([recipe.facts(random, step) for _ in range(400)] for step in (5, 100))
    assert (min(early), max(early)) == (2, 4)
    assert (min(late), max(late)) == (2, 48)
    assert 160 < late.count(48) < 240, "half of the steps are as hard as allowed"
    assert sequences(recipe, 0, 3).ids_BN.size <= recipe.tokens


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    recipe = Recipe(steps=1000, warmup=100)
    assert recipe.learning_rate(50) == pytest.approx(recipe.rate / 2, rel=0.02)
    assert recipe.learning_rate(1000) == pytest.approx(recipe.rate / 10)


def test_the_helping_losses_fade():
    recipe = Recipe(fade_from=10, fade_to=20)
    assert [recipe.help_weight(step) for step in (1, 10, 15, 20, 30)] == [1.0, 1.0, 0.5, 0.0, 0.0]


@every_kind
def test_losses_are_those_of_answers_of_keys_and_of_the_words_before(kind):
    model, sample = build(kind, TINY, 0).double(), draw(np.random.default_rng(0), 3, 4, 2)
    ids = sample.ids_BN
    with torch.no_grad():
        mine = losses(model, sample)
        found = model(torch.from_numpy(ids), output_hidden_states=True)
        low = model.lm_head(model.model.norm(found.hidden_states[1]))
    after, before = (logits.log_softmax(-1).numpy() for logits in (found.logits, low))
    answers = [after[b, row, ids[b, row + 1]] for b in range(3) for row in sample.rows]
    keys = [after[b, row - 1, ids[b, row]] for b in range(3) for row in sample.rows]
    back = [before[b, n, ids[b, n - k]] for b in range(3) for n in range(2, ids.shape[1]) for k in (1, 2)]
    assert float(mine.answers) == pytest.approx(-np.mean(answers), rel=1e-9)
    assert float(mine.key) == pytest.approx(-np.mean(keys), rel=1e-9)
    assert float(mine.back) == pytest.approx(-np.mean(back), rel=1e-9)
    assert float(mine.total(0.25)) == pytest.approx(-np.mean(answers) - 0.25 * (np.mean(keys) + np.mean(back)), rel=1e-9)


@every_kind
def test_training_lowers_the_loss_and_goes_on_to_the_same_weights(kind, tmp_path):
    lines: list[dict] = []
    whole = train(kind, 0, TINY, tmp_path / "whole", lines.append)
    early, late = (sum(line[part] for part in ("loss", "key", "back")) for line in (lines[0], lines[-1]))
    assert late < early - 0.2

    class Stopped(Exception):
        pass

    def stop(line: dict) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        train(kind, 0, TINY, tmp_path / "parts", stop)
    assert (tmp_path / "parts" / CHECKPOINT).is_file()
    later: list[dict] = []
    resumed = train(kind, 0, TINY, tmp_path / "parts", later.append)
    assert [line["step"] for line in later] == [40]
    for (name, mine), expected in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected), name
    logs = [(tmp_path / run / "training_log.jsonl").read_text() for run in ("whole", "parts")]
    assert logs[0] == logs[1]


def test_a_checkpoint_of_another_recipe_is_passed_over(tmp_path):
    train("llama", 0, TINY, tmp_path)
    lines: list[dict] = []
    train("llama", 0, replace(TINY, rate=1e-3), tmp_path, lines.append)
    assert [line["step"] for line in lines] == [20, 40]


@pytest.fixture(autouse=True)
def _one_thread():
    """As the runs have it; tiny models are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of both kinds, trained for a moment, for one seed."""
    runs = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        train(kind, 0, replace(TINY, steps=20), runs / f"{kind}-0")
    return runs


def test_the_two_folders_are_a_pair(trained):
    """A Llama beside a DiffLlama: two different models with one tokenizer."""
    pair = load_pair(str(trained / "llama-0"), variant=str(trained / "diffllama-0"), device="cpu")
    tokens = pair.tokenize("amber fox 42 calm owl 17 ? amber fox")
    assert tokens.labels[1:4] == ("amber", "fox", "42")
    base, variant = (capture(view, tokens, CaptureRequest(maps=((0, 1),))) for view in (pair.base, pair.variant))
    assert base.stats["entropy"].shape == (2, 4, 10)
    assert variant.stats["entropy"].shape == (2, 2, 10)
    assert not base.lam.any()
    assert variant.lam == pytest.approx(pair.variant.lambdas())
    np.testing.assert_allclose(variant.stats["net"], np.broadcast_to(1 - variant.lam[:, None, None], (2, 2, 10)), atol=1e-5)
    assert variant.provenance["pairing"] == "p, p + H/2"


def test_attention_on_answers_is_that_of_the_last_row(trained):
    loaded = load_model(str(trained / "diffllama-0"), device="cpu")
    pair = load_pair(str(trained / "diffllama-0"), device="cpu")
    sample = draw(np.random.default_rng(0), 2, 5)
    found = retrieval_measure.attention_on_answers(retrieval_measure.make_pair(loaded).base, sample, "signed")
    for i, ids in enumerate(sample.prompts()):
        cap = capture(pair.base, pair.tokenize(text_of(ids)), CaptureRequest(maps=((1, 0),)))
        size = np.abs(cap.maps[(1, 0)].scores[-1].astype(np.float64))
        at = int(sample.needles_BQ[i, 0])
        shares = size / size.sum()
        others = [j for j in range(1, 1 + 3 * 5) if j not in (at, at + 1)]
        assert found["answer"][i][1][0] == pytest.approx(shares[at : at + 2].sum(), abs=1e-5)
        assert found["snr"][i][1][0] == pytest.approx(shares[at : at + 2].mean() / shares[others].mean(), rel=1e-3, abs=1e-4)


def test_outliers_are_those_of_the_hidden_states(trained):
    loaded = load_model(str(trained / "llama-0"), device="cpu")
    sample = draw(np.random.default_rng(0), 2, 5)
    found = retrieval_measure.outliers(retrieval_measure.make_pair(loaded).base, sample)
    with torch.no_grad():
        states = loaded.model(torch.from_numpy(sample.prompts()), output_hidden_states=True).hidden_states[1:]
    for layer, state in enumerate(states):
        x = state[1].double().numpy().ravel()
        assert found["largest"][1][layer] == pytest.approx(np.abs(x).max(), rel=1e-4)
        assert found["kurtosis"][1][layer] == pytest.approx(((x - x.mean()) ** 4).mean() / x.var() ** 2, rel=1e-3)
    assert np.array(found["logit"]).shape == (2, 2)


def test_the_page_states_what_was_measured(trained, tmp_path, monkeypatch):
    for module in (retrieval_measure, retrieval_page):
        monkeypatch.setattr(module, "CAPTURED", 3)
        monkeypatch.setattr(module, "ANSWERED", 20)
    for kind in KINDS:
        found = {"seconds": 60.0, **measure(load_model(str(trained / f"{kind}-0"), device="cpu"))}
        (tmp_path / f"{kind}-0").mkdir()
        (tmp_path / f"{kind}-0" / "measured.json").write_text(json.dumps(found))
        if kind == "llama":
            right = found["right"]["32"]
    write_page(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| 32 |"))
    assert row.split("|")[2].split()[0] == f"{np.mean(right):.3g}"
    assert "heads of a layer less alike" in text
    assert all(len(line) < 400 for line in text.splitlines())


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.4, 0.5], "holds"),
        ([-0.4, -0.5], "the opposite is seen"),
        ([0.5, -0.1], "not decided"),
        ([0.5, 0.0], "in the mean; 1 of 2 seeds beyond chance"),
        ([0.0, 0.0], "no difference seen"),
    ],
)
def test_a_claim_holds_only_beyond_chance_and_in_every_seed(differences, expected):
    noise = np.random.default_rng(0).normal(size=60) * 0.2
    found = {seed: ({"x": noise}, {"x": noise + difference}) for seed, difference in enumerate(differences)}
    assert compare(found, lambda run: run["x"]).verdict(1) == expected


def test_without_runs_the_page_says_how_to_make_them(tmp_path):
    with pytest.raises(SystemExit, match=r"run python -m benchmarks\.retrieval_pair"):
        write_page(tmp_path, tmp_path / "page.md")


def test_the_best_head_is_chosen_on_other_prompts(monkeypatch):
    monkeypatch.setattr(retrieval_page, "CAPTURED", 1)
    run = {"attention": {SELECTION: {"answer": [[[0.1, 0.7]]]}, "4": {"answer": [[[0.9, 0.2]]]}}}
    assert retrieval_page.best_head("answer", 4)(run) == pytest.approx([0.2])


def test_the_two_models_of_a_seed_run_side_by_side():
    assert retrieval_pair.names()[:2] == ["llama-0", "diffllama-0"]
    assert len(retrieval_pair.names()) == 6
