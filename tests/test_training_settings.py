"""Early stopping, presets, precision, plans of heads, memory, and every family that training is said to work for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dexviz import training
from dexviz.checkpoints import LOG
from dexviz.errors import AdapterError, TrainingError
from dexviz.evaluation import EvalConfig, evaluate
from dexviz.head_selection import SelectionConfig, select_heads
from dexviz.merging import merge
from dexviz.models import LoadedModel, View, load_model, make_pair, wrap_model
from dexviz.plan_file import write_plan
from dexviz.train_config import PRESETS, TrainConfig
from dexviz.trainee import Trainee
from dexviz.trainer import _is_bf16
from dexviz.training import train
from tests import families
from tests.readers import byte_model, byte_tokenizer
from tests.training_runs import assert_same_adapter, base_and_text, config, killed_at, short_held_out, weights

Patch = pytest.MonkeyPatch
TEN = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "olmo2", "mistral")
"""Grouped queries, biases, tied embeddings, fused and transposed projections, norms on Q and K; Qwen2 runs in bfloat16."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_and_text(tmp_path_factory.mktemp("settings"))


@pytest.fixture
def loaded(root: Path, monkeypatch: Patch) -> LoadedModel:
    return short_held_out(load_model(str(root / "base")), monkeypatch)


def validation_of(losses: list[float], monkeypatch: Patch) -> None:
    """Let the measurements of validation loss at steps 1, 2, … be these."""
    real = training.TrainingLog._due

    def due(self: training.TrainingLog, step: int) -> bool:
        self.step = step
        return real(self, step)

    def see(self: object, loss: float, step: int, trainee: Trainee) -> None:
        original(self, losses[step - 1], step, trainee)

    from dexviz.training_log import Stopping

    original = Stopping.see
    monkeypatch.setattr(training.TrainingLog, "_due", due)
    monkeypatch.setattr(Stopping, "see", see)


def test_training_stops_early_and_keeps_the_best_weights(
    root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch
) -> None:
    validation_of([3.0, 2.0, 2.5, 2.2, 1.0], monkeypatch)
    settings = config(root, steps=8, anneal=2, evaluate_every=1, patience=2, save_every=1)
    result = train(loaded, tmp_path / "out", settings)
    assert result.steps == 2
    assert len((tmp_path / "out" / LOG).read_text().splitlines()) == 4, "two measurements were no better"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["training"]["steps"] == 2
    patient = config(root, steps=8, anneal=2, evaluate_every=1, patience=6, save_every=1)
    killed_at(2, loaded, tmp_path / "long", patient)
    monkeypatch.undo()
    short_held_out(loaded, monkeypatch)
    state = torch.load(tmp_path / "long.partial/checkpoints/checkpoint-1/adapter_state.pt", weights_only=True)
    assert state["stopping"]["step"] == 1
    killed_at(3, loaded, tmp_path / "plain", config(root, steps=8, anneal=2, save_every=1))
    second = torch.load(tmp_path / "plain.partial/checkpoints/checkpoint-2/adapter_state.pt", weights_only=True)["trainee"]
    kept = weights(tmp_path / "out", loaded)
    for name, tensor in kept.items():
        if not name.endswith("step"):
            expected = second[f"adapter.{name}"].half().float()
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_stops_early_is_the_same_after_a_kill(
    step: int, root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Killed before the step at which it stops, or there with its checkpoint on disk."""
    validation_of([3.0, 2.0, 2.5, 2.2, 1.0, 0.5, 0.4, 0.3], monkeypatch)
    settings = config(root, steps=8, evaluate_every=1, patience=2, save_every=1)
    train(loaded, tmp_path / "whole", settings)
    if step == 3:
        killed_at(3, loaded, tmp_path / "out", settings)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(training, "round_as_saved", lambda _: pytest.fail("the power went"))
            with pytest.raises(pytest.fail.Exception):
                train(loaded, tmp_path / "out", settings)
        assert (tmp_path / "out.partial" / "checkpoints" / "checkpoint-4").is_dir()
    train(loaded, tmp_path / "out", settings, resume=True)
    assert_same_adapter(tmp_path / "whole", tmp_path / "out", loaded)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name: str) -> None:
    preset = TrainConfig(**PRESETS[name])
    assert preset.full == (name == "paper")
    assert preset.method == "dex"


def test_bf16_trains(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    lines: dict[str, list[dict]] = {"bf16": [], "float32": []}
    for precision, seen in lines.items():
        train(loaded, tmp_path / precision, config(root, precision=precision, mode="full"), on_step=seen.append)
    assert lines["bf16"][0]["loss"] == pytest.approx(lines["float32"][0]["loss"], rel=0.02)
    assert lines["bf16"][0]["loss"] != lines["float32"][0]["loss"]
    assert max(map(abs, lines["bf16"][-1]["lambda"])) > 0.001


def test_auto_precision_asks_the_hardware(monkeypatch: Patch) -> None:
    for has in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has: has)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        for device in ("cpu", "cuda"):
            assert _is_bf16("auto", torch.device(device)) is has
            assert _is_bf16("bf16", torch.device(device))
            assert not _is_bf16("float32", torch.device(device))


def test_a_plan_says_which_heads_are_adapted(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    text = {"data": str(root / "text.txt"), "block": 16}
    plan = select_heads(loaded, SelectionConfig(**text, criterion="L0H1,L1H0,L1H5"))
    write_plan(plan, tmp_path / "plan.json")
    train(loaded, tmp_path / "out", config(root, heads=str(tmp_path / "plan.json"), steps=1))
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert told["dex"]["heads"] == [[1], [0, 5]]
    assert "those of a plan" in (tmp_path / "out" / "README.md").read_text()
    same = select_heads(loaded, SelectionConfig(**text, blocks=2))
    settings = config(root)
    blocks = training.training_blocks(loaded, settings)
    assert training.dex_config(View("base", loaded), blocks, settings).heads == same.heads


def test_a_plan_that_does_not_fit_is_refused(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    plan = select_heads(loaded, SelectionConfig(data=str(root / "text.txt"), block=16, criterion="L0H1"))
    path = write_plan(plan, tmp_path / "plan.json")
    other = wrap_model(families.build("llama", seed=5), loaded.tokenizer)
    with pytest.raises(AdapterError, match="a plan made for exactly these weights"):
        train(other, tmp_path / "out", config(root, heads=str(path)))
    path.write_text(path.read_text().replace('"heads": [\n  [\n   1', '"heads": [\n  [\n   99'))
    with pytest.raises(AdapterError, match=r"heads \[99\] of layer 0"):
        train(loaded, tmp_path / "out", config(root, heads=str(path)))
    with pytest.raises(AdapterError):
        train(loaded, tmp_path / "out", config(root, heads=str(tmp_path / "none.json")))
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(TrainingError, match="heads and method lora"):
        config(root, heads=str(path), method="lora")


@pytest.mark.parametrize("where", ["training", "selection"])
def test_a_lack_of_memory_is_one_clear_error(
    where: str, root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] .\nDefaultCPUAllocator: can't allocate memory: tried 64 GiB")

    monkeypatch.setattr(*((Trainee, "forward") if where == "training" else (training, "mean_entropy")), fail)
    with pytest.raises(TrainingError, match="room in memory for a batch, got too little for 2 blocks of 16 tokens") as caught:
        train(loaded, tmp_path / "out", config(root))
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are(root: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: Patch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Trainee, "forward", fail)
    with pytest.raises(RuntimeError, match="a fault of ours") as caught:
        train(loaded, tmp_path / "out", config(root))
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("family", TEN)
def test_families_are_trained_judged_and_merged(family: str, tmp_path: Path, monkeypatch: Patch) -> None:
    tied = {"tie_word_embeddings": True} if family == "llama" else {}
    dtype = torch.bfloat16 if family == "qwen2" else torch.float32
    base = wrap_model(byte_model(family, 64, **tied).to(dtype).requires_grad_(False), byte_tokenizer(), name=family)
    monkeypatch.setattr("dexviz.heldout.held_out_text", lambda: "a held-out text of some bytes " * 9)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    changes = {"steps": 3, "learning_rate": 0.3, "weight_learning_rate": 0.02, "save_every": 5}
    for mode in ("adapter", "full"):
        result = train(base, tmp_path / mode, config(tmp_path, **changes, mode=mode))
        pair = make_pair(base, adapter=str(tmp_path / mode))
        judged = evaluate(pair, EvalConfig(needles=0, speed=False, resamples=100))
        assert judged.held_out.loss.variant is not None
        assert judged.held_out.loss.variant.mean == pytest.approx(result.variant.mean, rel=2e-3)
        assert result.variant.mean != result.base.mean
        merged = load_model(str(merge(pair.variant, tmp_path / f"{mode}-merged")), dtype=str(dtype)[6:], tokenizer=False)
        ids = families.prompt(21, batch=2)
        with torch.no_grad():
            with pair.variant.active():
                expected = base.model(ids).logits.float()
            got = merged.model(ids).logits.float()
        tolerance = 2e-5 if dtype == torch.float32 else 5e-2
        assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max()), mode


def test_options_change_a_preset() -> None:
    from dexviz.cli import build_parser
    from dexviz.commands.adapters import train_config

    parsed = build_parser().parse_args(["train", "--out", "x", "--preset", "paper", "--steps", "7", "--mode", "adapter"])
    expected = TrainConfig(**{**PRESETS["paper"], "steps": 7, "mode": "adapter"})
    assert train_config(parsed) == expected
    stopped = SimpleNamespace(config=TrainConfig(steps=9, block=32))
    parsed = build_parser().parse_args(["train", "--out", "x", "--resume"])
    assert train_config(parsed, stopped) == stopped.config
    parsed = build_parser().parse_args(["train", "--out", "x", "--resume", "--preset", "paper"])
    assert train_config(parsed, stopped) == TrainConfig(**PRESETS["paper"]), "what differs is then refused"
