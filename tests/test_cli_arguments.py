"""Arguments that no command can act on, names that cannot be, numbers out of range; and streams that cannot show everything."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from dexviz.cli import main
from tests.adapters import tiny_model
from tests.cli_runs import Run, check_refused, runner

pytestmark = pytest.mark.model
LONG = "n" * 300
CAPTURE = ("capture", "--prompt", "w1 w2 w3")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*CAPTURE, "--model"), "a folder, or a hub id like owner/name"),
        ((*CAPTURE, "--adapter"), "a folder, or a hub id like owner/name"),
        ((*CAPTURE, "--variant"), "a folder, or a hub id like owner/name"),
        ((*CAPTURE, "--out"), "Expected a file that can be written"),
        (("capture", "--prompt-file"), "Expected UTF-8 text in"),
        (("fetch",), "Expected a known model"),
        (("merge", "--adapter", "default", "--out"), "Expected a folder that can be written"),
        (("train", "--out"), "Expected a folder that can be written"),
    ],
)
def test_names_longer_than_the_file_system_takes(run: Run, argv: tuple[str, ...], message: str) -> None:
    check_refused(*run(*argv, LONG), message)


def test_a_name_that_leaves_no_room_for_the_work_beside_it(run: Run, tmp_path: Path) -> None:
    for command in (("merge", "--adapter", "default"), ("train",)):
        check_refused(*run(*command, "--out", tmp_path / LONG[:250]), "File name too long")


@pytest.mark.parametrize("data", [LONG, "~nosuchuser/x"])
def test_corpora_that_cannot_be(run: Run, tiny: Path, tmp_path: Path, data: str) -> None:
    asked = ("train", "--model", tiny, "--out", tmp_path / "new", "--data", data, "--block", "8")
    check_refused(*run(*asked), "a text file or folder, a .jsonl file, or a data set")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--model", "--adapter", "--variant"])
def test_the_home_of_nobody(run: Run, option: str) -> None:
    check_refused(*run(*CAPTURE, option, "~nosuchuser/x"), "a folder, or a hub id like owner/name")


@pytest.mark.parametrize("option", ["--model", "--adapter", "--variant", "--out", "--device", "--dtype", "--similarity"])
@pytest.mark.parametrize("text", ["", " "])
def test_empty_names_stand_for_nothing(run: Run, option: str, text: str) -> None:
    check_refused(*run(*CAPTURE, option, text), f"argument {option}: expected a name or a path, got an empty text")


@pytest.mark.parametrize(
    "argv",
    [
        ("train", "--out", ""),
        ("train", "--out", "x", "--model", ""),
        ("train", "--out", "x", "--data", ""),
        ("merge", "--out", ""),
        ("merge", "--out", "x", "--adapter", ""),
        ("serve", "--address", ""),
    ],
)
def test_empty_names_of_the_other_commands(run: Run, argv: tuple[str, ...]) -> None:
    check_refused(*run(*argv), f"argument {argv[-2]}: expected a name or a path, got an empty text")


@pytest.mark.parametrize("option", ["--local", "--sink", "--pool"])
@pytest.mark.parametrize("number", ["100000000000", str(10**23), str(1 << 31), "1.5", "many"])
def test_numbers_that_cannot_be(run: Run, option: str, number: str) -> None:
    message = f"argument {option}: expected a whole number within -2147483647..2147483647, got {number!r}"
    check_refused(*run(*CAPTURE, option, number), message)


@pytest.mark.parametrize("command", [CAPTURE, ("train", "--out", "x"), ("merge", "--adapter", "default", "--out", "x")])
@pytest.mark.parametrize("seed", ["-1", str(1 << 32), str(10**23)])
def test_seeds_out_of_range(run: Run, command: tuple[str, ...], seed: str) -> None:
    check_refused(
        *run(*command, "--seed", seed), f"argument --seed: expected a whole number within 0..4294967295, got {seed!r}"
    )


def test_the_largest_numbers_mean_the_whole_prompt(run: Run, tiny: Path) -> None:
    ask = (*CAPTURE, "--model", tiny, "--json", "--seed", (1 << 32) - 1)
    largest, all_three = (json.loads(run(*ask, "--sink", n, "--local", n)[1])["stats"] for n in ((1 << 31) - 1, 3))
    assert largest == all_three
    assert all_three["local"][0][0] == pytest.approx(1)


@pytest.mark.parametrize("option", [("--maps", f"L{'1' * 5000}H0"), ("--span", f"x=0:{'1' * 5000}")], ids=["maps", "span"])
def test_numbers_of_thousands_of_digits(run: Run, option: tuple[str, str]) -> None:
    check_refused(*run(*CAPTURE, *option), f"Change {option[0]}.")


def test_spans_and_maps_may_come_in_parts_but_spans_only_once(run: Run, tiny: Path) -> None:
    ask = (*CAPTURE, "--model", tiny, "--json")
    answer = json.loads(run(*ask, "--span", "a=0:1", "--span", "b=1:2", "--maps", "L0H0", "--maps", "L1H1")[1])
    assert answer["request"]["spans"] == {"a": [0, 1], "b": [1, 2]}
    assert answer["request"]["maps"] == [[0, 0], [1, 1]]
    for twice in (("--span", "a=0:1", "a=1:2"), ("--span", "a=0:1", "--span", "a=0:1")):
        check_refused(*run(*ask, *twice), "Expected spans with different names, got 'a' twice")


@pytest.mark.parametrize("address", ["a..b", LONG, "no such host"])
def test_addresses_that_cannot_be(run: Run, address: str) -> None:
    check_refused(*run("serve", "--address", address), "Expected a free port at")


def test_a_stream_that_cannot_show_every_character(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*argv: str | Path) -> str:
        with monkeypatch.context() as patched:
            stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
            patched.setattr(sys, "stdout", stream)
            assert main([str(part) for part in argv]) == 0
            return stream.buffer.getvalue().decode("ascii")

    ask = ("capture", "--prompt", "w1 × λ", "--model", tiny, "--span", "λ=0:1")
    assert "2 layers \\xd7 6 heads" in shown(*ask)
    answer, readable = json.loads(shown(*ask, "--json")), run(*ask, "--json")[1]
    assert "span:λ" in readable
    assert answer["stats"] == json.loads(readable)["stats"]
    with pytest.raises(SystemExit, match="0"):
        shown("capture", "--help")
