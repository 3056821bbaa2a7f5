"""Attention outputs O = A V: by scaled-dot-product attention where that computes what the model does, else in row blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dexviz.kernels.softmax import AttentionInputs, grouped_matmul, row_blocks, softmax_rows

BLOCK_ROWS = 512
"""Query rows a block where the mask or the logits keep SDPA from taking the whole layer at once."""


def attention_output(x: AttentionInputs, dropout: float = 0.0) -> Float[Tensor, "B H N E"]:
    """O of every query head, [B, H, N, E], in the type of the values; differentiable.

    Soft-capped logits, sinks and biases are computed as the model does (SDPA refuses or ignores them).
    """
    if x.softcap is not None or x.sinks_H is not None or x.bias_BHNM is not None:
        blocks = row_blocks(x.mask.queries, BLOCK_ROWS)
        return torch.cat([_block_output(x, start, stop, dropout) for start, stop in blocks], dim=2)
    if x.mask.block is None and (x.mask.queries == 1 or x.mask.offset == 0):
        is_causal = x.mask.causal and x.mask.queries > 1
        return _sdpa(x, x.q_BHND, slice(None), None, dropout, is_causal)
    parts = []
    for start, stop in row_blocks(x.mask.queries, BLOCK_ROWS):
        mask, c0, c1 = x.mask.rows(start, stop, x.q_BHND.device)
        parts.append(_sdpa(x, x.q_BHND[:, :, start:stop], slice(c0, c1), mask, dropout, False))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _sdpa(x: AttentionInputs, q_BHRD: Tensor, keys: slice, mask: Tensor | None, dropout: float, is_causal: bool) -> Tensor:
    k, v = x.k_BGMD[:, :, keys], x.v_BGME[:, :, keys]
    share = x.groups > 1 and mask is None and k.shape[-1] == v.shape[-1] <= 256
    if x.groups > 1 and not share:
        k, v = k.repeat_interleave(x.groups, dim=1), v.repeat_interleave(x.groups, dim=1)
    return F.scaled_dot_product_attention(
        q_BHRD, k, v, attn_mask=mask, dropout_p=dropout, scale=x.scale, is_causal=is_causal, enable_gqa=share
    )


def _block_output(x: AttentionInputs, start: int, stop: int, dropout: float) -> Tensor:
    block = softmax_rows(x, start, stop)
    a_BHRC = F.dropout(block.a_BHRC, dropout) if dropout else block.a_BHRC
    return grouped_matmul(a_BHRC.to(x.v_BGME.dtype), x.v_BGME[:, :, block.c0 : block.c1])
