"""Small tasks for in-context learning, in plain prose of our own: examples with their labels, and test items.

    Review: The soup was warm and rich, and we stayed for hours.
    Sentiment: positive

Every label has equally many examples and equally many test items; no text occurs twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task: texts by label."""

    name: str
    text_name: str
    """What stands before a text."""
    label_name: str
    """What stands before its label."""
    examples: tuple[tuple[str, tuple[str, ...]], ...]
    """(label, texts) that the model is shown, by label."""
    tests: tuple[tuple[str, tuple[str, ...]], ...]
    """(label, texts) that it is asked about, labels in the same order."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for label, _ in self.tests)

    def shown(self, text: str, label: str) -> str:
        """One example as it stands in a prompt."""
        return f"{self.asked(text)} {label}\n\n"

    def asked(self, text: str) -> str:
        """A text up to its label."""
        return f"{self.text_name}: {text}\n{self.label_name}:"


_SENTIMENT = Task(
    "sentiment",
    "Review",
    "Sentiment",
    (
        (
            "positive",
            (
                "The soup was warm and rich, and we stayed for hours.",
                "A lovely little film that made the whole family laugh.",
                "The staff were kind and found us a better room.",
                "This lamp is bright, light and a joy to use.",
            ),
        ),
        (
            "negative",
            (
                "The bread was stale and nobody came to take our order.",
                "A dull film with a plot that goes nowhere.",
                "The room smelled of smoke and the shower was broken.",
                "The handle fell off on the first day.",
            ),
        ),
    ),
    (
        (
            "positive",
            (
                "The best concert I have been to in years.",
                "Fresh fish, friendly waiters and a wonderful view.",
                "I could not put this book down.",
                "The shoes fit perfectly and look great.",
                "Our guide was funny and knew every street.",
                "A clever story with a beautiful ending.",
                "The bed was soft and we slept very well.",
                "It arrived early and works like a charm.",
                "The cake was delicious and so was the coffee.",
                "I love this coat, it keeps me warm all winter.",
                "The garden is a delight for children.",
                "An excellent teacher who explains everything with patience.",
            ),
        ),
        (
            "negative",
            (
                "The worst concert I have been to in years.",
                "Cold fish, rude waiters and a view of the car park.",
                "I gave up on this book after ten pages.",
                "The shoes hurt and fell apart in a week.",
                "Our guide was bored and lost us twice.",
                "A silly story with a terrible ending.",
                "The bed was hard and the street was noisy.",
                "It arrived late and does not work at all.",
                "The cake was dry and the coffee was awful.",
                "I hate this coat, the zip is always stuck.",
                "The garden is dirty and full of broken glass.",
                "A poor teacher who shouts and explains nothing.",
            ),
        ),
    ),
)
_KINGDOM = Task(
    "animal or plant",
    "Word",
    "Kind",
    (("animal", ("horse", "salmon", "sparrow", "beetle")), ("plant", ("oak", "tulip", "fern", "wheat"))),
    (
        ("animal", ("dog", "lion", "shark", "owl", "spider", "frog", "rabbit", "whale", "eagle", "snake", "goat", "bee")),
        ("plant", ("rose", "pine", "moss", "grass", "lily", "maple", "cactus", "daisy", "bamboo", "ivy", "palm", "clover")),
    ),
)
_NUMBER = Task(
    "one or many",
    "Sentence",
    "How many",
    (
        (
            "one",
            ("The boy ran home.", "She bought a chair.", "A ship left the harbour.", "He wrote to his brother."),
        ),
        (
            "many",
            ("The boys ran home.", "She bought six chairs.", "Several ships left the harbour.", "He wrote to his brothers."),
        ),
    ),
    (
        (
            "one",
            (
                "The dog barked all night.",
                "I saw a bird on the roof.",
                "The teacher opened the window.",
                "A car stopped at the corner.",
                "We ate an apple.",
                "Her sister lives in the town.",
                "The farmer sold a cow.",
                "A letter came in the morning.",
                "My shoe is wet.",
                "The child is asleep.",
                "He broke a glass.",
                "The tree fell in the storm.",
            ),
        ),
        (
            "many",
            (
                "The dogs barked all night.",
                "I saw ten birds on the roof.",
                "The teachers opened the windows.",
                "Two cars stopped at the corner.",
                "We ate the apples.",
                "Her sisters live in the town.",
                "The farmer sold his cows.",
                "Five letters came in the morning.",
                "My shoes are wet.",
                "The children are asleep.",
                "He broke three glasses.",
                "The trees fell in the storm.",
            ),
        ),
    ),
)
_ANSWER = Task(
    "what is asked for",
    "Question",
    "Answer type",
    (
        ("person", ("Who painted the ceiling?", "Who won the race last year?", "Which doctor saw the patient?")),
        ("place", ("Where is the old bridge?", "Which town has the largest market?", "Where do the geese go in winter?")),
        ("time", ("When does the shop open?", "In which year was the tower built?", "When did the rain stop?")),
    ),
    (
        (
            "person",
            (
                "Who wrote this letter?",
                "Who is the captain of the ship?",
                "Which singer opened the festival?",
                "Who found the lost ring?",
                "Who taught her to swim?",
                "Which king ordered the walls?",
                "Who baked the bread?",
                "Who called you yesterday?",
            ),
        ),
        (
            "place",
            (
                "Where was the treasure hidden?",
                "Which country grows the most rice?",
                "Where can I buy a ticket?",
                "In which city was the trial held?",
                "Where does the river end?",
                "Where did they spend the night?",
                "Which island has two volcanoes?",
                "Where is the nearest station?",
            ),
        ),
        (
            "time",
            (
                "When was the school founded?",
                "At what hour does the train leave?",
                "When did the war end?",
                "In which month do the roses bloom?",
                "When will the guests arrive?",
                "On what day is the meeting?",
                "When was the first map drawn?",
                "In which century did he live?",
            ),
        ),
    ),
)
TASKS = (_SENTIMENT, _KINGDOM, _NUMBER, _ANSWER)
