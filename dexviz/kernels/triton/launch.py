"""What every launch needs to know of its operands."""

from __future__ import annotations

import torch
from torch import Tensor

from dexviz.kernels.backend import interpreted

NARROWEST = 16
"""Smallest side of a matrix product on tensor cores."""


def padded(width: int) -> int:
    """The power of two, at least 16, that covers a width."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def dot_settings(x: Tensor) -> tuple[str, bool]:
    """(precision of products of float32 operands, whether operands become float32 first).

    float64 has no product with a float32 sum; and Triton's interpreter computes wrongly in bfloat16.
    """
    cuda = x.is_cuda and torch.version.hip is None
    return "tf32x3" if cuda else "ieee", interpreted() or x.dtype == torch.float64


def rank_step(rank: int) -> int:
    """How much of a term's rank a tile takes at a time: little, since float32 operands fill the shared memory."""
    return min(padded(rank), 32)
