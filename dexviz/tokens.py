"""Text → Tokens with labels a person can read, whatever the tokenizer calls its pieces.

A label shows the characters that a token stands for. White space is visible (␣ ⏎ ⇥); control and format characters are
escaped (\\x07, \\u202e), so that no label can reorder or break the page; a combining mark that stands alone sits on ◌. A
character spread over n tokens keeps one column each: 日 1/3, 日 2/3, 日 3/3. Bytes that form no character appear as \\xe6.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from dexviz.errors import ModelError, PromptError
from dexviz.records import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scheme = Literal["bytes", "metaspace", "words"]
"""How pieces are written: GPT-2's byte alphabet, SentencePiece's ▁ and <0xE6>, or plain words (WordPiece's ## is kept)."""

_WHITE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "\\r"}
_JOINERS = "\u200c\u200d"
_ESCAPED = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool = False, max_tokens: int | None = None) -> Tokens:
    """The prompt as the model reads it, special tokens included, never truncated.

    With `chat` the text becomes the user's turn in the model's chat template, and `.text` is what the template made of it.

    Raises:
        PromptError: the prompt is empty, not valid Unicode, longer than `max_tokens`, or there is no chat template.
        ModelError: the tokenizer cannot say which characters a token covers.
    """
    if not text:
        raise PromptError("a prompt", "an empty text", "Type at least one character.")
    _check_unicode(text)
    if chat:
        text = _apply_template(tokenizer, text)
    if not tokenizer.is_fast:
        raise ModelError(
            "a tokenizer that maps tokens to characters", type(tokenizer).__name__, "Save the model with a tokenizer.json."
        )
    encoded = tokenizer(
        text, add_special_tokens=not chat, truncation=False, padding=False, return_offsets_mapping=True, verbose=False
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not len(ids):
        raise PromptError("a prompt with at least one token", f"{text!r}, which this tokenizer drops", "Type some text.")
    if max_tokens is not None and len(ids) > max_tokens:
        over = len(ids) - max_tokens
        raise PromptError(f"at most {max_tokens:,} tokens", f"{len(ids):,}", f"Shorten the prompt by {over:,} tokens.")
    special = np.isin(ids, sorted(special_ids(tokenizer)))
    labels = _labels(tokenizer, ids.tolist())
    return Tokens(ids, labels, text, _offsets(encoded["offset_mapping"]), special)


def typed_at(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """How far the chat template moves a prompt: what to add to a character's place in `text` for its place in `Tokens.text`.

    Raises:
        PromptError: there is no chat template, or it changes the prompt itself.
    """
    made, mark = _apply_template(tokenizer, text), "\ue000"
    before = _apply_template(tokenizer, mark).partition(mark)[0]
    for typed in (text, text.strip()):
        if made.startswith(typed, len(before)):
            return len(before) - text.index(typed)
    raise PromptError("a chat template that keeps the prompt as it is", "one that changes it", "Switch the chat template off.")


def label_ids(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> tuple[str, ...]:
    """Labels of tokens that do not follow each other, such as candidates for the next one."""
    return tuple(label for i in ids for label in _labels(tokenizer, [int(i)]))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens that stand for no text: begin, end, padding, roles and the like."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError("valid Unicode", f"a lone surrogate at character {error.start}", "Remove that character.") from None


def _apply_template(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    if not tokenizer.chat_template:
        raise PromptError("a model with a chat template", "one without", "Switch the chat template off.")
    turns = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _offsets(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [N, 2]. Tokens that cover no text, which tokenizers report as (0, 0), sit where the text before them ends."""
    offsets = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(offsets[:, 1])
    empty = offsets[:, 0] == offsets[:, 1]
    offsets[empty] = ends[empty, None]
    return offsets


def _labels(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, ...]:
    """Labels of consecutive tokens."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    special = special_ids(tokenizer)
    scheme = _scheme(tokenizer)
    pieces = cast("list[str]", tokenizer.convert_ids_to_tokens(ids))
    labels: list[str] = []
    for is_special, run in groupby(zip(ids, pieces, strict=True), key=lambda pair: pair[0] in special):
        if is_special:
            labels += [_readable(piece) for _, piece in run]
        else:
            labels += _label_run([added[i].encode() if i in added else _piece_bytes(piece, scheme) for i, piece in run])
    return tuple(labels)


def _scheme(tokenizer: PreTrainedTokenizerBase) -> Scheme:
    """Read off the tokenizer's decoder, or off its pre-tokenizer where it has none."""
    backend = tokenizer.backend_tokenizer
    step = backend.decoder or backend.pre_tokenizer
    state = json.loads(step.__getstate__()) if step is not None else {}
    kinds = set(_kinds(state))
    if "ByteLevel" in kinds:
        return "bytes"
    return "metaspace" if kinds & {"Metaspace", "ByteFallback"} else "words"


def _kinds(state: object) -> Iterator[str]:
    if isinstance(state, dict):
        if isinstance(kind := state.get("type"), str):
            yield kind
        state = list(state.values())
    if isinstance(state, list):
        for part in state:
            yield from _kinds(part)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _piece_bytes(piece: str, scheme: Scheme) -> bytes:
    if scheme == "bytes" and all(char in _BYTE_OF for char in piece):
        return bytes(_BYTE_OF[char] for char in piece)
    if scheme == "metaspace":
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        piece = piece.replace("▁", " ")
    return piece.encode("utf-8", errors="replace")


def _label_run(pieces: list[bytes]) -> list[str]:
    """One label for each of some consecutive pieces of text, whose bytes may split characters between them."""
    owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    texts = [""] * len(pieces)
    parts: list[list[str]] = [[] for _ in pieces]
    for start, stop, char in _characters(b"".join(pieces)):
        owners = dict.fromkeys(owner[start:stop].tolist())
        for k, token in enumerate(owners, start=1):
            texts[token] += char
            if len(owners) > 1:
                parts[token].append(f"{k}/{len(owners)}")
    return [" ".join([_readable(text), *part]) for text, part in zip(texts, parts, strict=True)]


def _characters(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(start, stop, character) of UTF-8; a byte that belongs to no character stands alone, as a surrogate escape."""
    start = 0
    while start < len(data):
        lead = data[start]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        try:
            char = data[start : start + size].decode()
        except UnicodeDecodeError:
            size, char = 1, bytes([lead]).decode(errors="surrogateescape")
        yield start, start + size, char
        start += size


def _readable(text: str) -> str:
    shown = "".join(_visible(char, lone=len(text.strip()) == 1) for char in text)
    return f"◌{shown}" if text and unicodedata.category(text[0]).startswith("M") else shown


def _visible(char: str, lone: bool) -> str:
    if char in _WHITE:
        return _WHITE[char]
    if unicodedata.category(char) not in _ESCAPED or (char in _JOINERS and not lone):
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
