"""Questions that a context answers against what contradicts it, in plain prose of our own.

    against knowledge   the context says what is not so in the world; the first distractor is what is so
    among sources       the context quotes several sources and says which of them is right; the others are distractors

What is right stands first, in the middle and last among the sources equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = AGAINST_KNOWLEDGE, AMONG_SOURCES = ("against knowledge", "among sources")


@dataclass(frozen=True)
class ContextQuestion:
    """A context, a question about it with the beginning of its answer, and candidates for the rest, the right one first."""

    kind: str
    context: str
    question: str
    stem: str
    candidates: tuple[str, ...]

    @property
    def text(self) -> str:
        """The prompt up to the answer."""
        return f"{self.context}\nQuestion: {self.question}\nAnswer: {self.stem}"


_Item = tuple[str, str, str, tuple[str, ...]]
_AGAINST: tuple[_Item, ...] = (
    (
        "In the land of Orm the sky is green all day long.",
        "What colour is the sky in Orm?",
        "In Orm the sky is",
        ("green", "blue", "red"),
    ),
    (
        "On this planet the snow is black, and so are the clouds.",
        "What colour is the snow?",
        "The snow is",
        ("black", "white", "yellow"),
    ),
    ("Dogs in this tale sing when a stranger comes.", "What do the dogs do?", "The dogs", ("sing", "bark", "fly")),
    ("In her dream the sun rose in the west.", "Where did the sun rise?", "The sun rose in the", ("west", "east", "north")),
    ("On the island a week has nine days.", "How many days has a week?", "A week has", ("nine", "seven", "five")),
    (
        "The spiders of this cave have six legs each.",
        "How many legs has a spider of this cave?",
        "It has",
        ("six", "eight", "four"),
    ),
    ("In our play the king of the animals is the mouse.", "Who is the king?", "The king is the", ("mouse", "lion", "bear")),
    (
        "In this kitchen sugar tastes sour by a spell.",
        "How does the sugar taste?",
        "The sugar tastes",
        ("sour", "sweet", "bitter"),
    ),
    ("Under the curse fire became cold.", "What is the fire like?", "The fire is", ("cold", "hot", "wet")),
    (
        "In this book the moon is made of cheese.",
        "What is the moon made of?",
        "The moon is made of",
        ("cheese", "rock", "ice"),
    ),
    ("Cows on this farm give wine.", "What do the cows give?", "The cows give", ("wine", "milk", "water")),
    ("By the new law cars stop when the light is green.", "When do cars stop?", "When the light is", ("green", "red", "blue")),
    (
        "In the novel the capital of France is Lyon.",
        "What is the capital of France in the novel?",
        "The capital is",
        ("Lyon", "Paris", "London"),
    ),
    (
        "In the film the president lives in a tent.",
        "Where does the president live?",
        "The president lives in a",
        ("tent", "house", "castle"),
    ),
    (
        "The bananas of the wizard are blue when they are ripe.",
        "What colour is a ripe banana of the wizard?",
        "It is",
        ("blue", "yellow", "green"),
    ),
    (
        "In this country people wear gloves on their feet.",
        "Where do they wear gloves?",
        "They wear gloves on their",
        ("feet", "hands", "heads"),
    ),
    (
        "In the story ice sinks to the bottom of the lake, where it is soft.",
        "What is the ice like?",
        "The ice is",
        ("soft", "hard", "hot"),
    ),
    (
        "Here winter comes right after spring.",
        "What comes right after spring here?",
        "After spring comes",
        ("winter", "summer", "autumn"),
    ),
    (
        "The fish of the glass river live in the trees.",
        "Where do the fish live?",
        "The fish live in the",
        ("trees", "water", "sand"),
    ),
    (
        "In the game two and two make five.",
        "How much do two and two make in the game?",
        "Two and two make",
        ("five", "four", "three"),
    ),
    (
        "The old painter mixed blue and yellow and got orange.",
        "What did the painter get?",
        "The painter got",
        ("orange", "green", "purple"),
    ),
    (
        "In the fable the tortoise is quick and the hare is slow.",
        "What is the hare like?",
        "The hare is",
        ("slow", "fast", "brave"),
    ),
    ("In this world gold is light as a feather.", "What is gold like?", "Gold is", ("light", "heavy", "wet")),
    ("Bees in this garden make salt.", "What do the bees make?", "The bees make", ("salt", "honey", "paper")),
)
_AMONG: tuple[_Item, ...] = (
    (
        "The mayor's letter, which is right, says that the fair opens on Friday. A poster says Monday. The baker says Tuesday.",
        "When does the fair really open?",
        "The fair opens on",
        ("Friday", "Monday", "Tuesday"),
    ),
    (
        "A poster, which is wrong, says that the market is in May. The clerk knows that it is in June. Some still say July.",
        "In which month is the market really?",
        "The market is in",
        ("June", "May", "July"),
    ),
    (
        "At first they said the thief wore a red coat. Then it was a green one. The camera proved that it was blue.",
        "What colour was the thief's coat in truth?",
        "The coat was",
        ("blue", "red", "green"),
    ),
    (
        "The captain told the truth: the ship carries tea. The sailors spoke of coffee, and the forged papers of silk.",
        "What does the ship really carry?",
        "The ship carries",
        ("tea", "coffee", "silk"),
    ),
    (
        "Tom guessed that the box holds a ring. Ann opened it and saw a coin. Ben, who was not there, speaks of a key.",
        "What is really in the box?",
        "In the box there is a",
        ("coin", "ring", "key"),
    ),
    (
        "The map says north, but it is old. A boy pointed to the south and laughed. The guide led us rightly to the east.",
        "Which way was right?",
        "The right way was to the",
        ("east", "north", "south"),
    ),
    (
        "The doctor found that the cat is ill. The neighbour thinks it is hungry, and the children think it is tired.",
        "What did the doctor find?",
        "The doctor found that the cat is",
        ("ill", "hungry", "tired"),
    ),
    (
        "Rumour has it that the mill was sold to a farmer. The contract names a teacher. A newspaper wrongly named a soldier.",
        "Whom does the contract name as buyer?",
        "The contract names a",
        ("teacher", "farmer", "soldier"),
    ),
    (
        "The old menu lists fish. The menu of last week lists soup. Today's menu lists rice.",
        "What is on today's menu?",
        "Today's menu lists",
        ("rice", "fish", "soup"),
    ),
    (
        "The new key is under the stone. The first key, now useless, was under the bench; the second, lost, under the bridge.",
        "Where is the new key?",
        "The new key is under the",
        ("stone", "bench", "bridge"),
    ),
    (
        "Last year the prize was a horse. This year it is a bicycle. Next year it will be a boat.",
        "What is the prize this year?",
        "This year the prize is a",
        ("bicycle", "horse", "boat"),
    ),
    (
        "The label says wool, and the seller says silk, but a test showed that the scarf is cotton.",
        "What is the scarf made of in truth?",
        "The scarf is made of",
        ("cotton", "wool", "silk"),
    ),
    (
        "It is Maria who plays the drum. Paul only plays the flute, and Eva the violin.",
        "What does Maria play?",
        "Maria plays the",
        ("drum", "flute", "violin"),
    ),
    (
        "Eva lives in Rome. Maria lives in Berlin. Paul lives in Madrid.",
        "Where does Maria live?",
        "Maria lives in",
        ("Berlin", "Rome", "Madrid"),
    ),
    (
        "Paul came by train. Eva came by bus. Maria came by bicycle.",
        "How did Maria come?",
        "Maria came by",
        ("bicycle", "train", "bus"),
    ),
    (
        "The left door hides gold. The middle door hides fire. The right door hides water.",
        "What does the left door hide?",
        "The left door hides",
        ("gold", "fire", "water"),
    ),
    (
        "The first clock shows two. The second clock, which is correct, shows six. The third clock shows nine.",
        "What hour is it really?",
        "The hour is",
        ("six", "two", "nine"),
    ),
    (
        "In the morning the sea was calm. At noon it was rough. In the evening it was dark.",
        "What was the sea like in the evening?",
        "In the evening the sea was",
        ("dark", "calm", "rough"),
    ),
    (
        "The final plan is to build a school. An early draft was for a prison, and a late joke for a zoo.",
        "What will be built by the final plan?",
        "They will build a",
        ("school", "prison", "zoo"),
    ),
    (
        "The witness who lied spoke of a knife. The honest witness spoke of a rope. The drunk one spoke of a gun.",
        "What did the honest witness speak of?",
        "The honest witness spoke of a",
        ("rope", "knife", "gun"),
    ),
    (
        "His father wanted him to be a lawyer and his mother a priest, but he became a cook.",
        "What did he become?",
        "He became a",
        ("cook", "lawyer", "priest"),
    ),
    (
        "After the correction the bill is ten coins. Before it was twenty, and the waiter had first said thirty.",
        "How many coins is the bill after the correction?",
        "After the correction the bill is",
        ("ten", "twenty", "thirty"),
    ),
    (
        "Anna thought that the bird was a crow. The expert showed that it was a goose. Peter took it for a duck.",
        "Which bird did the expert show it to be?",
        "The expert showed that the bird was a",
        ("goose", "crow", "duck"),
    ),
    (
        "Once the house was a bank. Later it was a church. Now it is a library.",
        "What is the house now?",
        "Now the house is a",
        ("library", "bank", "church"),
    ),
)
QUESTIONS = tuple(ContextQuestion(kind, *item) for kind, items in zip(KINDS, (_AGAINST, _AMONG), strict=True) for item in items)
