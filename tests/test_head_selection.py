"""Selecting heads, and the plan that keeps the choice: criteria, determinism, the file, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dexviz import head_selection
from dexviz.blocks import Source, read_blocks
from dexviz.dex import top_heads
from dexviz.errors import AdapterError, DexvizError, ModelError, TrainingError
from dexviz.head_plan import HeadPlan, check_plan
from dexviz.head_scores import gradient_importance, mean_entropy
from dexviz.head_selection import SelectionConfig, best_heads, select_heads
from dexviz.models import LoadedModel, View, load_model, wrap_model
from dexviz.plan_file import check_plan_target, plan_from_json, read_plan, write_plan
from tests import families
from tests.adapters import tiny_model

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("selection")
    tiny_model(root / "base", "llama")
    words = np.random.default_rng(0).integers(1, 30, 8000)
    (root / "text.txt").write_text(" ".join(f"w{i}" for i in words))
    return root


@pytest.fixture(scope="module")
def loaded(root: Path) -> LoadedModel:
    return load_model(str(root / "base"))


@pytest.fixture(scope="module")
def plan(root: Path, loaded: LoadedModel) -> HeadPlan:
    return select_heads(loaded, config(root))


def config(root: Path, **changes: object) -> SelectionConfig:
    return SelectionConfig(**{"data": str(root / "text.txt"), "block": 16, "blocks": 3, **changes})


def text_of(plan: HeadPlan) -> str:
    return json.dumps(plan.to_json(), allow_nan=False)


def test_a_plan_tells_what_was_measured_and_chosen(root: Path, loaded: LoadedModel, plan: HeadPlan) -> None:
    source = Source(str(root / "text.txt"), "text", 16, 0)
    blocks = read_blocks(loaded, source, calibration=3, validation=2, training=40).calibration
    view = View("base", loaded)
    np.testing.assert_array_equal(plan.entropy, mean_entropy(view, blocks))
    np.testing.assert_array_equal(plan.importance, gradient_importance(view, blocks))
    assert plan.heads == top_heads(torch.from_numpy(plan.entropy))
    assert (plan.layers, plan.query_heads, plan.per_layer, plan.count) == (2, 6, 3, 6)
    assert (plan.criterion, plan.seed, plan.block, plan.blocks) == ("entropy", 0, 16, 3)
    assert (plan.base_model, plan.base_fingerprint) == (loaded.name, loaded.fingerprint)
    assert plan.versions["dtype"] == "float32"


def test_the_least_important_heads_are_chosen(root: Path, loaded: LoadedModel) -> None:
    plan = select_heads(loaded, config(root, criterion="importance", per_layer=2))
    expected = tuple(tuple(sorted(row)) for row in np.argsort(plan.importance, axis=1)[:, :2].tolist())
    assert plan.heads == expected
    assert plan.per_layer == 2


def test_all_heads_or_those_that_are_named(root: Path, loaded: LoadedModel) -> None:
    everything = select_heads(loaded, config(root, criterion="all", measure=()))
    assert everything.heads == (tuple(range(6)),) * 2
    assert everything.entropy is everything.importance is everything.per_layer is None
    named = select_heads(loaded, config(root, criterion="L1H5, l0h2,L1·H0", measure=("entropy",)))
    assert named.heads == ((2,), (0, 5))
    assert (named.criterion, named.importance) == ("list", None)
    assert named.entropy is not None


def test_the_criterion_is_measured_in_any_case(root: Path, loaded: LoadedModel) -> None:
    seen: list[tuple[str, int, int]] = []
    plan = select_heads(loaded, config(root, measure=()), lambda *step: seen.append(step))
    assert plan.importance is None
    assert seen == [("entropy", done, 3) for done in (1, 2, 3)]


def test_layers_without_attention_have_no_heads(root: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    hybrid = wrap_model(families.build("qwen3_next", layer_types=kinds), loaded.tokenizer)
    for criterion in ("entropy", "importance", "all"):
        plan = select_heads(hybrid, config(root, criterion=criterion))
        assert plan.heads[0] == ()
        assert len(plan.heads[1]) == (6 if criterion == "all" else 3)
        assert text_of(read_plan(write_plan(plan, tmp_path / "plan.json"))) == text_of(plan)
        assert "L0  no head" in plan.table()
        check_plan(plan, hybrid)
        with pytest.raises(AdapterError, match="softmax attention, got heads in layer 0"):
            check_plan(replace(plan, heads=((1,), ())), hybrid)
    with pytest.raises(AdapterError, match=r"softmax attention, got L0H1"):
        select_heads(hybrid, config(root, criterion="L0H1"))


def test_the_same_seed_gives_the_same_bytes(root: Path, plan: HeadPlan, tmp_path: Path) -> None:
    torch.manual_seed(5)
    again = select_heads(load_model(str(root / "base")), config(root))
    one, other = (write_plan(p, tmp_path / name).read_bytes() for p, name in ((plan, "one"), (again, "other")))
    assert one == other


def test_another_seed_reads_other_text(root: Path, loaded: LoadedModel, plan: HeadPlan) -> None:
    other = select_heads(loaded, config(root, seed=1))
    assert other.text_sha256 != plan.text_sha256
    assert np.abs(other.entropy - plan.entropy).max() > 1e-4
    assert np.abs(other.importance - plan.importance).max() > 1e-4


def test_ties_go_to_the_lower_head(loaded: LoadedModel) -> None:
    flat = np.ones((2, 6), dtype=np.float32)
    assert best_heads(loaded.layout, "importance", flat) == best_heads(loaded.layout, "entropy", flat) == ((0, 1, 2),) * 2


def test_the_table_is_for_reading(plan: HeadPlan) -> None:
    lines = plan.table().splitlines()
    assert lines[0].endswith("base: 6 of 12 heads, those of highest mean attention entropy")
    head = plan.heads[0][0]
    assert lines[3].startswith(f"L0  H{head}  {plan.entropy[0, head]:.2f} {1e3 * plan.importance[0, head]:5.2f}")
    assert lines[-1].endswith(f"{plan.rank_correlation():+.3f}")
    assert max(map(len, lines[3:])) <= 120


@pytest.mark.parametrize(("sign", "expected"), [(1, 1.0), (-1, -1.0)])
def test_rank_correlation_sees_order_alone(plan: HeadPlan, sign: int, expected: float) -> None:
    values = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    values[1, 3] = np.nan
    related = replace(plan, entropy=values, importance=(sign * np.exp(values)).astype(np.float32))
    assert related.rank_correlation() == pytest.approx(expected)
    assert replace(related, importance=None).rank_correlation() is None
    assert replace(related, importance=np.ones((2, 6), np.float32)).rank_correlation() is None


def test_a_plan_comes_back_as_it_was(plan: HeadPlan, tmp_path: Path) -> None:
    path = write_plan(plan, tmp_path / "new" / "plan.json")
    back = read_plan(path)
    assert text_of(back) == text_of(plan)
    np.testing.assert_array_equal(back.entropy, plan.entropy)
    np.testing.assert_array_equal(back.importance, plan.importance)
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_an_older_plan_is_replaced_and_nothing_else(plan: HeadPlan, tmp_path: Path) -> None:
    path = write_plan(plan, tmp_path / "plan.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))
    write_plan(plan, path)
    assert text_of(read_plan(path)) == text_of(plan)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "data.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for name in ("link", "list.json", "notes.txt", "data.bin", "folder"):
        with pytest.raises(AdapterError, match="a new file, or a plan to replace"):
            write_plan(plan, tmp_path / name)
        with pytest.raises(AdapterError, match="a new file, or a plan to replace"):
            check_plan_target(tmp_path / name)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_leaves_the_old_plan(plan: HeadPlan, tmp_path: Path, monkeypatch: Patch) -> None:
    path = write_plan(plan, tmp_path / "plan.json")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AdapterError, match="No space left on device"):
        write_plan(replace(plan, seed=3), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("path", ["", "..", "file/plan.json", "nul\0.json"])
def test_places_that_cannot_be_written_are_refused(plan: HeadPlan, tmp_path: Path, monkeypatch: Patch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match=r"Choose another --out\.$"):
        write_plan(plan, path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


DAMAGE = {
    "other JSON": {"format": "else"},
    "version 2": {"version": 2},
    "version True": {"version": True},
    "heads [0, 6] of layer 1, which has heads 0 to 5": {"heads": [[0], [0, 6]]},
    "heads [-1] of layer 0": {"heads": [[-1], [0]]},
    "not in order": {"heads": [[1, 1], [0]]},
    "no selected head": {"heads": [[], []]},
    "head 1.0": {"heads": [[1.0], [0]]},
    "head True": {"heads": [[True], [0]]},
    "head 1": {"heads": ["1", [0]]},
    "not iterable": {"heads": [3, [0]]},
    "heads None": {"heads": None},
    "table of entropy of shape (1, 6)": {"entropy": [[1.0] * 6]},
    "rows of entropy that differ": {"entropy": [[1.0] * 6, [1.0] * 5]},
    "importance with x": {"importance": [["x"] * 6] * 2},
    "importance with True": {"importance": [[True] * 6] * 2},
    "with infinity in it": {"importance": [[1e300] * 6] * 2},
    "query_heads 6": {"query_heads": "6"},
    "query_heads 0": {"query_heads": 0},
    "criterion luck": {"criterion": "luck"},
    "seed 0.0": {"seed": 0.0},
    "per_layer 2.5": {"per_layer": 2.5},
    "versions []": {"versions": []},
    "torch 2": {"versions": {"torch": 2}},
    "base_fingerprint None": {"base_fingerprint": None},
}


@pytest.mark.parametrize("got", DAMAGE)
def test_a_damaged_plan_is_refused(plan: HeadPlan, tmp_path: Path, got: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**plan.to_json(), **DAMAGE[got]}))
    with pytest.raises(AdapterError) as refused:
        read_plan(tmp_path / "plan.json")
    assert got in str(refused.value).replace("'", "")
    assert "plan.json" in str(refused.value)


@pytest.mark.parametrize("field", ["heads", "entropy", "seed", "versions", "base_model"])
def test_a_plan_without_a_field_is_refused(plan: HeadPlan, field: str) -> None:
    data = plan.to_json()
    del data[field]
    with pytest.raises(AdapterError, match=f"none of its field '{field}'"):
        plan_from_json(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a readable plan"),
        (b"{", "a readable plan"),
        (b"\xff", "a readable plan"),
        (b"[" * 100_000, "a readable plan"),
        (b'{"seed": NaN}', "NaN, which is no number"),
        (b"[]", "other JSON"),
        (b'"text"', "other JSON"),
    ],
)
def test_other_files_are_no_plans(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        read_plan(tmp_path / "plan.json")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in ((tmp_path, "no such file"), (tmp_path / "pipe", "no such file"), (tmp_path / "none", "No such file")):
        with pytest.raises(AdapterError, match=message):
            read_plan(path)


def test_a_plan_fits_its_model_alone(loaded: LoadedModel, plan: HeadPlan) -> None:
    check_plan(plan, loaded)
    with pytest.raises(AdapterError, match=r"2 layers of 6 heads .* got one for 2 layers of 7 heads"):
        check_plan(HeadPlan(**{**vars(plan), "query_heads": 7, "entropy": None, "importance": None}), loaded)
    with pytest.raises(AdapterError, match="2 layers of 4 heads"):
        check_plan(plan, wrap_model(families.build("gpt2")))
    other = wrap_model(families.build("llama", seed=1))
    with pytest.raises(AdapterError, match="whose fingerprint differs"):
        check_plan(plan, other)
    with pytest.warns(UserWarning, match="whose fingerprint differs"):
        check_plan(plan, other, force=True)
    with pytest.raises(AdapterError, match="without differential attention"):
        check_plan(plan, wrap_model(families.build("diffllama")), force=True)


IMPOSSIBLE = [
    ({"block": 1}, "block ≥ 2"),
    ({"blocks": 0}, "blocks ≥ 1"),
    ({"seed": -1}, "0 ≤ seed"),
    ({"measure": ("luck",)}, "measures out of entropy, importance, got luck"),
    ({"criterion": "luck"}, "got 'luck'"),
    ({"criterion": "list"}, "got 'list'"),
    ({"criterion": ""}, "got ''"),
    ({"criterion": "L0H1,"}, "got 'L0H1,'"),
    ({"criterion": "L0H1,L0H1"}, "different heads"),
    ({"criterion": "L-1H0"}, "different heads"),
    ({"criterion": "all", "per_layer": 2}, "a number of heads only with"),
    ({"criterion": "L0H1", "per_layer": 2}, "a number of heads only with"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_impossible_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(DexvizError, match=message):
        SelectionConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"per_layer": 0}, AdapterError, "1 to 6 heads a layer, got 0"),
        ({"per_layer": 7, "criterion": "importance"}, AdapterError, "1 to 6 heads a layer, got 7"),
        ({"criterion": "L2H0"}, AdapterError, "L0 to L1, H0 to H5"),
        ({"criterion": "L0H6"}, AdapterError, "got L0H6"),
        ({"data": "nowhere.txt"}, TrainingError, "nowhere.txt"),
        ({"block": 513}, TrainingError, "blocks of at most 512 tokens"),
        ({"blocks": 501}, TrainingError, "at least 501 blocks of 16 tokens"),
    ],
)
def test_bad_input_is_refused_before_measuring(
    root: Path, loaded: LoadedModel, monkeypatch: Patch, changes: dict, error: type, message: str
) -> None:
    monkeypatch.setattr(head_selection, "MEASURES", dict.fromkeys(head_selection.MEASURES, lambda *_: pytest.fail("measured")))
    with pytest.raises(error, match=message):
        select_heads(loaded, config(root, **changes))


def test_models_that_cannot_be_adapted_are_refused(root: Path, loaded: LoadedModel) -> None:
    with pytest.raises(AdapterError, match="without differential attention"):
        select_heads(wrap_model(families.build("diffllama"), loaded.tokenizer), config(root))
    with pytest.raises(ModelError, match="a model with a tokenizer"):
        select_heads(wrap_model(families.build("llama")), config(root))


@pytest.mark.model
def test_training_selects_the_same_heads_by_itself() -> None:
    from dexviz.train_config import TrainConfig

    loaded, training = load_model("smollm2-135m"), TrainConfig()
    plan = select_heads(loaded, SelectionConfig(block=64, blocks=2, measure=()))
    source = Source(training.data, training.column, 64, training.seed)
    wanted = training.steps * training.batch
    blocks = read_blocks(loaded, source, calibration=2, validation=training.validation_blocks, training=wanted).calibration
    assert plan.heads == top_heads(torch.from_numpy(mean_entropy(View("base", loaded), blocks)))
    defaults = SelectionConfig()
    assert (defaults.data, defaults.column, defaults.block) == (training.data, training.column, training.block)
    assert (defaults.blocks, defaults.seed) == (training.calibration_blocks, training.seed)
    assert defaults.per_layer is training.heads_per_layer is None
