"""Tiny models on disk, and DEX adapters with random weights: strong enough for every number to differ from the base's."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dexviz.adapter import save_adapter
from dexviz.dex import DexAdapter, DexConfig
from dexviz.models import LoadedModel
from tests.families import VOCAB, build


def random_adapter(base: LoadedModel, folder: Path, *, lam: float = 0.3, seed: int = 0) -> Path:
    """An adapter folder for `base` that adapts heads 0, 2, 3 and 7 of every layer."""
    layout = base.layout
    heads = tuple(h for h in (0, 2, 3, 7) if h < layout.heads)
    adapter = DexAdapter(DexConfig(heads=(heads,) * layout.layers, width=layout.value_width, query_heads=layout.heads))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in adapter.parameters():
            parameter.data = torch.randn_like(parameter) * layout.value_width**-0.5 if parameter.dim() else torch.tensor(lam)
    return save_adapter(adapter, folder, base, dtype=torch.float32)


def tiny_model(folder: Path, family: str) -> Path:
    """A randomly initialised model with a tokenizer of VOCAB words, saved to a folder."""
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, VOCAB)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    build(family).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return folder
