"""The only owner of st.session_state: what this session has chosen, and nothing that was computed.

Widgets keep their values under the keys of `Widget`; everything else is set by the functions below, which are made to be used
as callbacks. A link is the same state as text in the query string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from app import links
from app.presets import answer_of, marks_of, presets_for
from dexviz.noise_records import BatteryRequest, Span
from dexviz.records import STATISTICS, Score, Space, ViewName
from dexviz.requests import ModelInfo, PairSpec, Prompt

NO_ADAPTER = "none"
DEFAULT_BASE = "smollm2-135m"
MAX_LINK = 8000
"""Characters that browsers and proxies carry in an address."""
RESULT_PAGES = ("heads", "noise")
GRID_KEY = "heads-grid"
MAP_KEY = "heads-map"
TABLE_KEY = "noise-table"


class Widget:
    """Session keys of the widgets whose values are part of the state."""

    BASE, ADAPTER, DRAFT, CHAT = "base", "adapter", "draft", "chat"
    SCORE, SPACE, STATISTIC, SIDE = "score", "space", "statistic", "side"
    NOISE_VIEW, VARIANT, ANSWER = "view", "variant", "answer"


@dataclass(frozen=True)
class Ran:
    """What was run last: its answers are what the pages show."""

    pair: PairSpec
    prompt: Prompt


@dataclass(frozen=True)
class Marked:
    """What was marked in a prompt, by characters; no needle where the marks were cleared."""

    prompt: Prompt
    needle: tuple[Span, ...] = ()
    question: Span | None = None


@dataclass(frozen=True)
class Ticket:
    """A request that the engine works on for this session."""

    name: str
    started: float
    """Monotonic time in seconds."""
    warm: bool = False
    """True where its pair was loaded when it was submitted."""


@dataclass(frozen=True)
class Selection:
    """Everything a page needs to know about this session's choices."""

    pair: PairSpec
    draft: Prompt
    ran: Ran | None
    example: str | None
    score: Score
    space: Space
    statistic: str
    side: str
    layer: int
    head: int
    lock: tuple[int | None, int | None] | None
    focus: tuple[int, int] | None
    refused: Prompt | None
    """The draft that Run did not take."""
    marked: Marked | None
    """The session's own marks, on whatever prompt they were made."""
    answer: str
    """What the prompt should be answered with, as typed."""
    noise_view: ViewName
    battery: tuple[PairSpec, BatteryRequest] | None
    """The battery that was asked for last."""
    claims: PairSpec | None
    """The pair of which the papers' claims were asked for last."""

    def marks(self, prompt: Prompt) -> Marked:
        """What is marked in a prompt: by the user, or by the preset that it is."""
        if self.marked is not None and self.marked.prompt == prompt:
            return self.marked
        preset = marks_of(prompt.text)
        return Marked(prompt) if preset is None else Marked(prompt, preset.needle, preset.question)


DEFAULTS: dict[str, Any] = {
    Widget.BASE: DEFAULT_BASE,
    Widget.ADAPTER: NO_ADAPTER,
    Widget.DRAFT: "",
    Widget.CHAT: False,
    Widget.SCORE: "signed",
    Widget.SPACE: "value",
    Widget.STATISTIC: "entropy",
    Widget.SIDE: "variant",
    "ran": None,
    "example": None,
    "layer": 0,
    "head": 0,
    "lock": None,
    "focus": None,
    "goto": None,
    "refused": None,
    Widget.VARIANT: NO_ADAPTER,
    Widget.ANSWER: "",
    "marked": None,
    Widget.NOISE_VIEW: "variant",
    "battery": None,
    "claims": None,
    "page": "home",
}
_VIEW = (Widget.SCORE, Widget.SPACE, Widget.STATISTIC, Widget.SIDE, Widget.NOISE_VIEW, "layer", "head", "lock")
"""Keys of a link besides what it shows."""


def begin(models: list[ModelInfo], example: Callable[[str], Ran | None]) -> None:
    """Give every key its first value; the session's first run also reads the link it was opened with.

    `example` tells pair and prompt of a ready example, which go into the widgets when a link opens it.
    """
    if "begun" in st.session_state:
        return
    for key, value in DEFAULTS.items():
        st.session_state.setdefault(key, value)
    st.session_state.begun = True
    st.session_state[Widget.ADAPTER] = default_adapter(DEFAULT_BASE, models)
    wanted = links.read(st.query_params.to_dict())
    needle, question = wanted.pop("needle", ()), wanted.pop("question", None)
    for key, value in wanted.items():
        st.session_state[key] = value
    if Widget.BASE in wanted and Widget.ADAPTER not in wanted:
        st.session_state[Widget.ADAPTER] = default_adapter(wanted[Widget.BASE], models)
    known = {model.name for model in models} | {NO_ADAPTER}
    opened = example(wanted["example"]) if "example" in wanted else None
    if opened is not None and Widget.DRAFT not in wanted:
        _fill_in(opened, known)
    if wanted.get(Widget.VARIANT, NO_ADAPTER) != NO_ADAPTER:
        st.session_state[Widget.ADAPTER] = NO_ADAPTER
    chosen = {st.session_state[key] for key in (Widget.BASE, Widget.ADAPTER, Widget.VARIANT)}
    if wanted.get(Widget.DRAFT) and chosen <= known:
        st.session_state.ran = Ran(current().pair, current().draft)
    if Widget.ANSWER not in wanted:
        st.session_state[Widget.ANSWER] = answer_of(st.session_state[Widget.DRAFT])
    if needle or question:
        st.session_state.marked = Marked(current().draft, needle, question)


def _fill_in(opened: Ran, known: set[str]) -> None:
    """Put an example's prompt into the box, and its pair into the choice where it can be chosen."""
    st.session_state.update({Widget.DRAFT: opened.prompt.text, Widget.CHAT: opened.prompt.chat})
    base, adapter = opened.pair.base, opened.pair.adapter or NO_ADAPTER
    if {base, adapter} <= known:
        st.session_state.update({Widget.BASE: base, Widget.ADAPTER: adapter})


def current() -> Selection:
    """This session's choices."""
    s = st.session_state
    adapter, second = (None if s[key] in (NO_ADAPTER, None, "") else s[key] for key in (Widget.ADAPTER, Widget.VARIANT))
    return Selection(
        pair=PairSpec(s[Widget.BASE] or DEFAULT_BASE, None if second else adapter, second),
        draft=Prompt(s[Widget.DRAFT] or "", bool(s[Widget.CHAT])),
        ran=s.ran,
        example=s.example,
        score=s[Widget.SCORE],
        space=s[Widget.SPACE],
        statistic=s[Widget.STATISTIC],
        side=s[Widget.SIDE],
        layer=s.layer,
        head=s.head,
        lock=s.lock,
        focus=s.focus,
        refused=s.refused,
        marked=s.marked,
        answer=s[Widget.ANSWER] or "",
        noise_view=s[Widget.NOISE_VIEW] or "variant",
        battery=s.battery,
        claims=s.claims,
    )


def default_adapter(base: str, models: list[ModelInfo]) -> str:
    """The adapter that a base model starts with: its first known one, else none."""
    return next((model.name for model in models if model.kind == "adapter" and model.base == base), NO_ADAPTER)


def choose_base(models: list[ModelInfo]) -> None:
    """Another base model was chosen: its own default adapter, or the model made to be compared with it, comes along."""
    base = st.session_state[Widget.BASE]
    st.session_state[Widget.ADAPTER] = default_adapter(base, models)
    partners = (model.partner for model in models if model.name == base and model.partner)
    st.session_state[Widget.VARIANT] = next(partners, NO_ADAPTER)


def choose_adapter() -> None:
    """An adapter takes the place of a second model."""
    if st.session_state[Widget.ADAPTER] != NO_ADAPTER:
        st.session_state[Widget.VARIANT] = NO_ADAPTER


def choose_variant() -> None:
    """A second model takes the place of an adapter."""
    if st.session_state[Widget.VARIANT] != NO_ADAPTER:
        st.session_state[Widget.ADAPTER] = NO_ADAPTER


def use_preset(name: str) -> None:
    """Put a preset into the prompt box."""
    text = presets_for(st.session_state[Widget.BASE])[name]
    st.session_state.update({Widget.DRAFT: text, Widget.ANSWER: answer_of(text)})


def run_prompt() -> None:
    """The prompt in the box becomes the one that pages show."""
    choice = current()
    st.session_state.update(ran=Ran(choice.pair, choice.draft), example=None, lock=None, focus=None)
    st.session_state.update(goto=_page_of_results(), refused=None)
    if choice.statistic not in STATISTICS:
        st.session_state[Widget.STATISTIC] = DEFAULTS[Widget.STATISTIC]
    failures().clear()


def _page_of_results() -> str:
    """Where results of a run are shown: the page one is on, if it shows any."""
    return st.session_state.page if st.session_state.page in RESULT_PAGES else "heads"


def refuse_draft() -> None:
    """The draft cannot be run: what is on screen stays, and the sidebar says why."""
    st.session_state.refused = current().draft


def open_example(name: str, prompt: Prompt, view: Mapping[str, Any]) -> None:
    """Show a ready example; `view` names score, space, statistic, side, layer and head. Its prompt goes into the box."""
    st.session_state.update(view)
    st.session_state.update(example=name, lock=None, focus=None, goto="heads")
    st.session_state.update({Widget.DRAFT: prompt.text, Widget.CHAT: prompt.chat})


def select_head(layer: int, head: int) -> None:
    """Make this the one selected head of all pages."""
    st.session_state.update(layer=layer, head=head)


def keep_head_within(layers: int, heads: int) -> None:
    """Move the selection into a smaller model's grid."""
    select_head(min(st.session_state.layer, layers - 1), min(st.session_state.head, heads - 1))


def keep_lock_within(tokens: int) -> None:
    """Forget a lock on tokens that the prompt does not have, or on a key after its query: a link may hold anything."""
    query, key = st.session_state.lock or (None, None)
    last = tokens - 1 if query is None else query
    if (query is not None and query >= tokens) or (key is not None and key > last):
        st.session_state.lock = None


def step_head(step: int, layers: int, heads: int) -> None:
    """Select the next (+1) or previous (−1) head in reading order, around the ends."""
    place = (st.session_state.layer * heads + st.session_state.head + step) % (layers * heads)
    select_head(*divmod(place, heads))


def pick_in_grid(heads: int) -> None:
    """A cell of the head grid was clicked: trace 0 holds the heads in reading order."""
    for point in st.session_state[GRID_KEY].selection.points:
        if point["curve_number"] == 0:
            select_head(*divmod(point["point_index"], heads))


def pick_in_table(places: list[tuple[int, int]]) -> None:
    """A cell of a table of heads was clicked: `places` are the heads of its rows."""
    for row, _ in st.session_state[TABLE_KEY].selection.cells:
        select_head(*places[row])


def remember_map(lock: tuple[int | None, int | None] | None, focus: tuple[int, int] | None) -> None:
    """Keep what was locked and opened in the map."""
    st.session_state.update(lock=lock, focus=focus)


def mark(prompt: Prompt, needle: tuple[Span, ...], question: Span | None) -> None:
    """Keep what was marked in a prompt."""
    st.session_state.marked = Marked(prompt, needle, question)


def start_battery(pair: PairSpec, battery: BatteryRequest) -> None:
    """Ask for a battery; an earlier failure of the same one is forgotten."""
    st.session_state.battery = (pair, battery)
    failures().clear()


def start_claims(pair: PairSpec) -> None:
    """Ask for the papers' claims; likewise."""
    st.session_state.claims = pair
    failures().clear()


def at_page(name: str) -> None:
    """Note which page is shown."""
    st.session_state.page = name


def wanted_page() -> str | None:
    """The page that a callback asked for, until `arrived`."""
    return st.session_state.goto


def arrived() -> None:
    """A page has been shown to its end, so no other one is wanted any more."""
    st.session_state.goto = None


def tickets() -> MutableMapping[str, Ticket]:
    """Request key → ticket of what this session has running in the engine."""
    return st.session_state.setdefault("tickets", {})


def failures() -> MutableMapping[str, Exception]:
    """Request key → why it failed, so that a rerun does not try again by itself."""
    return st.session_state.setdefault("failures", {})


def link() -> str | None:
    """Address of this view for another browser; None where the prompt is too long to travel in one."""
    address = (st.context.url or "").partition("?")[0] + "?" + urlencode(_query())
    return address if len(address) <= MAX_LINK else None


def _query() -> dict[str, str]:
    """What is on screen, never what is only chosen: the example, or the pair and prompt that were run."""
    s = st.session_state
    values = {key: s[key] for key in _VIEW}
    if s.example is not None:
        values["example"] = s.example
    elif s.ran is not None:
        values |= {Widget.BASE: s.ran.pair.base, Widget.ADAPTER: s.ran.pair.adapter or NO_ADAPTER}
        if s.ran.pair.variant is not None:
            values[Widget.VARIANT] = s.ran.pair.variant
        values |= {Widget.DRAFT: s.ran.prompt.text, Widget.CHAT: s.ran.prompt.chat}
        values[Widget.ANSWER] = s[Widget.ANSWER]
        if s.marked is not None and s.marked.prompt == s.ran.prompt:
            values |= {"needle": s.marked.needle, "question": s.marked.question}
    return links.write(values)
