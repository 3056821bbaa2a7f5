"""The noise command: answers with the documented keys, tables, files, and options that make no sense."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dexviz
from dexviz.claims_records import ClaimsRequest
from dexviz.cli import build_parser
from dexviz.noise_records import MEASURES, BatteryRequest
from dexviz.noise_table import battery_table, prompt_table
from tests.adapters import random_adapter
from tests.cli_runs import ROOT, Run, check_refused, runner
from tests.readers import byte_model, byte_tokenizer

SECTION = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("\n## noise\n")[2].partition("\n## ")[0]
PARTS = dict(zip(("prompt", "battery", "claims"), re.split(r"\nOf (?:a marked|a battery|claims)", SECTION)[1:], strict=True))
TEXT = "The red key is in the box. The blue key is in the sea. Where is the blue key?"
ASK = ("noise", "--prompt", TEXT, "--needle", "in the sea")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of a tiny model that reads bytes; it names its base."""
    root = tmp_path_factory.mktemp("noise")
    byte_model("llama").save_pretrained(root / "base")
    byte_tokenizer().save_pretrained(root / "base")
    return random_adapter(dexviz.load_pair(str(root / "base")).base.loaded, root / "dex", lam=0.8)


def documented(kind: str) -> set[str]:
    """Top keys of that kind's answer, as docs/cli.md tells them."""
    rows = re.findall(r"^\| (`.+?) \|", PARTS[kind], re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([a-z_]+)`", row)}


def named(kind: str, key: str) -> set[str]:
    """Names in the row of a key."""
    return set(re.findall(r"`([a-z_]+)`", next(line for line in PARTS[kind].splitlines() if line.startswith(f"| `{key}`"))))


def keys_below(value: Any) -> Iterable[str]:
    if isinstance(value, list):
        for each in value:
            yield from keys_below(each)
    elif isinstance(value, dict):
        yield from value


def test_every_option_is_documented() -> None:
    parser = next(action for action in build_parser()._actions if action.dest == "run" or action.choices)
    options = {name for action in parser.choices["noise"]._actions for name in action.option_strings if name.startswith("--")}
    general = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("\n## capture")[0]
    assert [name for name in options - {"--help", "--json"} if f"`{name}" not in SECTION + general] == []
    defaults = {"per-cell": BatteryRequest().per_cell, "depths": "0 0.25 0.5 0.75 1", "orders": ClaimsRequest().orders}
    defaults |= {"prompts": ClaimsRequest().prompts, "tokens": ClaimsRequest().tokens, "resamples": 2000, "level": 0.95}
    for name, default in defaults.items():
        assert re.search(rf"^\| `--{name} [^`]+` \| [^|]+ \| {re.escape(str(default))} \|", SECTION, re.MULTILINE), name


def test_a_marked_prompt(run: Run, adapter: Path) -> None:
    options = ("--question", "Where is the blue key?", "--answer", " sea", "--rows", "-1", "-3", "--adapter", adapter)
    status, out, err = run(*ASK, *options, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert set(answer) == documented("prompt") - {"terms"}
    assert {*answer["base"], *answer["base"]["mean"]} <= named("prompt", "base")
    start = TEXT.index("in the sea")
    assert answer["marks"]["needle"] == [[start, start + 10]]
    found = dexviz.noise(
        dexviz.load_pair(adapter=str(adapter)), TEXT, "in the sea", question="Where is the blue key?", rows=(-1, -3)
    )
    for name in MEASURES:
        assert np.allclose(answer["variant"]["heads"][name], getattr(found.variant, name), rtol=1e-5)
    by_place = run("noise", "--prompt", TEXT, "--needle-at", f"{start}:{start + 10}", *options, "--json")
    assert json.loads(by_place[1])["base"] == answer["base"]


def test_noise_terms_of_heads(run: Run, adapter: Path) -> None:
    status, out, _ = run(*ASK, "--adapter", adapter, "--terms", "L1H2", "L0H1", "--json")
    answer = json.loads(out)
    assert (status, set(answer)) == (0, documented("prompt"))
    pair = dexviz.load_pair(adapter=str(adapter))
    terms = dexviz.noise_terms(pair.variant, pair.tokenize(TEXT), [(1, 2), (0, 1)])
    assert [term["kind"] for term in answer["terms"]] == ["dex", "none"]
    for key, value in terms[0].to_json().items():
        assert answer["terms"][0][key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
    assert set(answer["terms"][0]) <= named("prompt", "terms")
    text = run(*ASK, "--adapter", adapter, "--terms", "L1H2")[1]
    assert f"{terms[0].energy:.3f}" in text
    assert f"{terms[0].rank:.3f}" in text
    status, out, err = run(*ASK, "--terms", "head 3")
    check_refused(status, out, err, "a head written like L12H3")


def test_the_table_of_a_marked_prompt(run: Run, adapter: Path) -> None:
    status, out, _ = run(*ASK, "--adapter", adapter, "--heads", "3")
    lines = out.splitlines()
    assert status == 0
    pair = dexviz.load_pair(adapter=str(adapter))
    found = dexviz.noise(pair, TEXT, "in the sea")
    assert lines[2].split()[-6:] == [
        f"{100 * found.base.over_heads()['signal']:.3f}",
        f"{100 * found.base.over_heads()['noise']:.3f}",
        f"{found.base.over_heads()['snr']:.3f}",
        f"{100 * found.base.over_heads()['sink']:.3f}",
        f"{100 * found.base.over_heads()['negative']:.3f}",
        f"{found.base.over_heads()['net']:.3f}",
    ]
    change = found.variant.signal - found.base.signal
    ranked = [divmod(int(i), change.shape[1]) for i in np.argsort(-np.abs(change), axis=None)[:3]]
    shown = [line for line in lines if re.match(r"  L\d", line)]
    assert [line.split()[0] for line in shown] == [f"L{layer}·H{head}" for layer, head in ranked]
    assert shown[0].split()[5] == f"{100 * change[ranked[0]]:+.3f}"
    assert "L0·H" not in prompt_table(found, 0)
    alone = prompt_table(dexviz.noise(dexviz.load_pair(str(adapter.parent / "base")), TEXT, "in the sea"), 2)
    assert "base, highest signal" in alone
    assert "variant" not in alone


def test_a_battery(run: Run, adapter: Path, tmp_path: Path) -> None:
    options = ("--lengths", "700", "--depths", "0", "1", "--per-cell", "2", "--resamples", "200", "--seed", "3")
    status, out, _ = run("noise", "--battery", *options, "--adapter", adapter, "--out", tmp_path / "b.json", "--json")
    answer = json.loads(out)
    assert status == 0
    assert set(answer) == documented("battery") | {"out"}
    assert answer == {**json.loads((tmp_path / "b.json").read_text(encoding="utf-8")), "out": str(tmp_path / "b.json")}
    assert set(keys_below(answer["rows"])) <= named("battery", "rows")
    assert set(keys_below(answer["prompts"])) <= named("battery", "prompts")
    assert (answer["request"]["seed"], answer["language"], len(answer["prompts"])) == (3, "prose", 4)
    pair = dexviz.load_pair(adapter=str(adapter))
    report = dexviz.noise_battery(pair, BatteryRequest(lengths=(700,), depths=(0, 1), per_cell=2, seed=3))
    signal = report.heads["signal"]
    text = battery_table(report, 2)
    best = np.unravel_index(np.abs(signal.change.mean).argmax(), signal.change.mean.shape)
    (line,) = [line for line in text.splitlines() if line.startswith(f"  L{best[0]}·H{best[1]} ")]
    assert f"{100 * signal.change.mean[best]:+.3f} [{100 * signal.change.low[best]:+.3f}," in line
    assert f"  depth 1                 {report.by_depth()[1].measures['snr'].base.mean:.3f}" in text
    assert sum(line.startswith("  L") for line in text.splitlines()) == 2


def test_claims(run: Run, adapter: Path) -> None:
    asked = ("noise", "--adapter", adapter, "--claims", "contradiction,outliers", "--prompts", "2", "--tokens", "32")
    status, out, err = run(*asked, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert set(answer) == documented("claims")
    assert answer["request"]["claims"] == ["contradiction", "outliers"]
    assert set(keys_below(answer["contradiction"]["rows"])) <= named("claims", "contradiction")
    assert set(answer["contradiction"]) <= named("claims", "contradiction")
    row = answer["outliers"]["rows"][0]
    assert {*answer["outliers"], *row, *row["base"]} <= named("claims", "outliers")
    text = run(*asked)[1]
    assert "Contextual questions" in text
    assert "In-context" not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("noise",), "one of the arguments --prompt --prompt-file --battery --claims is required"),
        (("noise", "--battery", "--claims"), "argument --claims: not allowed with argument --battery"),
        (("noise", "--prompt", TEXT), "Expected a needle, the text that the answer depends on, got none"),
        ((*ASK, "--needle-at", "3"), "Expected characters written like 10:18, got '3'"),
        ((*ASK, "--lengths", "256"), "Expected options of a marked prompt, got --lengths"),
        ((*ASK, "--resamples", "200"), "Expected options of a marked prompt, got --resamples"),
        (("noise", "--battery", "--needle", "x"), "Expected options of --battery, got --needle"),
        (("noise", "--claims", "--score", "signed"), "Expected options of --claims, got --score"),
        (("noise", "--claims", "--per-cell", "0"), "Expected options of --claims, got --per-cell"),
        (("noise", "--claims", "--chat"), "Expected options of --claims, got --chat"),
        (("noise", "--claims", "in-context,magic"), "Expected some of the claims in-context, contradiction, outliers"),
        (("noise", "--claims", "--orders", "1"), "Expected 2 to 1,000 orders of the examples, got 1"),
        (("noise", "--battery", "--level", "2"), "Expected at least 100 resamples and a level between 0 and 1"),
        (("noise", "--battery", "--per-cell", "0"), "at least one prompt a cell"),
        ((*ASK, "--out", "/no/such/folder/a"), "Expected a file in a folder that exists"),
        ((*ASK, "--model", "nope"), "Expected a known model"),
        (("noise", "--prompt-file", "/no/such/file"), "Expected UTF-8 text in /no/such/file"),
    ],
)
def test_bad_input_is_one_clear_line(run: Run, argv: tuple[str, ...], message: str) -> None:
    check_refused(*run(*argv), message)


def test_marks_that_cannot_be(run: Run, adapter: Path, tmp_path: Path) -> None:
    asked = ("noise", "--adapter", adapter, "--prompt", TEXT, "--out", tmp_path / "n.json")
    check_refused(*run(*asked, "--needle", "the green key"), "got 'the green key', which is not in it")
    check_refused(*run(*asked, "--needle", "key is in"), "which is there 2 times")
    check_refused(*run(*asked, "--needle-at", "70:99"), "Expected marks within the prompt's 77 characters")
    assert list(tmp_path.iterdir()) == []
