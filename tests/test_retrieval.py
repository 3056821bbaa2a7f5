"""The retrieval language: what it promises about every sequence, its tokenizer, and pairs of models that speak it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dexviz.errors import PromptError
from dexviz.retrieval import (
    ADJECTIVES,
    ANIMALS,
    ASK,
    IGNORED,
    MOST_FACTS,
    NUMBERS,
    START,
    WORDS,
    Retrieval,
    draw,
    make_tokenizer,
    text_of,
)


def facts_of(sample: Retrieval, row: int) -> dict[tuple[str, str], str]:
    """Key → value, read off the words."""
    words = [WORDS[i] for i in sample.ids_BN[row]]
    triples = [words[1 + 3 * f : 4 + 3 * f] for f in range(sample.facts)]
    return {(adjective, animal): number for adjective, animal, number in triples}


@settings(max_examples=30, deadline=None)
@given(
    facts=st.integers(1, MOST_FACTS), questions=st.integers(1, MOST_FACTS), similarity=st.floats(0, 1), seed=st.integers(0, 99)
)
def test_every_question_has_one_exact_answer(facts, questions, similarity, seed):
    questions = min(questions, facts)
    sample = draw(np.random.default_rng(seed), 3, facts, questions, similarity)
    assert sample.ids_BN.shape == (3, 1 + 3 * facts + 4 * questions)
    for row in range(3):
        words = [WORDS[i] for i in sample.ids_BN[row]]
        known = facts_of(sample, row)
        assert words[0] == START
        assert len(known) == len(set(known.values())) == facts
        assert all(a in ADJECTIVES and b in ANIMALS and c in NUMBERS for (a, b), c in known.items())
        asked = [words[1 + 3 * facts + 4 * q : 5 + 3 * facts + 4 * q] for q in range(questions)]
        assert all(mark == ASK and known[(adjective, animal)] == number for mark, adjective, animal, number in asked)
        assert len({tuple(question) for question in asked}) == questions
        for q, (*_, number) in enumerate(asked):
            assert words[sample.rows[q] + 1] == words[sample.needles_BQ[row, q]] == WORDS[sample.answers_BQ[row, q]] == number
        assert [WORDS[i] for i in sample.candidates_BF[row]] == list(known.values())


@pytest.mark.parametrize("similarity", [0.0, 0.3, 1.0])
def test_similarity_is_the_share_of_distractors_with_a_word_of_the_asked_key(similarity):
    sample, shares = draw(np.random.default_rng(5), 200, 30, similarity=similarity), []
    for row in range(200):
        known = list(facts_of(sample, row))
        asked = known.pop(sample.asked_BQ[row, 0])
        shares.append(np.mean([(a == asked[0]) + (b == asked[1]) == 1 for a, b in known]))
    assert np.mean(shares) == pytest.approx(similarity, abs=0.03)


def test_answers_stand_anywhere_among_the_facts():
    places = draw(np.random.default_rng(1), 2000, 8).asked_BQ[:, 0]
    counts = np.bincount(places, minlength=8)
    assert counts.min() > 180


def test_a_seed_fixes_everything():
    first, again, other = (draw(np.random.default_rng(seed), 4, 9, 5).ids_BN for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_labels_are_the_answers_alone():
    sample = draw(np.random.default_rng(2), 5, 7, 3)
    labels = sample.labels()
    assert ((labels != IGNORED).sum(axis=1) == 3).all()
    np.testing.assert_array_equal(labels[labels != IGNORED].reshape(5, 3), sample.answers_BQ)
    np.testing.assert_array_equal(labels[labels != IGNORED], sample.ids_BN[labels != IGNORED])


def test_a_prompt_ends_where_the_first_answer_is_due():
    sample = draw(np.random.default_rng(2), 5, 7, 3)
    assert sample.prompts().shape == (5, 3 * 7 + 4)
    np.testing.assert_array_equal(sample.ids_BN[:, sample.prompts().shape[1]], sample.answers_BQ[:, 0])


@pytest.mark.parametrize(
    ("sequences", "facts", "questions", "similarity"),
    [(1, 0, 1, 0.5), (1, 65, 1, 0.5), (1, 4, 5, 0.5), (1, 4, 0, 0.5), (1, 4, 1, 1.5), (0, 4, 1, 0.5), (1, 4, 1, float("nan"))],
)
def test_settings_that_cannot_be_are_refused(sequences, facts, questions, similarity):
    with pytest.raises(PromptError, match=r"1 ≤ questions ≤ facts ≤ 64, a similarity between 0 and 1, got"):
        draw(np.random.default_rng(0), sequences, facts, questions, similarity)


def test_the_tokenizer_reads_what_the_generator_writes(tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    sample = draw(np.random.default_rng(0), 3, 12, 2)
    for ids in sample.ids_BN:
        assert tokenizer(text_of(ids))["input_ids"] == ids.tolist()
        assert tokenizer.decode(ids, skip_special_tokens=True) == text_of(ids)
    assert len(tokenizer) == len(WORDS) == len(set(WORDS))
    assert tokenizer("amber unicorn 42")["input_ids"] == [WORDS.index(w) for w in (START, "amber", "<unk>", "42")]


def test_labels_of_a_prompt_are_its_words():
    from dexviz.tokens import tokenize

    tokens = tokenize(make_tokenizer(), "amber fox 42 ? amber fox")
    assert [label.strip("␣") for label in tokens.labels] == [START, "amber", "fox", "42", "?", "amber", "fox"]
    assert tokens.text[slice(*tokens.offsets[3])] == "42"
