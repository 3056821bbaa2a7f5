"""Evaluation: every number against stock transformers models and numpy in float64, what is read, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dexviz import heldout, speed
from dexviz.bootstrap import Bootstrap
from dexviz.corpora import documents, held_out_text
from dexviz.errors import Cancelled, DexvizError, EvaluationError, ModelError, PromptError, TrainingError
from dexviz.evaluation import EvalConfig, evaluate
from dexviz.heldout import held_out_blocks, held_out_pieces, mean_loss, measure
from dexviz.merging import merge
from dexviz.models import ModelPair, load_pair, make_pair, wrap_model
from dexviz.speed import measure_speed
from tests.families import NO_MERGE
from tests.readers import byte_model, byte_pair, byte_tokenizer, log_probabilities

TEXTS = ["A first document, somewhat longer than the others are.", "x", "Short.", "A third one, of some length: 日本語."]
BLOCK = 24
QUICK: dict[str, Any] = {"block": BLOCK, "needles": 0, "speed": False, "resamples": 200}


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    return str(path)


def config(source: str, **changes: Any) -> EvalConfig:
    return EvalConfig(**{**QUICK, "data": source, "column": "body", **changes})


def expected_pieces(block: int = BLOCK) -> list[list[np.ndarray]]:
    """Pieces of each document that has at least two tokens."""
    ids = [np.asarray(byte_tokenizer()(text)["input_ids"]) for text in TEXTS if len(text) > 1]
    return [[part for i in range(0, len(row), block) if len(part := row[i : i + block]) > 1] for row in ids]


def expected_values(models: list[Any], pieces: list[np.ndarray]) -> np.ndarray:
    """Losses of both models and KL of each predicted token, in float64: [3, tokens]."""
    columns = []
    for ids in pieces:
        p, q = (log_probabilities(model, ids)[:-1] for model in models)
        at = (np.arange(len(ids) - 1), ids[1:])
        columns.append(np.stack([-p[at], -q[at], (np.exp(p) * (p - q)).sum(axis=1)]))
    return np.concatenate(columns, axis=1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_losses_and_kl_are_those_of_stock_models(family: str, source: str, tmp_path: Path) -> None:
    pair = byte_pair(family, tmp_path / "dex", tie_word_embeddings=family != "qwen2")
    merged = AutoModelForCausalLM.from_pretrained(merge(pair.variant, tmp_path / "merged"), attn_implementation="eager")
    stock = [byte_model(family, tie_word_embeddings=family != "qwen2"), merged.eval()]
    per_document = [expected_values(stock, pieces) for pieces in expected_pieces()]
    values = np.concatenate(per_document, axis=1)
    result = evaluate(pair, config(source)).held_out
    base, variant, kl = values.mean(axis=1)
    assert abs(variant - base) > 0.01
    assert kl > 0.01
    assert (result.tokens, result.documents, result.unit) == (values.shape[1], 3, "document")
    assert result.loss.base.mean == pytest.approx(base, abs=1e-4)
    assert result.loss.variant.mean == pytest.approx(variant, abs=1e-4)
    assert result.loss.change.mean == pytest.approx(variant - base, abs=1e-4)
    assert result.loss_percent.mean == pytest.approx(100 * (variant / base - 1), abs=1e-2)
    assert result.perplexity.base.mean == pytest.approx(np.exp(base), rel=1e-4)
    assert result.perplexity.variant.high == pytest.approx(np.exp(result.loss.variant.high))
    assert result.perplexity.change.mean == pytest.approx(100 * (np.exp(variant) / np.exp(base) - 1), abs=0.05)
    assert result.kl.mean == pytest.approx(kl, rel=1e-3)
    assert result.kl_max == pytest.approx(values[2].max(), rel=1e-3)
    sums = np.array([[v[0].sum(), v[1].sum(), v.shape[1]] for v in per_document]).T
    again = Bootstrap(200).compare(sums[0], sums[1], sums[2], unit="document")
    assert result.loss.change.low == pytest.approx(again.change.low, abs=1e-4)
    assert result.loss.base.high == pytest.approx(again.base.high, abs=1e-4)


def test_bfloat16_logits_are_normalised_in_float32(source: str, tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path / "dex", dtype=torch.bfloat16)
    stock = byte_model("llama").to(torch.bfloat16)
    pieces = [piece for document in expected_pieces() for piece in document]
    result = evaluate(pair, config(source))
    assert result.held_out.loss.base.mean == pytest.approx(expected_values([stock, stock], pieces)[0].mean(), abs=0.01)
    assert result.provenance["dtype"] == "bfloat16"


def test_long_pieces_and_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = byte_pair("llama", tmp_path / "dex")
    (tmp_path / "text.txt").write_text(held_out_text()[:2500])
    pieces = held_out_pieces(pair.base, 300, data=str(tmp_path / "text.txt"))
    assert sorted({len(ids) for ids in pieces.ids})[-1] == 300 > heldout._ROWS
    together = measure(pair.base, pair.variant, pieces)
    monkeypatch.setattr(heldout, "_BATCH_TOKENS", 1)
    monkeypatch.setattr(heldout, "_ROWS", 7)
    apart = measure(pair.base, pair.variant, pieces)
    for one, other in zip((together.base, together.variant, together.kl), (apart.base, apart.variant, apart.kl), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-2, rtol=1e-5)


def test_logits_held_at_a_time_are_bounded(tmp_path: Path) -> None:
    pair, seen = byte_pair("llama", tmp_path / "dex"), []
    pair.base.model.register_forward_hook(lambda model, args, output: seen.append(output.logits.shape[:2].numel()))
    evaluate(pair, EvalConfig(**{**QUICK, "block": 256}))
    assert max(seen) == 1024


def test_the_protocol_is_that_of_mean_loss(tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path / "dex")
    pieces = held_out_pieces(pair.base, 256)
    short = replace(pieces, ids=pieces.ids[:9], document=pieces.document[:9])
    blocks = held_out_blocks(pair.base, 256)
    assert np.array_equal(np.stack(pieces.ids), blocks)
    assert pieces.unread == len(byte_tokenizer()(held_out_text())["input_ids"]) - blocks.size
    totals = measure(pair.variant, None, short)
    assert totals.base.sum() / totals.tokens.sum() == pytest.approx(mean_loss(pair.variant, blocks[:9]).mean, abs=1e-5)
    assert (pieces.unit, pieces.documents) == ("block", 1)
    assert totals.variant is totals.kl is totals.kl_max is None


def test_nothing_is_left_out_in_silence(source: str, tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path / "dex")
    lengths = [len(byte_tokenizer()(text)["input_ids"]) for text in TEXTS]
    pieces = held_out_pieces(pair.base, 53, data=source, column="body")
    assert lengths[0] == 54, "its last token stands alone"
    assert (pieces.skipped, pieces.unread) == (1, 1)
    assert sum(map(len, pieces.ids)) + pieces.skipped + pieces.unread == sum(lengths)
    result = evaluate(pair, config(source, block=53))
    assert "Not read: at the ends of documents 1 tokens; of fewer than two tokens 1 documents." in result.table()
    assert evaluate(pair, config(source, documents=2)).held_out.documents == 1


def test_held_out_text_may_be_measured_and_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "address.txt"
    path.write_text(held_out_text())
    with pytest.raises(TrainingError, match="held-out 2026 address"):
        list(documents(str(path)))
    pieces = held_out_pieces(byte_pair("llama", tmp_path / "dex").base, 256, data=str(path))
    assert (pieces.documents, pieces.unit) == (1, "block")


def test_one_block_has_no_interval(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One short text.")
    result = evaluate(byte_pair("llama", tmp_path / "dex"), EvalConfig(**{**QUICK, "data": str(tmp_path / "a.txt")}))
    assert result.held_out.loss.change.low is None
    assert "no intervals, since there is one block only" in result.table()


def test_base_alone(source: str) -> None:
    pair = make_pair(wrap_model(byte_model("llama"), byte_tokenizer()))
    result = evaluate(pair, config(source, needles=1, lengths=(700,), depths=(0.5,), speed=True, rounds=1)).to_json()
    held_out = result["held_out"]
    assert held_out["loss"]["base"]["mean"] > 0
    assert held_out["kl"] is held_out["kl_max"] is held_out["loss_percent"] is None
    for compared in (held_out["loss"], held_out["perplexity"], result["needles"]["rows"][0]["accuracy"]):
        assert compared["variant"] is compared["change"] is None
    assert result["speed"]["variant"] is result["speed"]["merged"] is None
    assert (result["speed"]["reason"], result["parameters"]["adapter"]) == ("There is no variant.", None)
    assert result["provenance"]["variant"] is None


def test_another_model_as_the_variant(source: str) -> None:
    base, other, wide = (wrap_model(byte_model("llama", seed=seed), byte_tokenizer()) for seed in (0, 1, 2))
    result = evaluate(make_pair(base, variant=other), config(source, speed=True, rounds=1))
    assert result.held_out.kl.mean > 0.1
    assert result.speed.variant is not None
    assert result.speed.merged is None
    assert "nothing to merge" in result.speed.reason
    wide.model.resize_token_embeddings(300)
    without = evaluate(make_pair(base, variant=wide), config(source))
    assert without.held_out.kl is None
    assert "vocabularies differ in size" in without.table()


def test_a_variant_that_equals_the_base_changes_nothing(source: str, tmp_path: Path) -> None:
    result = evaluate(byte_pair("llama", tmp_path / "dex", lam=0.0), config(source)).held_out
    assert (result.kl.mean, result.kl_max, result.loss.change.mean, result.loss.change.high) == (0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelPair, EvalConfig]:
    pair = byte_pair("llama", tmp_path_factory.mktemp("whole") / "dex", context=720)
    return pair, EvalConfig(block=256, lengths=(700, 4096), depths=(0.2, 0.8), needles=2, rounds=3, resamples=200)


def test_results_are_plain_json_and_a_table(whole: tuple[ModelPair, EvalConfig]) -> None:
    pair, settings = whole
    steps: list[tuple[str, int, int]] = []
    result = evaluate(pair, settings, lambda *step: steps.append(step))
    data = result.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {name for name, done, total in steps if done == total} == {
        "held-out loss",
        "needles, base",
        "needles, variant",
        "speed",
    }
    assert [row["length"] for row in data["needles"]["rows"]] == [None, 700, 720, None, None]
    assert data["needles"]["prompts"] == 8
    assert data["speed"]["base"]["ratio"] == 1.0
    assert data["speed"]["tokens"] == 512
    assert data["parameters"]["variant"] == data["parameters"]["base"] + data["parameters"]["adapter"]
    lines = result.table().splitlines()
    assert max(map(len, lines)) < 120
    for start in ("Held-out loss: ", "loss, nats/token", "KL(base‖variant)", "  720 tokens", "  depth 0.8", "merged"):
        assert any(line.startswith(start) for line in lines), start
    assert f"{result.held_out.loss.variant.mean:.4f}" in result.table()


def test_a_seed_fixes_all_but_the_times(whole: tuple[ModelPair, EvalConfig]) -> None:
    pair, settings = whole
    first, again, other = (
        evaluate(pair, replace(settings, speed=False, seed=seed, lengths=(700,), data="sotu", documents=2))
        for seed in (1, 1, 2)
    )
    assert (first.held_out, first.needles) == (again.held_out, again.needles)
    assert first.held_out != other.held_out
    assert first.needles != other.needles


def test_what_progress_raises_stops_the_evaluation(source: str, tmp_path: Path) -> None:
    def stop(name: str, done: int, total: int) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        evaluate(byte_pair("llama", tmp_path / "dex"), config(source), stop)


def test_the_merged_call_computes_the_variant(tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path / "dex")
    ids = torch.arange(3, 60)[None]
    calls, reason = speed._calls(pair, ids)
    with torch.inference_mode():
        base, variant, merged = (calls[name]() for name in ("base", "variant", "merged"))
    assert reason is None
    torch.testing.assert_close(merged, variant, atol=1e-4, rtol=1e-4)
    assert (variant - base).abs().max() > 0.05


def test_ratios_are_medians_of_paired_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, order = byte_pair("llama", tmp_path / "dex"), []
    calls = {"base": lambda: 1.0, "variant": lambda: 1.5, "merged": lambda: 1.1}

    def timed(call: Any, device: torch.device) -> float:
        order.append(call())
        return call() * (1 + len(order) // 3)

    monkeypatch.setattr(speed, "_calls", lambda pair, ids: (calls, None))
    monkeypatch.setattr(speed, "_timed", timed)
    result = measure_speed(pair, rounds=3)
    assert len(order) == 3 * (3 + speed._WARM_UP)
    assert len({tuple(order[i : i + 3]) for i in range(0, len(order), 3)}) >= 3
    assert result.base.ratio == 1.0
    assert result.base.fastest < result.base.median


def test_families_that_cannot_be_merged_say_why(tmp_path: Path) -> None:
    result = measure_speed(byte_pair(NO_MERGE[0], tmp_path / "dex"), rounds=1)
    assert result.variant is not None
    assert result.merged is None
    assert "a norm or gate lies in between" in result.reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": 1}, "blocks of 2 to 1,024 tokens, got 1"),
        ({"block": 2048}, "blocks of 2 to 1,024 tokens"),
        ({"needles": -1}, "a number of needle prompts"),
        ({"lengths": ()}, "needle lengths in tokens"),
        ({"depths": (0.5, 2.0)}, "needle depths between 0 and 1"),
        ({"depths": ()}, "at least one needle depth"),
        ({"rounds": 0}, "at least one round"),
        ({"level": 95}, "a level between 0 and 1"),
        ({"documents": 0}, "at least one document"),
        ({"seed": -1}, "a seed of 0 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        EvalConfig(**settings)


def test_inputs_that_cannot_be_measured_are_refused(source: str, tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path / "dex", context=128)
    cases: list[tuple[type[DexvizError], str, ModelPair, EvalConfig]] = [
        (PromptError, "room for facts, question and prose", pair, config(source, needles=1)),
        (TrainingError, "a text file or folder", pair, config("no/such/file.txt")),
        (TrainingError, "text in column 'text'", pair, config(source, column="text")),
        (ModelError, "a model with a tokenizer", make_pair(wrap_model(byte_model("llama"))), config(source)),
    ]
    (tmp_path / "x.txt").write_text("x")
    cases.append((EvaluationError, "a document of at least two tokens", pair, config(str(tmp_path / "x.txt"))))
    for kind, message, given, settings in cases:
        with pytest.raises(kind, match=message):
            evaluate(given, settings)


def test_losses_that_are_not_finite_are_refused(source: str, tmp_path: Path) -> None:
    pair = byte_pair("llama", tmp_path / "dex")
    nn.init.constant_(pair.base.model.lm_head.weight, float("nan"))
    with pytest.raises(EvaluationError, match="finite measurements of at least one document, got NaN or infinity"):
        evaluate(pair, config(source))


@pytest.mark.model
def test_protocol_of_the_default_model() -> None:
    pair = load_pair("smollm2-135m", adapter="default")
    pieces = held_out_pieces(pair.base)
    assert len(pieces.ids) == 58
    assert sum(len(ids) - 1 for ids in pieces.ids) == 14_790
    some = replace(pieces, ids=pieces.ids[:3], document=pieces.document[:3])
    totals = measure(pair.base, pair.variant, some)
    for view, sums in ((pair.base, totals.base), (pair.variant, totals.variant)):
        assert sums.sum() / totals.tokens.sum() == pytest.approx(mean_loss(view, np.stack(some.ids)).mean, abs=1e-5)
