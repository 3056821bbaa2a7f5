"""Prompts to begin with, one for each thing that heads are known to do."""

from __future__ import annotations

from dexviz.noise_records import Marks, Span

NEEDLE = (
    "The harbour opens at six. The library keeps maps of the coast. The code of the blue door is 7412. "
    "Fishing boats return at noon. The baker sells rye bread. Question: what is the code of the blue door? Answer:"
)
REPEATED = "the cat the dog the cat the dog the cat the"
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return area("
SCRIPTS = "Good morning, Grüß Gott, こんにちは, صباح الخير, здравствуйте, नमस्ते, naïve café 🙂"

DISTRACTORS = (
    "The locker number of Ada Brandvold is 4182. The locker number of Tove Quill is 7305. The locker number of Hugo Farrow is "
    "2961. The locker number of Mina Eklund is 5548. Question: What is the locker number of Tove Quill?\n"
    "Answer: The locker number of Tove Quill is"
)
IN_CONTEXT = "copper: metal\nsparrow: bird\nsalmon: fish\niron: metal\nheron: bird\ntrout: fish\nsilver: metal\nrobin:"

PRESETS: dict[str, str] = {
    "Needle": NEEDLE,
    "Distractors": DISTRACTORS,
    "Examples": IN_CONTEXT,
    "Repeats": REPEATED,
    "Code": CODE,
    "Scripts": SCRIPTS,
}
RETRIEVAL_MODELS = "retrieval-"
"""How names of models of the retrieval language begin."""
RETRIEVAL = (
    "amber fox 42 quiet owl 17 amber heron 60 calm fox 23 silver lynx 35 amber owl 51 rusty fox 19 tidy mole 68 ? amber fox"
)
RETRIEVAL_PRESETS: dict[str, str] = {"Facts": RETRIEVAL}
"""For models of the retrieval language, which know no other words."""


def presets_for(base: str) -> dict[str, str]:
    """Presets in the language of a model."""
    return RETRIEVAL_PRESETS if base.startswith(RETRIEVAL_MODELS) else PRESETS


_MARKED: dict[str, tuple[tuple[str, ...], str]] = {
    NEEDLE: (("The code of the blue door is 7412.",), "Question: what is the code of the blue door? Answer:"),
    DISTRACTORS: (
        ("The locker number of Tove Quill is 7305.",),
        "Question: What is the locker number of Tove Quill?\nAnswer: The locker number of Tove Quill is",
    ),
    IN_CONTEXT: (("sparrow: bird", "heron: bird"), "robin:"),
    RETRIEVAL: (("amber fox 42 quiet",), "? amber fox"),  # with the token that is the first to know of the whole fact
    CODE: (("width * height",), "def volume(width, height, depth):\n    return area("),
}
"""Prompt → needles and question, each by the first place where it stands."""


_ANSWERS = {NEEDLE: "7412", DISTRACTORS: "7305", IN_CONTEXT: "bird", RETRIEVAL: "42", CODE: "width"}


def answer_of(text: str) -> str:
    """The right answer to a preset; nothing for other prompts."""
    return _ANSWERS.get(text, "")


def marks_of(text: str) -> Marks | None:
    """What is marked in a preset; None for other prompts."""
    if text not in _MARKED:
        return None
    needles, question = _MARKED[text]
    return Marks(tuple(_place(text, needle) for needle in needles), _place(text, question))


def _place(text: str, part: str) -> Span:
    start = text.index(part)
    return start, start + len(part)
