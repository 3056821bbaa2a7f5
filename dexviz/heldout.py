"""Held-out loss: mean next-token loss over non-overlapping blocks of a text that nothing was trained on.

The protocol for the default model: the whole 2026 address, blocks of 256 tokens, float32, nats per predicted token. A model
with a shorter context reads blocks of its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dexviz.corpora import held_out_text, pack
from dexviz.models import View, no_tokenizer

BLOCK = 256
_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Loss:
    """Mean loss in nats a predicted token, over `tokens` predictions in `blocks` blocks."""

    mean: float
    tokens: int
    blocks: int


def held_out_blocks(view: View, block: int = BLOCK) -> np.ndarray:
    """Token ids of the held-out text in non-overlapping blocks, in order: int64 [blocks, block].

    A block is no longer than the model's context.
    """
    if view.loaded.tokenizer is None:
        raise no_tokenizer(view.loaded)
    length = min(block, view.loaded.max_tokens)
    return pack([held_out_text()], view.loaded.tokenizer, length, seed=None, separate=False)


@torch.inference_mode()
def mean_loss(view: View, blocks: np.ndarray) -> Loss:
    """Mean next-token loss of a view over blocks of token ids, int64 [blocks, block].

    Each block is read on its own, so its first token is not predicted.
    """
    total, count = 0.0, 0
    batch = max(1, _BATCH_TOKENS // blocks.shape[1])
    with view.active():
        for start in range(0, len(blocks), batch):
            ids = torch.from_numpy(blocks[start : start + batch]).to(view.model.device)
            logits = view.model(ids, use_cache=False).logits[:, :-1].float()
            total += float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
            count += ids[:, 1:].numel()
    return Loss(total / count, count, len(blocks))
