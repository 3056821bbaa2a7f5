"""Prompts out of parts that are tokenised apart and joined as ids, so that every part's span is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dexviz.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """Token ids of a part, without special tokens, int64 [N]."""
    ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def start_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The begin-of-text token, where the tokenizer puts it before a text, int64 [0 or 1]."""
    first = tokenizer("a")["input_ids"][:1]
    return np.asarray(first if first == [tokenizer.bos_token_id] else [], dtype=np.int64)


def encode_answers(tokenizer: PreTrainedTokenizerBase, values: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Token ids of answers, each with a space before it, int64.

    Raises:
        PromptError: two of them come out alike, or one as nothing.
    """
    answers = tuple(encode(tokenizer, f" {value}") for value in values)
    if len({tuple(ids.tolist()) for ids in answers}) < len(answers) or not all(map(len, answers)):
        raise PromptError(
            "a tokenizer that tells answers apart", f"the same tokens for some of {', '.join(values)}", "Leave the task out."
        )
    return answers
