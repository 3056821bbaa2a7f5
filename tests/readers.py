"""Tiny models that read text byte by byte, so that every word has tokens of its own, and pairs of them with strong adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dexviz.models import ModelPair, make_pair, wrap_model
from tests.adapters import random_adapter
from tests.families import build

SPECIAL = ("<pad>", "<s>", "</s>")
VOCABULARY = 256 + len(SPECIAL)
CONTEXT = 2048


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after three special ones; nothing is added to a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate((*SPECIAL, *alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    pad, start, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, bos_token=start, eos_token=end)


def byte_model(family: str, context: int = CONTEXT, *, attn: str = "eager", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The family's tiny model with the byte tokenizer's vocabulary."""
    length = {"n_positions": context} if family.startswith("gpt") else {"max_position_embeddings": context}
    return build(family, seed, attn=attn, vocab_size=VOCABULARY, **length, **changes)


def byte_pair(
    family: str, folder: Path, *, context: int = CONTEXT, dtype: torch.dtype = torch.float32, lam: float = 0.6, **changes: Any
) -> ModelPair:
    """The model and a DEX variant of it that differs a lot."""
    loaded = wrap_model(byte_model(family, context, **changes).to(dtype), byte_tokenizer())
    return make_pair(loaded, adapter=str(random_adapter(loaded, folder, lam=lam)))


def log_probabilities(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities of the next token after each position of one sequence, in numpy: float64 [N, V]."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].double().numpy()
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
