"""The command line: answers, and one clear line for every kind of bad input."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from dexviz import load_snapshot
from dexviz.benchmark import BenchConfig
from dexviz.catalogue import DEFAULT_MODEL, KNOWN_MODELS
from dexviz.cli import build_parser
from dexviz.commands.adapters import train_config
from dexviz.evaluation import EvalConfig
from dexviz.fetching import fetch
from dexviz.head_selection import SelectionConfig
from dexviz.models import load_model
from dexviz.train_config import TrainConfig
from tests.adapters import tiny_model
from tests.cli_runs import ROOT, Run, check_refused, run_process, runner, tiny_adapter

pytestmark = pytest.mark.model
COMMANDS = ("fetch", "models", "capture", "noise", "select-heads", "train", "eval", "merge", "bench", "serve")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("adapters") / "tiny-dex", tiny)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(run: Run, command: str) -> None:
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert "--json" in out


def test_models_lists_the_known_ones(run: Run) -> None:
    status, out, _ = run("models", "--json")
    found = {info["name"]: info for info in json.loads(out)["models"]}
    assert status == 0
    assert set(KNOWN_MODELS) <= set(found)
    assert found[DEFAULT_MODEL]["licence"] == "Apache-2.0"
    assert DEFAULT_MODEL in run("models")[1]


def test_fetch_says_where_the_model_is(run: Run) -> None:
    status, out, err = run("fetch", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"name": DEFAULT_MODEL, "path": str(fetch(DEFAULT_MODEL))}


def test_capture_of_the_default_model(run: Run, tmp_path: Path) -> None:
    options = ("--maps", "L3H2", "l29h8", "--similarity", "--span", "word=1:3", "--pool", "4", "--chat", "--json")
    status, out, err = run("capture", "--prompt", "What is the capital of France?", *options, "--out", tmp_path / "a.dexviz")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert (answer["model"], answer["layers"], answer["heads"]) == (DEFAULT_MODEL, 30, 9)
    assert answer["tokens"][0] == {"id": 1, "label": "<|im_start|>"}
    assert answer["top"][0]["token"] == "The"
    assert 0 < answer["top"][0]["prob"] < 1
    assert np.shape(answer["stats"]["span:word"]) == np.shape(answer["stats"]["entropy"]) == (30, 9)
    assert np.shape(answer["similarity"]["cosine"]) == (30,)
    saved = load_snapshot(tmp_path / "a.dexviz")
    assert set(saved.maps) == {(3, 2), (29, 8)}
    assert np.allclose(saved.mean("entropy"), answer["stats"]["entropy"])
    assert answer["out"] == str(tmp_path / "a.dexviz")


def test_prompt_comes_from_a_file_or_standard_input(
    run: Run, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("w1 w2\nw3\n", encoding="utf-8")
    typed = run("capture", "--model", tiny, "--prompt", "w1 w2\nw3", "--json")
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        piped = run("capture", "--model", tiny, "--prompt-file", "-", "--json")
    read = run("capture", "--model", tiny, "--prompt-file", file, "--json")
    stats = [json.loads(out)["stats"] for _, out, _ in (typed, piped, read)]
    assert stats[0] == stats[1] == stats[2]


def test_an_adapter_alone_implies_its_base(run: Run, adapter: Path, tiny: Path) -> None:
    status, out, _ = run("capture", "--adapter", adapter, "--prompt", "w1 w2 w3", "--json")
    answer = json.loads(out)
    assert status == 0
    assert answer["model"] == str(tiny)
    assert answer["lambda"] == [0.5, 0.5]
    assert answer["selected"] == [[0, 1], [0, 1]]
    base = json.loads(run("capture", "--adapter", adapter, "--view", "base", "--prompt", "w1 w2 w3", "--json")[1])
    assert base["lambda"] == [0.0, 0.0]


def test_merge_writes_a_plain_checkpoint(run: Run, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    status, text, _ = run("merge", "--adapter", adapter, "--out", out, "--json")
    assert (status, json.loads(text)["out"]) == (0, str(out))
    merged = json.loads(run("capture", "--model", out, "--prompt", "w1 w2 w3", "--json")[1])
    unmerged = json.loads(run("capture", "--adapter", adapter, "--prompt", "w1 w2 w3", "--json")[1])
    probabilities = [[row["prob"] for row in answer["top"]] for answer in (merged, unmerged)]
    assert np.allclose(*probabilities, atol=1e-5)
    check_refused(*run("merge", "--adapter", adapter, "--out", out), "Choose another --out.")


def test_train_writes_an_adapter(run: Run, tiny: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(f"w{i % 50 + 1}" for i in range(2000)), encoding="utf-8")
    settings = ("--data", corpus, "--steps", "2", "--block", "16", "--batch", "2", "--calibration-blocks", "1")
    status, out, err = run("train", "--model", tiny, "--out", tmp_path / "new", *settings, "--json")
    assert status == 0, err
    assert "step 2/2: loss" in err
    assert json.loads(out)["held_out"]["base"]["mean"] > 0
    assert run("capture", "--adapter", tmp_path / "new", "--prompt", "w1", "--json")[0] == 0


def test_train_options_are_those_of_the_configuration() -> None:
    parsed = build_parser().parse_args(["train", "--out", "x"])
    assert {getattr(parsed, field.name) for field in fields(TrainConfig)} == {None}, "what is not given decides nothing"
    assert train_config(parsed) == TrainConfig()


def test_train_options_are_documented() -> None:
    assert_documented("train", TrainConfig, ("seed",))


def test_options_of_selection_and_evaluation_are_documented() -> None:
    assert_documented("select-heads", SelectionConfig, ("seed", "measure"))
    assert_documented("eval", EvalConfig, ("seed", "speed", "lengths", "depths"))
    assert_documented("bench", BenchConfig, ("seed", "memory", "lengths"))


def assert_documented(command: str, config: type, but: tuple[str, ...]) -> None:
    """Every field has a row in the command's part of docs/cli.md, with its default."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `--([a-z-]+) [^`]+` \| `?(.+?)`? \|", text, re.MULTILINE))
    for field in fields(config):
        if field.name not in but:
            shown = rows[field.name.replace("_", "-")]
            assert shown == str(field.default) or field.default is None, field.name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "arguments are required: COMMAND"),
        (("no-such-command",), "invalid choice"),
        (("fetch", "nope"), "Expected a known model (smollm2-135m, "),
        (("capture",), "one of the arguments --prompt --prompt-file is required"),
        (
            ("capture", "--prompt", "a", "--model", "nope"),
            "Expected a known model (smollm2-135m, retrieval-llama, retrieval-diff), a folder, or a hub id",
        ),
        (("capture", "--prompt", "a", "--model", "./no/such/folder"), "a folder, or a hub id"),
        (("capture", "--prompt", "a", "--adapter", "./nope"), "a folder, or a hub id like owner/name"),
        (("capture", "--prompt", "a", "--maps", "12,3"), "Expected a head written like L12H3, got '12,3'"),
        (("capture", "--prompt", "a", "--span", "x=3"), "Expected a span written like needle=10:18"),
        (("capture", "--prompt", "a", "--pool", "0"), "`pool` to be between 1 and 1024, got 0"),
        (("capture", "--prompt", "a", "--similarity", "cka,foo"), "names out of cosine, cka, js"),
        (("capture", "--prompt", "a", "--score", "foo"), "invalid choice: 'foo'"),
        (("capture", "--prompt-file", "/no/such/file"), "Expected UTF-8 text in /no/such/file"),
        (("capture", "--prompt", "a", "--out", "/no/such/folder/a"), "a file in a folder that exists"),
        (("merge", "--out", "x"), "Expected an adapter to merge, got none"),
        (("serve", "--port", "70000"), "Expected a port within 1..65535, got 70000"),
        (("serve", "--address", "203.0.113.1"), "Expected a free port at 203.0.113.1:8501"),
        (("train", "--out", "x", "--steps", "0"), "`steps` of at least 1, got 0"),
    ],
)
def test_bad_input_is_one_clear_line(run: Run, argv: tuple[str, ...], message: str) -> None:
    check_refused(*run(*argv), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--maps", "L-1H0"), "Expected maps within layers 0..1 and heads 0..5, got L-1·H0"),
        (("--maps", "L0H6"), "got L0·H6"),
        (("--span", "x=2:9"), "Expected span 'x' half-open within 0..3, got (2, 9)"),
        (("--device", "cuda:0" if not torch.cuda.is_available() else "cuda:99"), "evice"),
        (("--device", "toaster"), 'Expected a device such as "cpu" or "cuda"'),
        (("--dtype", "int3"), "Expected a dtype out of float32, bfloat16, float16"),
        (("--chat",), "Expected a model with a chat template"),
    ],
)
def test_requests_that_do_not_fit_the_model(run: Run, tiny: Path, options: tuple[str, ...], message: str) -> None:
    check_refused(*run("capture", "--model", tiny, "--prompt", "w1 w2 w3", *options), message)


def test_empty_and_overlong_prompts(run: Run, tiny: Path) -> None:
    limit = load_model(str(tiny)).max_tokens
    check_refused(*run("capture", "--model", tiny, "--prompt", ""), "Expected a prompt, got an empty text")
    overlong = " ".join(["w1"] * (limit + 5))
    check_refused(*run("capture", "--model", tiny, "--prompt", overlong), f"at most {limit:,} tokens, got {limit + 5:,}")


def test_damaged_models_are_refused(run: Run, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ask = ("capture", "--model", broken, "--prompt", "w1")
    check_refused(*run(*ask), "Expected an undamaged safetensors file at")
    weights.unlink()
    check_refused(*run(*ask), "Expected *.safetensors in the model's folder")
    (broken / "config.json").unlink()
    check_refused(*run(*ask), "Expected config.json in the model's folder")


def test_adapter_of_another_model_is_refused(run: Run, adapter: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "gpt2")
    status, out, err = run("capture", "--model", other, "--adapter", adapter, "--prompt", "w1")
    check_refused(status, out, err, "Expected")
    (adapter_copy := tmp_path / "copy").mkdir()
    (adapter_copy / "adapter_config.json").write_text("{not json", encoding="utf-8")
    check_refused(*run("capture", "--adapter", adapter_copy, "--prompt", "w1"), "Expected readable JSON in")


def test_a_full_disk_leaves_nothing_half_written(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    ask = ("capture", "--model", tiny, "--prompt", "w1 w2 w3 " * 10, "--pool", "30")
    done = run_process(*ask, "--out", tmp_path / "a.dexviz", limit=2048)
    check_refused(done.returncode, done.stdout, done.stderr, "file too large")
    done = run_process("merge", "--adapter", adapter, "--out", tmp_path / "merged", limit=2048)
    check_refused(done.returncode, done.stdout, done.stderr, "Free space or choose another --out.")
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_status_2(tmp_path: Path) -> None:
    done = run_process("capture", "--prompt", "a", "--model", tmp_path / "missing")
    check_refused(done.returncode, done.stdout, done.stderr, "Expected a known model")


def test_serve_serves_and_refuses_a_port_in_use() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "dexviz", "serve", "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_for(f"http://127.0.0.1:{port}/_stcore/health") == "ok"
        done = run_process("serve", "--port", str(port))
        check_refused(done.returncode, done.stdout, done.stderr, f"Expected a free port at 127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(url: str, seconds: float = 90) -> str:
    """Body of the answer, once there is one."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def test_help_of_the_whole_program(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(command in out for command in COMMANDS)
    assert run("--version")[1].startswith("dexviz 0.")
