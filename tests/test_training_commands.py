"""`train`, `select-heads` and `eval` on the command line: resuming, plans, bad input, progress and JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dexviz.cli import main
from dexviz.models import load_model
from dexviz.training import train
from tests.cli_runs import ROOT, Run, check_refused, runner
from tests.training_runs import assert_same_adapter, base_and_text, config, killed_at, options, short_held_out

Patch = pytest.MonkeyPatch
DOCUMENTED = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_and_text(tmp_path_factory.mktemp("commands"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> Run:
    short_held_out(None, monkeypatch)
    return runner(capsys)


def keys(command: str) -> set[str]:
    """Top keys of the command's JSON, as docs/cli.md tells them."""
    part = DOCUMENTED.partition(f"\n## {command}\n")[2].partition("\n## ")[0].partition("| key |")[2]
    rows = re.findall(r"^\| (`.+?`) \| ", part, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_train_tells_of_every_step_and_answers_in_json(run: Run, root: Path, tmp_path: Path) -> None:
    status, out, err = run("train", *options(root, evaluate_every=2), "--out", tmp_path / "out", "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert set(answer) == keys("train")
    assert set(answer["held_out"]) == {"base", "variant", "relative_change", "relative_change_95"}
    assert answer["trained"] == ["W_D", "lambda_learn"]
    lines = err.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"dexviz: step 1/4: loss \d\.\d{4}(, λ \S+ to \S+)?", lines[0])
    second = r"dexviz: step 2/4: loss \S+, validation \S+, held-out \S+, λ \S+ to \S+, [\d,]+ tokens/s, \d\d:\d\d left"
    assert re.fullmatch(second, lines[1])


def test_resume_takes_the_stopped_runs_settings(run: Run, root: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    loaded = load_model(str(root / "base"))
    train(loaded, tmp_path / "whole", config(root))
    killed_at(3, loaded, tmp_path / "out", config(root))
    check_refused(*run("train", "--resume", "--steps", "9", "--out", tmp_path / "out"), "got another steps")
    status, out, err = run("train", "--resume", "--out", tmp_path / "out", "--json")
    assert status == 0, err
    assert json.loads(out)["model"] == str(root / "base")
    assert err.startswith("dexviz: step 3/4")
    assert_same_adapter(tmp_path / "whole", tmp_path / "out", loaded)


def test_resume_with_nothing_there_starts_anew(run: Run, root: Path, tmp_path: Path) -> None:
    status, _, err = run("train", *options(root, steps=1), "--resume", "--out", tmp_path / "out")
    assert status == 0, err
    assert err.startswith("dexviz: nothing to resume beside")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "train_config.json").write_text("{")
    check_refused(*run("train", "--resume", "--out", tmp_path / "new"), "Expected the settings of a run in")


def test_a_plan_goes_from_selection_to_training(run: Run, root: Path, tmp_path: Path) -> None:
    text = ("--model", root / "base", "--data", root / "text.txt", "--block", "16", "--blocks", "2")
    status, out, _ = run("select-heads", *text, "--criterion", "importance", "--out", tmp_path / "plan.json", "--json")
    plan = json.loads(out)
    assert status == 0
    assert set(plan) == keys("select-heads")
    status, _, err = run("train", *options(root, steps=1, heads=tmp_path / "plan.json"), "--out", tmp_path / "out")
    assert status == 0, err
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["dex"]["heads"] == plan["heads"]
    check_refused(*run("select-heads", *text, "--criterion", "L0H99", "--out", tmp_path / "no.json"), "got L0H99")
    check_refused(*run("select-heads", *text, "--per-layer", "99", "--out", tmp_path / "no.json"), "1 to 6 heads a layer")
    assert not (tmp_path / "no.json").exists()


def test_eval_answers_with_the_documented_keys(run: Run, root: Path, tmp_path: Path) -> None:
    assert run("train", *options(root, steps=1), "--out", tmp_path / "out")[0] == 0
    small = ("--needles", "0", "--rounds", "1", "--resamples", "100", "--block", "64")
    status, out, err = run("eval", "--adapter", tmp_path / "out", *small, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert set(answer) == keys("eval")
    assert answer["needles"] is None
    for part in ("held_out", "speed", "provenance", "parameters"):
        row = re.search(rf"^\| `{part}` \| (.*) \|$", DOCUMENTED.partition("\n## eval\n")[2], re.MULTILINE)
        assert row is not None
        assert set(answer[part]) <= set(re.findall(r"`(\w+)`", row[1])), part
    assert set(answer["held_out"]["loss"]) == {"base", "variant", "change"}
    assert set(answer["held_out"]["kl"]) == {"mean", "low", "high", "level", "units", "unit"}
    base = json.loads(run("eval", "--model", root / "base", *small, "--no-speed", "--json")[1])
    assert (base["held_out"]["loss"]["variant"], base["speed"], base["parameters"]["adapter"]) == (None, None, None)
    check_refused(*run("eval", "--adapter", tmp_path / "out", "--block", "1"), "blocks of 2 to 1,024 tokens")
    check_refused(*run("eval", "--adapter", tmp_path / "out", "--depths", "2"), "needle depths between 0 and 1")


@pytest.mark.parametrize(
    ("name", "content", "more", "message"),
    [
        ("a.txt", b"", {}, "got"),
        ("a.txt", b"w1 w2 w3", {}, "at least 16 tokens, one block, got 3"),
        ("a.txt", b"w1 \xff\xfe w2", {}, "UTF-8"),
        ("a.jsonl", b'{"body": "w1 w2"}\n', {}, "text"),
        ("a.jsonl", b'{"text": "w1 w2"}\n{"text": \n', {}, "got"),
    ],
    ids=["empty", "short", "not UTF-8", "no column", "torn JSONL"],
)
def test_unusable_text_is_one_clear_line(
    name: str, content: bytes, more: dict, message: str, run: Run, root: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    asked = ("train", *options(root, data=tmp_path / name, **more), "--out", tmp_path / "out")
    check_refused(*run(*asked), message)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_loss_that_is_no_number_ends_with_status_2(run: Run, root: Path, tmp_path: Path) -> None:
    status, out, err = run("train", *options(root, learning_rate=1e30), "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if not line.startswith("dexviz: step")]
    assert len(errors) == 1
    assert "NaN or infinity at step" in errors[0]
    assert not (tmp_path / "out").exists()


def _available(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except BlockingIOError:
        return b""


def test_a_terminal_shows_a_bar(root: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    short_held_out(None, monkeypatch)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "160")
        assert main([*("train", "--out", str(tmp_path / "out")), *options(root, steps=3)]) == 0
        monkeypatch.undo()
        os.set_blocking(leader, False)
        shown = b"".join(iter(lambda: _available(leader), b"")).decode()
    os.close(leader)
    assert re.search(r"train: 100%.* 3/3 \[\d\d:\d\d<\d\d:\d\d.*loss \d\.\d{4}, λ \S+ to \S+, [\d,]+ tokens/s", shown), shown


def test_a_killed_process_is_resumed_to_the_same_weights(root: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    loaded = short_held_out(load_model(str(root / "base")), monkeypatch)
    settings = {"steps": 400, "save_every": 3}
    command = [sys.executable, "-m", "dexviz", "train", *options(root, **settings), "--out", str(tmp_path / "out")]
    log = tmp_path / "out.partial" / "training_log.jsonl"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 300
        while not (log.is_file() and log.read_text().count("\n") >= 3):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(torch.rand(()).item() / 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    reached = log.read_text().count("\n")
    assert reached < 400
    short = config(root, **settings)
    whole = killed_at(reached + 1, loaded, tmp_path / "whole", short)
    resumed = killed_at(reached + 1, loaded, tmp_path / "out", short)
    assert 0 < len(resumed) <= reached + 1
    assert resumed == whole[-len(resumed) :]
    names = [json.loads(line) for line in log.read_text().splitlines()]
    assert names == whole
