"""The app without a browser: every page in AppTest, and the parts that need no page."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import cache, downloads, gallery, links, state
from app.answers import Answers
from app.components.text import plain
from app.estimate import cost
from app.presets import PRESETS
from dexviz.budget import ModelSize
from dexviz.records import STATISTICS, Capture
from dexviz.requests import CaptureView, PairInfo, PairSpec, Prompt
from dexviz.snapshot import save_snapshot
from tests.captures import make_capture

ROOT = Path(__file__).resolve().parent.parent
MAIN = str(ROOT / "app" / "main.py")
LAYERS, HEADS, TOKENS = 3, 2, 5
HOSTILE = "<script>alert(1)</script> **bold** $x$ :red[no] \x07\u202e猫"
RECIPE = {
    "title": "A title",
    "finding": "{head}: {base} and {variant}, {change}",
    "prompt": HOSTILE,
    "pick": {"statistic": "entropy", "of": "change", "best": "max"},
}


def captures() -> tuple[Capture, Capture]:
    base, variant = (make_capture(LAYERS, HEADS, TOKENS, seed) for seed in (3, 4))
    random = np.random.default_rng(5)
    exact = [random.random((LAYERS, HEADS, TOKENS, TOKENS), np.float32) for _ in range(2)]
    rest = {"maps": {}, "pooled_extreme": None, "tokens": base.tokens}
    return replace(base, pooled=exact[0], **rest), replace(variant, pooled=exact[1], **rest)


def write_example(folder: Path, name: str = "one") -> None:
    (folder / f"{name}.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    for view, capture in zip(gallery.VIEWS, captures(), strict=True):
        save_snapshot(capture, folder / f"{name}.{view}.safetensors")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gallery with one example in it, instead of the shipped one."""
    write_example(tmp_path)
    monkeypatch.setattr(gallery, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def at() -> AppTest:
    return AppTest.from_file(MAIN, default_timeout=60)


def press(at: AppTest, label: str) -> AppTest:
    return next(button for button in at.button if button.label == label).click().run()


def settled(at: AppTest, seconds: float = 180) -> AppTest:
    """Run again until nothing is in progress."""
    deadline = time.monotonic() + seconds
    while any(button.label == "Cancel" for button in at.button):
        assert time.monotonic() < deadline, "the engine did not finish"
        time.sleep(0.3)
        at.run()
    assert not at.exception
    return at


def texts(at: AppTest) -> str:
    return "\n".join(element.value for element in (*at.markdown, *at.caption))


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "app" / "pages").glob("*.py")))
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_runs_before_anything_was_chosen(at: AppTest, page: str, theme: str) -> None:
    at.context["theme"] = theme
    at.run()
    at.switch_page(f"pages/{page}").run()
    assert not at.exception
    assert not at.error
    assert at.text_area[0].value == ""


def test_empty_heads_page_says_what_to_do(at: AppTest) -> None:
    at.run()
    at.switch_page("pages/heads.py").run()
    assert "press **Run**" in texts(at)


def test_an_example_opens_on_its_head_with_its_numbers(at: AppTest, shelf: Path) -> None:
    example = gallery.load("one")
    at.run()
    assert example.finding in texts(at)
    assert "{" not in example.finding
    press(at, "Open in Heads")
    assert not at.exception
    assert not at.error
    layer, head = example.head
    change = example.variant.mean("entropy") - example.base.mean("entropy")
    assert change[layer, head] == np.nanmax(change)
    assert f"**L{layer}·H{head}**" in texts(at)
    assert at.text_area[0].value == HOSTILE
    assert at.selectbox(key="score").disabled


def test_next_and_previous_walk_through_all_heads(at: AppTest, shelf: Path) -> None:
    at.run()
    press(at, "Open in Heads")
    seen = set()
    for _ in range(LAYERS * HEADS):
        at.button(key="next").click().run()
        seen.add((at.session_state["layer"], at.session_state["head"]))
    assert len(seen) == LAYERS * HEADS
    before = at.session_state["layer"], at.session_state["head"]
    at.button(key="previous").click().run()
    at.button(key="next").click().run()
    assert (at.session_state["layer"], at.session_state["head"]) == before


@pytest.mark.parametrize("name", list(STATISTICS))
def test_every_statistic_can_be_shown_from_an_example(at: AppTest, shelf: Path, name: str) -> None:
    at.run()
    press(at, "Open in Heads")
    at.selectbox(key="statistic").select(name).run()
    assert not at.exception
    assert f"**{STATISTICS[name].label} by head**  :gray[{STATISTICS[name].unit}]" in texts(at)


def test_a_head_that_the_example_does_not_hold_says_so(at: AppTest, shelf: Path) -> None:
    for view, capture in zip(gallery.VIEWS, captures(), strict=True):
        save_snapshot(replace(capture, pooled=None), shelf / f"one.{view}.safetensors")
    at.run()
    press(at, "Open in Heads")
    assert "holds no map of" in at.error[0].value
    assert "Run" in at.error[0].value


def test_a_damaged_example_is_one_message(at: AppTest, shelf: Path) -> None:
    (shelf / "one.base.safetensors").write_bytes(b"nothing")
    at.run()
    assert not at.exception
    assert len(at.error) == 1
    assert "Traceback" not in at.error[0].value


def test_presets_fill_the_box_and_stay_on_other_pages(at: AppTest) -> None:
    at.run()
    for name, text in PRESETS.items():
        press(at, name)
        assert at.text_area[0].value == text
    at.switch_page("pages/heads.py").run()
    assert at.text_area[0].value == list(PRESETS.values())[-1]


def test_home_and_an_example_need_neither_torch_nor_a_model(tmp_path: Path) -> None:
    write_example(tmp_path)
    script = f"""
import sys
from pathlib import Path
from urllib.parse import parse_qsl
from streamlit.testing.v1 import AppTest
from app import gallery
gallery.FOLDER = Path({str(tmp_path)!r})
at = AppTest.from_file({MAIN!r}, default_timeout=60).run()
next(b for b in at.button if b.label == "Open in Heads").click().run()
assert not at.exception and not at.error and len(at.button) > 6
loaded = sorted({{"torch", "transformers", "triton"}} & set(sys.modules))
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("base", "prompt", "message"),
    [("no-such-model", "hello", "no\\-such\\-model"), ("smollm2-135m", "", "no prompt to run")],
)
@pytest.mark.model
def test_errors_are_one_message_and_keep_the_prompt(at: AppTest, base: str, prompt: str, message: str) -> None:
    at.query_params.update({"base": base, "adapter": "none"})
    at.run()
    at.text_area[0].set_value(prompt).run()
    press(at, "Run")
    settled(at)
    assert len(at.error) == 1
    assert message in at.error[0].value
    assert "Traceback" not in at.error[0].value
    assert at.text_area[0].value == prompt


@pytest.mark.model
@pytest.mark.parametrize(
    "prompt",
    ["a", "the cat the dog", "   \n ", "🙂 naïve 猫 مرحبا", "x" * 400, "a\x07\u202eb <script>", "for i in x:\n\tpass"],
)
def test_any_prompt_runs_and_survives_page_changes(at: AppTest, prompt: str) -> None:
    at.query_params.update({"adapter": "none"})
    at.run()
    at.text_area[0].set_value(prompt).run()
    press(at, "Run")
    settled(at)
    assert not at.error
    assert "**L0·H0**" in texts(at)
    at.button(key="next").click().run()
    at.switch_page("pages/home.py").run()
    at.switch_page("pages/heads.py").run()
    settled(at)
    assert at.text_area[0].value == prompt
    assert "**L0·H1**" in texts(at)


def test_shipped_examples_are_complete_and_small() -> None:
    names = [recipe.name for recipe in gallery.recipes()]
    assert 3 <= len(names) <= 6
    assert list(gallery.stamps()) == names, "run `make gallery`"
    for name in names:
        size = sum(gallery.snapshot_path(name, view).stat().st_size for view in gallery.VIEWS)
        assert size < 1_600_000
        example = gallery.load(name)
        assert gallery.map_in(example.base, *example.head) is not None
        assert "–" not in example.finding


@pytest.mark.parametrize(
    "text",
    [HOSTILE, "a_b *c* `d` [e](f) ~g~ | h", ":material/home: :smile: http://x.y", "\\ <b> &amp; #1", "$\\rho$", "1. one"],
)
def test_plain_text_survives_markdown(text: str) -> None:
    from markdown_it import MarkdownIt

    shown = MarkdownIt().render(plain(text))
    assert "<script" not in shown
    assert all(tag not in shown for tag in ("<em>", "<strong>", "<code>", "<a ", "<b>", "<ol>", "<h1>"))
    for shortcode in (":red[", ":material", ":smile"):
        assert shortcode not in plain(text).replace("\\", "")


def test_links_bring_back_the_state_and_nothing_else() -> None:
    values = {"base": "m", "adapter": "none", "draft": HOSTILE, "chat": True, "score": "contribution", "space": "residual"}
    values |= {"statistic": "sink", "side": "change", "example": None, "layer": 12, "head": 3, "lock": (None, 4)}
    assert links.read(links.write(values)) == {key: value for key, value in values.items() if value is not None}
    wrong = {
        "score": "none",
        "layer": "-1",
        "head": "9" * 9,
        "lock": "a.b",
        "chat": "yes",
        "side": "",
        "evil": "1",
        "statistic": "x",
    }
    assert links.read(wrong) == {}


def test_a_link_opens_its_view(at: AppTest) -> None:
    at.query_params.update({"draft": "hello", "base": "not-known", "statistic": "sink", "layer": "3", "score": "nonsense"})
    at.run()
    assert at.text_area[0].value == "hello"
    assert at.selectbox(key="statistic").value == "sink"
    assert at.selectbox(key="score").value == state.DEFAULTS["score"]
    assert at.session_state["layer"] == 3
    assert at.session_state["ran"] is None, "a model that is not known must not be loaded by a link"
    at.switch_page("pages/heads.py").run()
    assert "it loads the model not\\-known" in texts(at)


def test_the_link_in_the_menu_leads_to_the_same_view(at: AppTest, shelf: Path) -> None:
    at.context["url"] = "https://example.org/heads?old=1"
    at.run()
    press(at, "Open in Heads")
    at.button(key="next").click().run()
    at.text_area[0].set_value("a draft that nobody has run").run()
    shown = next(code.value for code in at.code if code.value.startswith("https://example.org/heads?"))
    values = links.read(dict(parse_qsl(shown.partition("?")[2])))
    assert values["example"] == "one"
    assert not {"base", "adapter", "draft"} & set(values)
    assert (values["layer"], values["head"]) == (at.session_state["layer"], at.session_state["head"])
    other = AppTest.from_file(MAIN, default_timeout=60)
    other.query_params.update(parse_qsl(shown.partition("?")[2]))
    other.run()
    other.switch_page("pages/heads.py").run()
    assert f"**L{values['layer']}·H{values['head']}**" in texts(other)
    assert other.text_area[0].value == HOSTILE


@pytest.mark.usefixtures("shelf")
def test_the_sidebar_names_the_pair_on_screen_and_marks_another_choice(at: AppTest) -> None:
    at.query_params.update({"base": "elsewhere/model", "adapter": "none"})
    at.run()
    press(at, "Open in Heads")
    badges = [element.value.replace("\\", "") for element in at.markdown if "-badge[" in element.value]
    assert [name for name in ("tiny", "elsewhere") if any(name in badge for badge in badges)] == ["tiny"]
    assert any("elsewhere" in caption.value and "takes effect with Run" in caption.value for caption in at.caption)
    at.text_area[0].set_value("something else").run()
    assert "Not run yet" in texts(at)


@pytest.mark.usefixtures("shelf")
def test_an_empty_prompt_leaves_the_results_on_screen(at: AppTest) -> None:
    at.run()
    press(at, "Open in Heads")
    at.text_area[0].set_value("").run()
    press(at, "Run")
    assert "no prompt to run" in at.error[0].value
    assert at.session_state["example"] == "one"


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(("lock", "kept"), [("4.2", (4, 2)), ("5.", None), (".5", None), ("2.3", None), (".4", (None, 4))])
def test_a_lock_on_tokens_that_are_not_there_is_forgotten(at: AppTest, lock: str, kept: tuple[int | None, int] | None) -> None:
    at.query_params.update({"example": "one", "lock": lock})
    at.run()
    at.switch_page("pages/heads.py").run()
    assert at.session_state["lock"] == kept


def test_answers_are_bounded_and_belong_to_their_key() -> None:
    answers = Answers(max_entries=3, max_bytes=1000)
    for place in range(5):
        answers.put(str(place), np.full(10, place, np.uint8))
    assert [answers.get(str(place)) is not None for place in range(5)] == [False, False, True, True, True]
    answers.put("large", {"array": np.zeros(990, np.uint8)})
    assert len(answers) == 2
    answers.put("larger than all", np.zeros(5000, np.uint8))
    assert answers.get("larger than all") is not None
    assert len(answers) == 1


def test_statistics_downloads_hold_every_head() -> None:
    base, variant = captures()
    rows = list(csv.DictReader(io.StringIO(downloads.statistics_csv(base, variant).decode())))
    assert len(rows) == len(base.stats) * LAYERS * HEADS
    assert float(rows[0]["base"]) == pytest.approx(float(base.mean(rows[0]["statistic"])[0, 0]))
    table = json.loads(downloads.statistics_json(base, variant))
    assert len(table["heads"]) == len(rows)
    assert set(table["definitions"]) == set(base.stats)


def test_map_downloads_hold_the_lower_triangle_and_no_formulas() -> None:
    base, variant = (gallery.map_in(capture, 1, 1) for capture in captures())
    assert base is not None
    assert variant is not None
    labels = ("=1+1", "@x", "猫", "", "a,b")
    rows = list(csv.DictReader(io.StringIO(downloads.map_csv(base, variant, labels).decode())))
    assert len(rows) == TOKENS * (TOKENS + 1) // 2
    assert {row["key_token"] for row in rows} == {"'=1+1", "'@x", "猫", "", "a,b"}
    last = rows[-1]
    assert float(last["change"]) == pytest.approx(float(variant.scores[-1, -1] - base.scores[-1, -1]), rel=1e-4)
    stacked = np.load(io.BytesIO(downloads.map_npy(base, variant)))
    np.testing.assert_array_equal(stacked, [base.scores, variant.scores])


def test_only_long_warm_captures_tell_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ModelSize(3, 2, 1, 64, 64, 128, 256, 0, 8192, 1_000_000, "float32", "cpu")
    info = PairInfo(PairSpec("m"), "m", "m", 3, 2, 1, 64, 8192, 1_000_000, "float32", "cpu", (0.0,) * 3, ((),) * 3, {}, size)
    rates: dict[str, float] = {}
    monkeypatch.setattr(cache, "_rates", lambda: rates)
    monkeypatch.setattr(cache, "known_pair", lambda _pair: info)
    short, long = (make_capture(1, 1, tokens, seed=1) for tokens in (20, 256))
    request = CaptureView(info.pair, Prompt("x"), "variant")
    cache._learn_speed(request, short, 5.0)
    cache._learn_speed(request, long, 0.9)
    assert not rates
    cache._learn_speed(request, long, 5.0)
    assert cost(info, 256, rates["cpu"]).seconds == pytest.approx(5.0)


def test_session_state_and_caches_have_one_owner() -> None:
    for path in sorted((ROOT / "app").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        place = path.relative_to(ROOT).as_posix()
        assert "unsafe_allow_html" not in source, place
        if place not in ("app/state.py", "app/components/attention_map.py", "app/components/token_picker.py"):
            assert "session_state" not in source, place
        if place != "app/cache.py":
            assert "st.cache_" not in source, place
