"""Needle prompts: one fact hidden in held-out prose at a chosen depth, other facts of the same kind around it, a question.

    … prose … The locker number of Ada Brandvold is 4182. … prose … The locker number of Tove Quill is 7305. … prose …
    Question: What is the locker number of Tove Quill?
    Answer: The locker number of Tove Quill is                                                   right: 7305, wrong: 4182, …

Every wrong answer is the value that the prose gives for another name, so that neither the only odd word nor the form of the
answer gives the right one away: the model must find the name. Prose, facts and question are tokenised apart and joined as ids,
so that all spans are exact. Names and values are made up from the word lists below; a seed fixes everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dexviz.corpora import held_out_text
from dexviz.errors import PromptError
from dexviz.parts import encode, encode_answers, start_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS = (256, 512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
DISTRACTORS = 4
MIN_PROSE = 32
"""Least prose of a prompt in tokens."""

_FIRST = [
    "Ada",
    "Bruno",
    "Carla",
    "Dmitri",
    "Elsa",
    "Felix",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Katya",
    "Lorenz",
    "Mina",
    "Nils",
    "Olga",
    "Pablo",
    "Rosa",
    "Sven",
    "Tove",
    "Viktor",
]
_LAST = [
    "Abernathy",
    "Brandvold",
    "Castellan",
    "Dunmore",
    "Eklund",
    "Farrow",
    "Grimsby",
    "Halloran",
    "Ivers",
    "Jessup",
    "Kestrel",
    "Lindqvist",
]
_LAST += ["Marchetti", "Norwood", "Oakhurst", "Pemberton", "Quill", "Rosewood", "Sandoval", "Thackeray"]
_WORDS = {
    "favorite instrument": ["banjo", "cello", "clarinet", "drum", "flute", "guitar", "harp", "piano", "trumpet", "violin"],
    "favorite fruit": ["apple", "banana", "cherry", "fig", "grape", "lemon", "mango", "orange", "peach", "plum"],
    "home village": [
        "Abbotsmere",
        "Brackenford",
        "Coldwell",
        "Dunholm",
        "Elverstone",
        "Fenwick",
        "Hartsmoor",
        "Larkhaven",
        "Ravensby",
        "Thornbury",
    ],
}
_COLOURS = ["amber", "black", "blue", "crimson", "golden", "green", "ivory", "purple", "silver", "white"]
_ANIMALS = ["badger", "eagle", "falcon", "fox", "heron", "lynx", "otter", "owl", "raven", "wolf"]
KINDS = (*_WORDS, "locker number", "secret password")
"""What facts are about: words of few tokens, village names of several, four-digit numbers, pairs of words."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, eq=False)
class Needle:
    """One prompt with its candidate answers. Spans are half-open, in tokens of `ids`."""

    ids: np.ndarray
    """The prompt up to the answer, int64 [N]; N and the longest candidate together have `length` tokens."""
    candidates: tuple[np.ndarray, ...]
    """Token ids of the answers, int64 each; the right one first."""
    values: tuple[str, ...]
    """The answers as text, in the order of `candidates`."""
    kind: str
    length: int
    depth: float
    """Where the fact was wanted, as a share of the prose; it stands at the nearest border between sentences."""
    needle: tuple[int, int]
    """The fact that holds the answer."""
    answer: tuple[int, int]
    """The answer's tokens within that fact; they are those of the first candidate."""
    distractors: tuple[tuple[int, int], ...]
    """The facts about other names, in the order of the other candidates."""
    question: tuple[int, int]
    """The question with the beginning of its answer, to the end of the prompt."""

    @property
    def position(self) -> float:
        """Where the fact stands, as a share of the prompt's tokens before the question."""
        return self.needle[0] / self.question[0]


@dataclass(frozen=True, eq=False)
class _Fact:
    """A sentence "The <kind> of <name> is <value>." as ids; `answer` is the half-open span of the value within `ids`."""

    ids: np.ndarray
    answer: tuple[int, int]


class NeedleMaker:
    """Makes needle prompts for one tokenizer out of a text, which it tokenises once, sentence by sentence.

    Args:
        tokenizer: any that turns text into ids; a begin-of-text token that it puts first is kept.
        max_tokens: context length of the model.
        text: the prose; the held-out address if left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, text: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        prose = held_out_text() if text is None else text
        self._sentences = [ids for s in _SENTENCE.split(prose.strip()) if len(ids := self._encode(f" {s}"))]
        self._start = start_ids(tokenizer)

    def lengths(self, wanted: Sequence[int] = LENGTHS) -> tuple[int, ...]:
        """Prompt lengths that the model's context allows: longer ones are cut to it, and none comes twice."""
        return tuple(sorted({min(length, self.max_tokens) for length in wanted}))

    def make(self, length: int, depth: float, seed: int | Sequence[int] = 0, kind: str | None = None) -> Needle:
        """One prompt of `length` tokens, the longest answer included, with the fact at `depth` of its prose.

        Args:
            depth: 0 = before the prose, 1 = after it.
            seed: fixes prose, names, values, kind and the places of the other facts.
            kind: one of `KINDS`; drawn if left out.

        Raises:
            PromptError: the length is over the model's context or too short for facts and question, the depth is not a share,
                the text has too little prose, or the tokenizer cannot tell the answers apart.
        """
        if length > self.max_tokens:
            raise PromptError(f"at most {self.max_tokens:,} tokens", f"{length:,}", "Choose a shorter needle prompt.")
        if not 0 <= depth <= 1:
            raise PromptError("a depth between 0 and 1", str(depth), "Give the depth as a share of the prompt.")
        draw = np.random.default_rng(seed)
        kind = str(draw.choice(KINDS)) if kind is None else kind
        names = _names(draw, DISTRACTORS + 1)
        values = _values(draw, kind, DISTRACTORS + 1)
        candidates = encode_answers(self._tokenizer, values)
        facts = [self._fact(kind, name, answer) for name, answer in zip(names, candidates, strict=True)]
        stem = f"{kind} of {names[0]} is"
        question = self._encode(f"\nQuestion: What is the {stem[:-3]}?\nAnswer: The {stem}")
        room = length - sum(len(fact.ids) for fact in facts) - len(question) - len(self._start) - max(map(len, candidates))
        if room < MIN_PROSE:
            least = length - room + MIN_PROSE
            raise PromptError(f"room for facts, question and prose, {least:,} tokens", f"{length:,}", "Choose a longer prompt.")
        prose = self._prose(draw, room)
        slots = [_nearest_border(prose, depth), *draw.integers(len(prose) + 1, size=DISTRACTORS).tolist()]
        ids, starts = self._join(prose, facts, slots, draw.permutation(len(facts)).tolist(), question)
        spans = [(start, start + len(fact.ids)) for start, fact in zip(starts, facts, strict=True)]
        return Needle(
            ids=ids,
            candidates=candidates,
            values=tuple(values),
            kind=kind,
            length=length,
            depth=depth,
            needle=spans[0],
            answer=(starts[0] + facts[0].answer[0], starts[0] + facts[0].answer[1]),
            distractors=tuple(spans[1:]),
            question=(len(ids) - len(question), len(ids)),
        )

    def grid(self, lengths: Sequence[int], depths: Sequence[float], per_cell: int, seed: int = 0) -> list[Needle]:
        """`per_cell` prompts for each length and depth; lengths are cut to the context as by `lengths`."""
        return [
            self.make(length, depth, (seed, length, round(1000 * depth), i))
            for length in self.lengths(lengths)
            for depth in depths
            for i in range(per_cell)
        ]

    def _encode(self, text: str) -> np.ndarray:
        return encode(self._tokenizer, text)

    def _fact(self, kind: str, name: str, answer: np.ndarray) -> _Fact:
        stem = self._encode(f" The {kind} of {name} is")
        return _Fact(np.concatenate([stem, answer, self._encode(".")]), (len(stem), len(stem) + len(answer)))

    def _prose(self, draw: np.random.Generator, room: int) -> list[np.ndarray]:
        """Consecutive sentences of exactly `room` tokens in all; the first one loses its beginning."""
        total = sum(map(len, self._sentences))
        if total < room:
            raise PromptError(f"a text of {room:,} tokens", f"one of {total:,}", "Choose a longer text or shorter prompts.")
        sizes = np.cumsum([len(ids) for ids in self._sentences])
        last = int(draw.integers(np.searchsorted(sizes, room), len(sizes)))
        chosen: list[np.ndarray] = []
        while room > 0:
            chosen.append(self._sentences[last][-room:])
            room -= len(chosen[-1])
            last -= 1
        return chosen[::-1]

    def _join(
        self,
        prose: Sequence[np.ndarray],
        facts: Sequence[_Fact],
        slots: Sequence[int],
        order: Sequence[int],
        question: np.ndarray,
    ) -> tuple[np.ndarray, list[int]]:
        """Ids of the prompt and where each fact starts; `slots` says before which sentence, `order` who is first in a slot."""
        parts, starts, at = [self._start], [0] * len(facts), len(self._start)
        for place in range(len(prose) + 1):
            for i in (i for i in order if slots[i] == place):
                parts.append(facts[i].ids)
                starts[i], at = at, at + len(facts[i].ids)
            if place < len(prose):
                parts.append(prose[place])
                at += len(prose[place])
        return np.concatenate([*parts, question]), starts


def _names(draw: np.random.Generator, count: int) -> list[str]:
    """Full names, no first or last name twice."""
    firsts, lasts = (draw.choice(names, size=count, replace=False) for names in (_FIRST, _LAST))
    return [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]


def _values(draw: np.random.Generator, kind: str, count: int) -> list[str]:
    """Different values of one kind."""
    if kind == "locker number":
        return [str(number) for number in draw.choice(np.arange(1000, 10_000), size=count, replace=False)]
    if kind == "secret password":
        pairs = zip(*(draw.choice(words, size=count, replace=False) for words in (_COLOURS, _ANIMALS)), strict=True)
        return [f"{colour} {animal}" for colour, animal in pairs]
    if kind not in _WORDS:
        raise PromptError(f"a kind of fact out of {', '.join(KINDS)}", repr(kind), "Choose one of these.")
    return [str(word) for word in draw.choice(_WORDS[kind], size=count, replace=False)]


def _nearest_border(prose: Sequence[np.ndarray], depth: float) -> int:
    """Number of the sentence before which a fact at `depth` stands; len(prose) after the last."""
    borders = np.cumsum([0, *map(len, prose)])
    return int(np.abs(borders - depth * borders[-1]).argmin())
