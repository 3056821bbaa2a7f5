"""A made-up language of retrieval: facts about named things, then questions about some of them. Its answers are exact.

    <s> amber fox 42 quiet owl 17 amber heron 60 … ? amber fox 42 ? quiet owl 17

A fact is three words: an adjective, an animal and a number. The two first words together are its key, the number its value. A
question repeats a key after "?", and the next word must be that key's value. Every key and every value of a sequence occurs in
one fact only. Facts that are not asked for are distractors. A distractor is *similar* to the first key that is asked when it
shares one of its two words, so that a model has to match both: attention that follows one word alone lands on distractors.

Axes: B sequences, N tokens, F facts, Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dexviz.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START, ASK, UNKNOWN = "<s>", "?", "<unk>"
# fmt: off
ADJECTIVES = (
    "amber", "bold", "calm", "dusty", "eager", "faded", "gentle", "hollow", "icy", "jolly", "keen", "lucky", "misty",
    "narrow", "olive", "pale", "quiet", "rusty", "silver", "tidy", "upper", "vivid", "warm", "young",
)
ANIMALS = (
    "ant", "bear", "crow", "deer", "eel", "fox", "goat", "heron", "ibis", "jay", "koala", "lynx", "mole", "newt", "owl",
    "pig", "quail", "rat", "seal", "toad", "urchin", "vole", "wolf", "yak",
)
# fmt: on
NUMBERS = tuple(str(number) for number in range(10, 74))
WORDS = (UNKNOWN, START, ASK, *ADJECTIVES, *ANIMALS, *NUMBERS)
"""The whole vocabulary; a word's place is its token id."""
FACT, QUESTION = 3, 4
"""Tokens of a fact, and of a question with its answer."""
MOST_FACTS = len(NUMBERS)
IGNORED = -100
"""Label of tokens that a loss leaves out."""
_FIRST = tuple(WORDS.index(words[0]) for words in (ADJECTIVES, ANIMALS, NUMBERS))


@dataclass(frozen=True)
class Retrieval:
    """Sequences with the same number of facts and of questions."""

    ids_BN: np.ndarray
    """Token ids, int64; N = 1 + 3 F + 4 Q, the last answer included."""
    asked_BQ: np.ndarray
    """Which fact each question asks for, int64; no fact twice in a sequence."""
    facts: int

    @property
    def rows(self) -> np.ndarray:
        """Positions whose next token is an answer: int64 [Q]."""
        return 1 + FACT * self.facts + QUESTION * np.arange(self.asked_BQ.shape[1]) + 2

    @property
    def needles_BQ(self) -> np.ndarray:
        """Positions of the answers within their facts, int64."""
        return 1 + FACT * self.asked_BQ + 2

    @property
    def answers_BQ(self) -> np.ndarray:
        """Token ids of the answers, int64."""
        return self.ids_BN[:, self.rows + 1]

    @property
    def candidates_BF(self) -> np.ndarray:
        """Token ids of all values that the facts give, in their order, int64."""
        return self.ids_BN[:, 3 : 1 + FACT * self.facts : FACT]

    def labels(self) -> np.ndarray:
        """What a causal language model is trained on: the answers, `IGNORED` elsewhere; int64 [B, N]."""
        labels = np.full_like(self.ids_BN, IGNORED)
        labels[:, self.rows + 1] = self.answers_BQ
        return labels

    def prompts(self) -> np.ndarray:
        """Facts and the first question without its answer, int64 [B, 3 F + 4]."""
        return self.ids_BN[:, : self.rows[0] + 1]


def draw(random: np.random.Generator, sequences: int, facts: int, questions: int = 1, similarity: float = 0.5) -> Retrieval:
    """Sequences of the language.

    Args:
        facts: facts a sequence, 1 to 64; one of them is asked first, the others are its distractors.
        questions: how many of the facts are asked, each once.
        similarity: probability that a distractor shares a word with the first key that is asked; as there are 46 such keys,
            sequences of very many facts hold fewer.

    Raises:
        PromptError: more facts than numbers, more questions than facts, or a similarity that is no probability.
    """
    if not 1 <= questions <= facts <= MOST_FACTS or not 0 <= similarity <= 1 or sequences < 1:
        raise PromptError(
            f"at least one sequence, 1 ≤ questions ≤ facts ≤ {MOST_FACTS}, a similarity between 0 and 1",
            f"{sequences} sequences, {questions} questions, {facts} facts, similarity {similarity}",
            "Correct the settings of the retrieval language.",
        )
    keys_BF2 = np.stack([_keys(random, facts, similarity) for _ in range(sequences)])
    values_BF = np.argsort(random.random((sequences, len(NUMBERS))), axis=1)[:, :facts]
    facts_BF3 = np.concatenate([keys_BF2, values_BF[..., None]], axis=-1) + np.array(_FIRST)
    order_BF = np.argsort(random.random((sequences, facts)), axis=1)
    placed_BF3 = np.take_along_axis(facts_BF3, order_BF[..., None], axis=1)
    asked_BQ = _asked(random, order_BF, questions)
    asked_BQ3 = np.take_along_axis(placed_BF3, asked_BQ[..., None], axis=1)
    marks_BQ1 = np.full((*asked_BQ.shape, 1), WORDS.index(ASK))
    start_B1 = np.full((sequences, 1), WORDS.index(START))
    parts = start_B1, placed_BF3.reshape(sequences, -1), np.concatenate([marks_BQ1, asked_BQ3], -1).reshape(sequences, -1)
    return Retrieval(np.concatenate(parts, axis=1).astype(np.int64), asked_BQ.astype(np.int64), facts)


def _keys(random: np.random.Generator, facts: int, similarity: float) -> np.ndarray:
    """Different keys, int64 [F, 2] as places in the word lists; the first is the one that will be asked."""
    adjectives, animals = len(ADJECTIVES), len(ANIMALS)
    first = int(random.integers(adjectives)), int(random.integers(animals))
    other_adjectives, other_animals = np.delete(np.arange(adjectives), first[0]), np.delete(np.arange(animals), first[1])
    near = [(first[0], animal) for animal in other_animals] + [(adjective, first[1]) for adjective in other_adjectives]
    similar = min(int(random.binomial(facts - 1, similarity)), len(near))
    chosen_near = np.array(near)[random.permutation(len(near))[:similar]]
    far = random.permutation(len(other_adjectives) * len(other_animals))[: facts - 1 - similar]
    chosen_far = np.stack([other_adjectives[far // len(other_animals)], other_animals[far % len(other_animals)]], axis=1)
    return np.concatenate([np.array([first]), chosen_near, chosen_far])


def _asked(random: np.random.Generator, order_BF: np.ndarray, questions: int) -> np.ndarray:
    """Places of the facts that are asked, [B, Q]: the one whose key came first, then any others."""
    rank_BF = random.random(order_BF.shape)
    rank_BF[order_BF == 0] = -1.0
    return np.argsort(rank_BF, axis=1)[:, :questions]


def text_of(ids: Sequence[int] | np.ndarray) -> str:
    """Words of token ids, with spaces between; the start token, which the tokenizer puts there itself, is left out."""
    words = [WORDS[int(i)] for i in ids]
    return " ".join(words[1:] if words[:1] == [START] else words)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The language's tokenizer: one token a word, `<s>` before the first; other words become `<unk>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, vocabulary[START])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def save_tokenizer(folder: Path | str) -> None:
    """Write the tokenizer's files beside a model's, as transformers reads them."""
    make_tokenizer().save_pretrained(str(folder))
