"""The Noise page on the shipped retrieval pair, without a browser; marks, presets and links without either."""

from __future__ import annotations

import json

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

import dexviz
from app import downloads, links
from app.components.attention_map import tokens_name
from app.components.noise_heads import head_table
from app.components.noise_marks import answer_after, characters_of, picked_of
from app.components.token_picker import Picked, decode
from app.presets import PRESETS, RETRIEVAL, RETRIEVAL_PRESETS, answer_of, marks_of, presets_for
from app.state import Marked
from dexviz.bootstrap import Comparison, Interval
from dexviz.figures.noise_curves import interval_curve
from dexviz.figures.numbers import three
from dexviz.models import ModelPair
from dexviz.noise_records import BatteryRow
from dexviz.requests import Prompt
from tests.readers import byte_tokenizer
from tests.test_app import MAIN, press, settled, texts

LINK = {"base": "retrieval-llama", "variant": "retrieval-diff", "draft": RETRIEVAL, "layer": "1", "head": "1"}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return dexviz.load_pair("retrieval-llama", variant="retrieval-diff")


@pytest.fixture
def opened() -> AppTest:
    """The Noise page, by a link to the shipped pair on the preset of its language."""
    at = AppTest.from_file(MAIN, default_timeout=60)
    at.query_params.update(LINK)
    at.run()
    at.switch_page("pages/noise.py").run()
    return settled(at)


def test_the_page_tells_what_the_library_measures(opened: AppTest, pair: ModelPair) -> None:
    marks = marks_of(RETRIEVAL)
    found = dexviz.noise(pair, RETRIEVAL, marks.needle, question=marks.question)
    shown = texts(opened)
    assert "**L1·H1**" in shown
    for heads in (found.base, found.variant):
        for name, value in heads.over_heads().items():
            if name != "net":
                assert f"**{three(value)}**" in shown, name
    assert f":orange[variant **{three(float(found.variant.snr[1, 1]))}**]" in shown
    assert "Heads of two models are not the same heads" in shown
    assert f"λ of L1 is {three(pair.variant.lambdas()[1])}." in shown
    assert [latex.value for latex in opened.latex if "A_{2,ij}" in latex.value]
    table = opened.dataframe[0].value
    highest = np.unravel_index(found.variant.signal.argmax(), found.variant.signal.shape)
    assert table["head"].tolist()[0] == "L{}·H{}".format(*highest)
    np.testing.assert_allclose(np.sort(table["SNR"]), np.sort(found.variant.snr.ravel()), rtol=1e-6)
    opened.segmented_control(key="view").set_value("base").run()
    settled(opened)
    assert len(opened.dataframe[0].value) == 16
    assert f":blue[base **{three(float(found.base.snr[1, 1]))}**]" in texts(opened)


def test_the_battery_and_its_curve_come_by_a_button(opened: AppTest, pair: ModelPair) -> None:
    press(opened, "Measure the pair")
    settled(opened)
    report = dexviz.noise_battery(pair, dexviz.BatteryRequest(per_cell=2))
    accuracy = report.overall.measures["accuracy"]
    shown = texts(opened)
    assert f"| accuracy | {three(accuracy.base.mean)} (" in shown
    assert f"| {three(accuracy.change.mean, signed=True)} (" in shown
    assert accuracy.change.mean > 0.3, "the shipped DiffLlama finds what the Llama does not"
    assert not opened.error


def test_other_numbers_of_heads_are_shown_one_view_at_a_time(opened: AppTest) -> None:
    opened.switch_page("pages/heads.py").run()
    settled(opened)
    shown = texts(opened)
    assert "Base: 2 layers × 8 heads; variant: 2 × 4." in shown
    assert not opened.error
    opened.segmented_control(key="view").set_value("base").run()
    settled(opened)
    opened.button(key="previous").click().run()
    opened.button(key="previous").click().run()
    settled(opened)
    assert "**L0·H7**" in texts(opened), "the base has eight heads to walk through"
    opened.segmented_control(key="view").set_value("variant").run()
    settled(opened)
    assert "**L0·H3**" in texts(opened), "the variant has four"


def test_the_answers_log_probability_is_that_of_the_library(opened: AppTest, pair: ModelPair) -> None:
    marks = marks_of(RETRIEVAL)
    for answer in ("42", "17"):
        opened.text_input(key="answer").set_value(answer).run()
        settled(opened)
        found = dexviz.noise(pair, RETRIEVAL, marks.needle, question=marks.question, answer=f" {answer}")
        for view, colour in (("base", "blue"), ("variant", "orange")):
            assert f":{colour}[**{three(found.answer_log_probability[view])}**]" in texts(opened)
    opened.text_input(key="answer").set_value(" ").run()
    settled(opened)
    assert "log p of" not in texts(opened)


def test_an_answer_is_set_apart_from_its_prompt_once() -> None:
    assert answer_after(Prompt("Where? On"), "mat") == " mat"
    assert answer_after(Prompt("Where? On "), "mat") == "mat"
    assert answer_after(Prompt("Where? On"), " mat") == " mat"
    assert answer_after(Prompt("Where?", chat=True), "mat") == "mat"
    assert answer_after(Prompt("Where?"), " ") is None
    assert {answer_of(text) for text in (*PRESETS.values(), "else")} == {"7412", "7305", "bird", "width", ""}


def test_without_marks_the_page_says_how_to_mark(opened: AppTest) -> None:
    opened.session_state["marked"] = Marked(Prompt(RETRIEVAL))
    opened.run()
    settled(opened)
    assert "#### No needle is marked" in texts(opened)
    assert not opened.error


def test_without_marks_a_head_that_the_view_does_not_have_is_left_too(opened: AppTest) -> None:
    opened.session_state["marked"] = Marked(Prompt(RETRIEVAL))
    opened.segmented_control(key="view").set_value("base").run()
    settled(opened)
    opened.session_state["head"] = 7
    opened.segmented_control(key="view").set_value("variant").run()
    settled(opened)
    assert not opened.error
    assert "**L1·H3**" in texts(opened)


def test_words_outside_the_language_are_counted(opened: AppTest) -> None:
    opened.text_area[0].set_value("amber fox 42 zebra ? amber fox").run()
    settled(opened)
    assert "1 word is unknown to this model." in texts(opened)


def test_every_preset_of_the_page_has_marks_within_it() -> None:
    for name in ("Needle", "Distractors", "Examples", "Code"):
        marks = marks_of(PRESETS[name])
        assert all(0 <= start < stop <= len(PRESETS[name]) for start, stop in [*marks.needle, marks.question])
    assert presets_for("retrieval-llama") == RETRIEVAL_PRESETS
    assert presets_for("smollm2-135m") == PRESETS
    assert marks_of("another prompt") is None


@pytest.mark.parametrize("before", ["", "[user] "])
def test_tokens_picked_become_characters_and_come_back(before: str) -> None:
    prompt = Prompt("héλλo wörld, the key", chat=bool(before))
    tokens = dexviz_tokens(before + prompt.text)
    start = len((before + "héλλo").encode())
    picked = Picked(((start, start + len(" wörld".encode())),), (len(tokens) - 3, len(tokens)))
    needle, question = characters_of(tokens, prompt, picked)
    assert [prompt.text[slice(*span)] for span in (*needle, question)] == ["wörld", "key"]
    back = picked_of(tokens, Marked(prompt, needle, question))
    assert back.needle == ((start + 1, start + len(" wörld".encode())),)
    assert back.question == picked.question
    outside = Picked(((0, 3),), None)
    assert characters_of(tokens, prompt, outside) == (((), None) if before else (((0, 2),), None))


def dexviz_tokens(text: str):
    from dexviz.tokens import tokenize

    return tokenize(byte_tokenizer(), text)


def test_what_the_browser_reports_is_checked() -> None:
    tokens = dexviz_tokens("a needle here")
    name = tokens_name(tokens)
    assert decode({"tokens": name, "needle": [[5, 7], [0, 2]], "question": None}, tokens) == Picked(((0, 2), (5, 7)))
    for bad in (
        None,
        {"tokens": "other", "needle": [], "question": None},
        {"tokens": name, "needle": [[0, 99]], "question": None},
        {"tokens": name, "needle": [[3, 3]], "question": None},
        {"tokens": name, "needle": [[True, 2]], "question": None},
        {"tokens": name, "needle": "x", "question": None},
        {"tokens": name, "needle": [[0, 1]] * 65, "question": None},
        {"tokens": name, "needle": [], "question": [1]},
    ):
        assert decode(bad, tokens) is None


def test_marks_and_the_second_model_travel_in_a_link() -> None:
    values = {"needle": ((3, 9), (12, 20)), "question": (30, 41), "variant": "retrieval-diff", "view": "base"}
    written = links.write(values)
    assert written["needle"] == "3-9_12-20"
    assert links.read(written) == values
    assert links.read({"needle": "9-3", "question": "4", "view": "both"}) == {}
    assert links.read({"needle": "_".join(["1-2"] * 65)}) == {}


def test_a_link_with_marks_shows_these_instead_of_the_presets() -> None:
    at = AppTest.from_file(MAIN, default_timeout=60)
    at.query_params.update({**LINK, "needle": "13-18"})
    at.run()
    at.switch_page("pages/noise.py").run()
    settled(at)
    assert at.session_state["marked"] == Marked(Prompt(RETRIEVAL), ((13, 18),), None)
    assert "needle=13-18" in (state_link(at) or "")


def state_link(at: AppTest) -> str | None:
    return next((code.value for code in at.code if "draft=" in code.value), None)


def test_curves_draw_means_and_bands() -> None:
    def row(depth: float, base: float, variant: float) -> BatteryRow:
        parts = (Interval(x, x - 1, x + 1, 0.95, 4, "prompt") for x in (base, variant, variant - base))
        return BatteryRow(None, depth, 4, {"snr": Comparison(*parts)})

    rows = [row(0.0, 3.0, 5.0), row(1.0, 4.0, 4.5)]
    figure = interval_curve(rows, "snr", "depth", "SNR (ratio)")
    lines = {trace.name: list(trace.y) for trace in figure.data if trace.name}
    assert lines == {"base": [3.0, 4.0], "variant": [5.0, 4.5]}
    bands = [list(trace.y) for trace in figure.data if trace.fill == "toself"]
    assert bands == [[4.0, 5.0, 3.0, 2.0], [6.0, 5.5, 3.5, 4.0]]
    assert [note.text for note in figure.layout.annotations] == ["base", "variant"]
    alone = BatteryRow(256, None, 1, {"snr": Comparison(Interval(2.0, None, None, 0.95, 1, "prompt"))})
    single = interval_curve([alone], "snr", "length", "SNR (ratio)", theme="dark")
    assert [trace.name for trace in single.data] == ["base"]


def test_downloads_hold_every_head_of_both_views(pair: ModelPair) -> None:
    found = dexviz.noise(pair, RETRIEVAL, "amber fox 42")
    lines = downloads.noise_csv(found).decode().splitlines()
    assert len(lines) == 1 + 16 + 8
    assert lines[1].startswith("base,0,0,")
    data = json.loads(downloads.noise_json(found))
    assert data["prompt"].endswith("amber fox")
    assert np.array(data["variant"]["heads"]["negative"]).shape == (2, 4)
    table, places = head_table(found, "variant")
    assert list(table)[:4] == ["head", "signal", "noise", "SNR"]
    assert len(places) == len(table["head"]) == 8


def test_an_example_without_signed_maps_says_what_to_do() -> None:
    at = AppTest.from_file(MAIN, default_timeout=60)
    at.query_params.update({"example": "cancel"})
    at.run()
    at.switch_page("pages/noise.py").run()
    assert not at.exception
    assert not at.error
    assert "holds no such map" in at.info[0].value
