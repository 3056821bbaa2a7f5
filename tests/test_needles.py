"""Needle prompts: exact spans, what a seed fixes, what is refused; and scores against whole sequences read by stock models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dexviz import questions
from dexviz.bootstrap import Bootstrap
from dexviz.errors import PromptError
from dexviz.merging import merge
from dexviz.needle_scores import summarise
from dexviz.needles import DEPTHS, KINDS, MIN_PROSE, Needle, NeedleMaker
from dexviz.questions import log_likelihoods, score
from tests.readers import CONTEXT, byte_model, byte_pair, byte_tokenizer, log_probabilities

LENGTH = 900
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def maker() -> NeedleMaker:
    return NeedleMaker(TOKENIZER, CONTEXT)


def text(needle: Needle, span: tuple[int, int]) -> str:
    return TOKENIZER.decode(needle.ids[slice(*span)])


@pytest.mark.parametrize("kind", KINDS)
def test_spans_hold_what_they_name(maker: NeedleMaker, kind: str) -> None:
    needle = maker.make(LENGTH, 0.5, seed=3, kind=kind)
    right, fact = needle.values[0], text(needle, needle.needle)
    assert fact.startswith(f" The {kind} of ")
    assert fact.endswith(f" is {right}.")
    assert text(needle, needle.answer) == f" {right}"
    assert needle.ids[slice(*needle.answer)].tolist() == needle.candidates[0].tolist()
    name = fact.removeprefix(f" The {kind} of ").removesuffix(f" is {right}.")
    stem = f"{kind} of {name}"
    assert text(needle, needle.question) == f"\nQuestion: What is the {stem}?\nAnswer: The {stem} is"
    assert needle.question[1] == len(needle.ids)
    for span, value, ids in zip(needle.distractors, needle.values[1:], needle.candidates[1:], strict=True):
        assert text(needle, span).endswith(f" is {value}.")
        assert text(needle, span).startswith(f" The {kind} of ")
        assert name not in text(needle, span)
        assert TOKENIZER.decode(ids) == f" {value}"
    assert len({*needle.values}) == 5


@pytest.mark.parametrize("length", [700, LENGTH, CONTEXT])
def test_prompts_have_the_length_asked_for(maker: NeedleMaker, length: int) -> None:
    needle = maker.make(length, 0.3)
    assert len(needle.ids) + max(map(len, needle.candidates)) == length


def test_only_facts_and_question_are_added_to_the_prose() -> None:
    prose = "".join(f" Sentence number {i} of some prose." for i in range(200))
    needle = NeedleMaker(TOKENIZER, CONTEXT, prose.strip()).make(LENGTH, 0.5)
    rest = np.delete(needle.ids, np.concatenate([np.arange(*s) for s in (needle.needle, needle.question, *needle.distractors)]))
    assert TOKENIZER.decode(rest) in prose


def test_facts_stand_where_they_are_wanted_and_others_around_them(maker: NeedleMaker) -> None:
    needles = maker.grid((CONTEXT,), DEPTHS, 8)
    placed = np.array([needle.position for needle in needles]).reshape(len(DEPTHS), 8)
    assert placed.mean(axis=1) == pytest.approx(DEPTHS, abs=0.07)
    before = [sum(span < needle.needle for span in needle.distractors) for needle in needles]
    assert 0.3 < np.mean(before) / 4 < 0.7


def test_the_right_answer_is_no_favourite_value(maker: NeedleMaker) -> None:
    right = [maker.make(LENGTH, 0.5, seed, "home village").values[0] for seed in range(60)]
    assert len(set(right)) > 7


def test_a_seed_fixes_the_prompt(maker: NeedleMaker) -> None:
    first, again, other = (maker.make(LENGTH, 0.5, seed) for seed in (1, 1, 2))
    assert first.ids.tolist() == NeedleMaker(TOKENIZER, CONTEXT).make(LENGTH, 0.5, 1).ids.tolist() == again.ids.tolist()
    assert first.ids.tolist() != other.ids.tolist()
    prompts = {tuple(needle.ids.tolist()) for needle in maker.grid((700, LENGTH), (0.1, 0.9), 3)}
    assert len(prompts) == 12


def test_lengths_are_cut_to_the_context() -> None:
    assert NeedleMaker(TOKENIZER, 600).lengths((256, 512, 1024, 4096)) == (256, 512, 600)


def test_a_begin_token_comes_first() -> None:
    class Beginning(PreTrainedTokenizerFast):
        def __call__(self, text: str, add_special_tokens: bool = True, **settings: Any) -> Any:
            encoded = super().__call__(text, add_special_tokens=False, **settings)
            return {"input_ids": [self.bos_token_id] * add_special_tokens + encoded["input_ids"]}

    tokenizer = Beginning(tokenizer_object=TOKENIZER.backend_tokenizer, bos_token="<s>")
    needle = NeedleMaker(tokenizer, CONTEXT).make(LENGTH, 0.5)
    assert (needle.ids == tokenizer.bos_token_id).nonzero()[0].tolist() == [0]
    assert text(needle, needle.answer) == f" {needle.values[0]}"


@pytest.mark.parametrize(
    ("length", "depth", "kind", "message"),
    [
        (CONTEXT + 1, 0.5, None, "Expected at most 2,048 tokens, got 2,049"),
        (300, 0.5, None, "room for facts, question and prose"),
        (LENGTH, 1.5, None, "a depth between 0 and 1"),
        (LENGTH, 0.5, "shoe size", "a kind of fact out of"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(
    maker: NeedleMaker, length: int, depth: float, kind: str | None, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        maker.make(length, depth, kind=kind)


def test_the_least_length_is_named(maker: NeedleMaker) -> None:
    with pytest.raises(PromptError, match=r"prose, [0-9]+ tokens") as refused:
        maker.make(1, 0.5)
    least = int(refused.value.expected.split()[-2])
    needle = maker.make(least, 0.5)
    facts = sum(stop - start for start, stop in (needle.needle, needle.question, *needle.distractors))
    assert len(needle.ids) - facts == MIN_PROSE


def test_a_short_text_is_refused() -> None:
    with pytest.raises(PromptError, match=r"Expected a text of .* tokens, got one of 12"):
        NeedleMaker(TOKENIZER, CONTEXT, "Some prose.").make(LENGTH, 0.5)


def test_tokenizers_that_mix_answers_up_are_refused() -> None:
    class Blind(PreTrainedTokenizerFast):
        def __call__(self, text: str, **_: Any) -> Any:
            return {"input_ids": [5] * len(text)}

    blind = Blind(tokenizer_object=TOKENIZER.backend_tokenizer)
    with pytest.raises(PromptError, match="a tokenizer that tells answers apart"):
        NeedleMaker(blind, 4096).make(1000, 0.5, kind="locker number")


def expected_scores(model: Any, needle: Needle) -> list[float]:
    """Log-likelihoods from whole sequences, one at a time."""
    scores = []
    for answer in needle.candidates:
        log = log_probabilities(model, np.concatenate([needle.ids, answer]))
        scores.append(sum(log[len(needle.ids) - 1 + i, token] for i, token in enumerate(answer)))
    return scores


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral", "gemma2"])
def test_scores_are_those_of_whole_sequences(family: str, maker: NeedleMaker, tmp_path: Path) -> None:
    pair, needle = byte_pair(family, tmp_path / "dex"), maker.make(700, 0.5, kind="home village")
    assert len({len(ids) for ids in needle.candidates}) > 1
    base = log_likelihoods(pair.base, needle)
    assert base == pytest.approx(expected_scores(byte_model(family), needle), abs=2e-3)
    merged = AutoModelForCausalLM.from_pretrained(merge(pair.variant, tmp_path / "merged"), attn_implementation="eager")
    variant = log_likelihoods(pair.variant, needle)
    assert variant == pytest.approx(expected_scores(merged.eval(), needle), abs=2e-3)
    assert np.abs(base - variant).max() > 0.05


def test_models_without_a_plain_cache_read_everything_anew(
    maker: NeedleMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, needle = byte_pair("llama", tmp_path), maker.make(700, 0.5, kind="home village")
    cached = log_likelihoods(pair.variant, needle)
    monkeypatch.setattr(questions, "_plain", lambda cache: False)
    assert log_likelihoods(pair.variant, needle) == pytest.approx(cached, abs=1e-3)


def test_bfloat16_models_are_scored(maker: NeedleMaker, tmp_path: Path) -> None:
    needle = maker.make(700, 0.5, kind="home village")
    exact = log_likelihoods(byte_pair("llama", tmp_path / "a").base, needle)
    coarse = log_likelihoods(byte_pair("llama", tmp_path / "b", dtype=torch.bfloat16).base, needle)
    assert coarse == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(("sign", "accuracy"), [(1.0, 1.0), (-1.0, 0.0)])
def test_a_view_that_prefers_the_right_answer_wins(maker: NeedleMaker, tmp_path: Path, sign: float, accuracy: float) -> None:
    """The output row of the right answer's first digit is pushed along the last hidden state, or against it."""
    view = byte_pair("llama", tmp_path, tie_word_embeddings=False).base
    needle = next(n for n in (maker.make(700, 0.5, s, "locker number") for s in range(50)) if distinct_first(n))
    with torch.no_grad():
        state = view.model.model(torch.from_numpy(needle.ids)[None]).last_hidden_state[0, -1]
        view.model.lm_head.weight[int(needle.candidates[0][1])] += sign * 30 * state / state.norm()
    rows = summarise([needle], score(view, [needle]), None, Bootstrap())
    assert rows[0].accuracy.base.mean == accuracy
    assert np.sign(rows[0].margin.base.mean) == sign


def distinct_first(needle: Needle) -> bool:
    """True where no other answer has the right one's first digit anywhere."""
    digit = needle.values[0][0]
    return needle.values[0].count(digit) == 1 and all(digit not in value for value in needle.values[1:])


def test_summaries_by_length_and_depth(maker: NeedleMaker) -> None:
    needles = maker.grid((700, LENGTH), (0.1, 0.9), 2)
    base = np.zeros((8, 5))
    base[:4, 0], base[4:, 2] = 1.0, 3.0
    variant = np.zeros((8, 5))
    variant[::2, 0] = 2.0
    rows = summarise(needles, base, variant, Bootstrap())
    assert [(row.length, row.depth, row.prompts) for row in rows] == [
        (None, None, 8),
        (700, None, 4),
        (LENGTH, None, 4),
        (None, 0.1, 4),
        (None, 0.9, 4),
    ]
    assert [row.accuracy.base.mean for row in rows] == [0.5, 1.0, 0.0, 0.5, 0.5]
    assert [row.margin.base.mean for row in rows] == [-1.0, 1.0, -3.0, -1.0, -1.0]
    assert rows[0].accuracy.variant.mean == 0.5, "ties count as wrong"
    assert rows[1].accuracy.change.mean == -0.5
    assert rows[0].margin.change.mean == 2.0
    assert summarise(needles, base, None, Bootstrap())[0].margin.change is None
