"""DIFF Transformers in the app: pairing and λ in words, views with other heads, links, and models that cannot be compared."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from streamlit.testing.v1 import AppTest

from app.components.apart import other_heads
from app.components.diff_panel import FORMULA, lambda_text
from app.components.sidebar import variant_text
from app.presets import RETRIEVAL
from dexviz.engine import LocalEngine
from dexviz.errors import ModelError
from dexviz.figures.numbers import three
from dexviz.models import load_pair, make_pair, wrap_model
from dexviz.probes.heads import pairing_text
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest
from dexviz.requests import DescribePair, PairSpec
from dexviz.snapshot import load_snapshot, save_snapshot
from tests.adapters import tiny_model
from tests.diff_models import NeighbourAttention, TokenwiseAttention, build_diff
from tests.families import build, prompt
from tests.readers import byte_model, byte_tokenizer
from tests.test_app import MAIN, press, settled, texts
from tests.test_family_captures import tokens_of

BUILD = {
    "halves": lambda: build("diffllama"),
    "neighbours": lambda: build_diff(NeighbourAttention),
    "V2": lambda: build_diff(TokenwiseAttention),
    "llama": lambda: build("llama"),
}


def captured(name: str, score: str = "signed") -> Capture:
    view = make_pair(wrap_model(BUILD[name](), name=name)).base
    return capture(view, tokens_of(prompt(12)), CaptureRequest(score=score))


def heads_page(**link: str) -> AppTest:
    at = AppTest.from_file(MAIN, default_timeout=60)
    at.query_params.update({"draft": RETRIEVAL, "layer": "1", "head": "1", **link})
    at.run()
    at.switch_page("pages/heads.py").run()
    return settled(at)


@pytest.mark.parametrize(("name", "first", "second"), [("halves", 1, 5), ("neighbours", 2, 3), ("V2", 2, 3)])
def test_heads_name_their_partners(name: str, first: int, second: int) -> None:
    logical, softmax = captured(name), captured(name, "attention")
    assert (logical.heads, softmax.heads) == (4, 8)
    assert pairing_text(logical, 1) == f"A₁: head {first}, A₂: head {second}"
    assert pairing_text(softmax, first) == "A₁ of logical head 1"
    assert pairing_text(softmax, second) == "A₂ of logical head 1"


def test_lambda_of_v2_is_told_as_one_per_token_also_from_a_snapshot(tmp_path: Path) -> None:
    for name, words in (("V2", "λ of L1 per token and head, mean **"), ("halves", "λ of L1 **")):
        found = captured(name)
        save_snapshot(found, tmp_path / f"{name}.safetensors")
        stored = load_snapshot(tmp_path / f"{name}.safetensors")
        assert lambda_text(stored, 1) == lambda_text(found, 1) == f"{words}{three(float(found.lam[1]))}**"
        assert pairing_text(stored, 1) == pairing_text(found, 1)


def test_pair_info_of_v2_has_no_numbers_for_lambda_and_is_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {name: wrap_model(BUILD[name](), name=name) for name in ("llama", "V2")}
    monkeypatch.setattr("dexviz.serving.load_model", lambda name, **_: loaded[name])
    engine, spec = LocalEngine(), PairSpec("llama", variant="V2")
    info = engine.run(DescribePair(spec))
    engine.close()
    assert json.loads(json.dumps(asdict(info), allow_nan=False))["lam"] == [None, None]
    assert (info.heads, info.variant_heads, info.pairing) == (loaded["llama"].layout.heads, 4, "2p, 2p + 1")
    assert variant_text(spec, info, stored=False) == "2 layers × 4 logical heads (softmax heads 2p, 2p + 1); λ one a token"


def test_heads_of_a_diff_transformer_are_not_those_of_another_model() -> None:
    diff = captured("halves", "attention")
    other = replace(diff, provenance={**diff.provenance, "pairing": None})
    assert pairing_text(other, 1) is None
    assert other_heads(other, diff)
    assert not other_heads(other, other)
    assert not other_heads(diff, diff)


def test_a_diff_transformer_by_itself_names_its_pairs() -> None:
    at = heads_page(base="retrieval-diff")
    shown = texts(at)
    assert not at.error
    assert ":orange-badge[A₁: head 1, A₂: head 5]" in shown
    assert "Logical head p is made of softmax heads p, p + H/2, of H softmax heads. λ of L1 **" in shown
    assert "DEX adapter" not in shown
    assert {latex.value.strip("$\n") for latex in at.latex} == {FORMULA}


def test_softmax_heads_of_a_pair_are_shown_one_view_at_a_time_and_name_their_logical_heads() -> None:
    at = heads_page(base="retrieval-llama", variant="retrieval-diff", score="attention", head="6")
    shown = texts(at)
    assert "Base: 2 layers × 8 heads; variant: 2 × 8." in shown
    assert ":orange-badge[A₂ of logical head 2]" in shown
    at.segmented_control(key="view").set_value("base").run()
    settled(at)
    assert "logical head 2" not in texts(at)
    assert not at.error


def test_the_ready_made_pair_takes_one_choice() -> None:
    at = AppTest.from_file(MAIN, default_timeout=60).run()
    at.selectbox(key="base").set_value("retrieval-llama").run()
    assert (at.selectbox(key="adapter").value, at.selectbox(key="variant").value) == ("none", "retrieval-diff")
    assert ":blue-badge[Base\\: Retrieval Llama]" in texts(at)
    assert ":orange-badge[Variant\\: Retrieval DiffLlama]" in texts(at)


def test_two_tokenizers_are_refused_with_the_reason(tmp_path: Path) -> None:
    at = heads_page(base=str(tiny_model(tmp_path / "base", "llama")), variant="retrieval-diff")
    press(at, "Run")
    settled(at)
    (error,) = at.error
    assert "two models with the same tokenizer" in plain_text(error.value)
    assert "noise on a marked prompt is measured by characters" in plain_text(error.value)


def plain_text(markdown: str) -> str:
    return markdown.replace("\\", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_model("diffllama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_diff_model_whose_files_lack_lambda_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "lambda" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"every weight of .* in its files, got none for .*lambda_k1"):
        load_pair(str(folder))


def test_a_diff_model_that_cannot_pair_its_heads_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps({**config, **odd}))
    with pytest.raises(ModelError, match="num_key_value_heads` to be even"):
        load_pair(str(folder))
