"""What every launch needs to know of its operands, and how large tiles may be so that they fit the shared memory of any GPU."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dexviz.kernels.backend import interpreted

NARROWEST = 16
"""Smallest side of a matrix product on tensor cores."""
STAGES = 1
"""Steps of a loop whose operands are in shared memory at once."""
_TILE_BYTES = 1 << 14
"""What one operand of a tile may take of the shared memory."""


def padded(width: int) -> int:
    """The power of two, at least 16, that covers a width."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def side(row_bytes: int, most: int = 64) -> int:
    """Rows (or columns) of a tile whose rows of one operand take so many bytes."""
    return max(NARROWEST, min(most, _TILE_BYTES // row_bytes))


def dot_settings(x: Tensor) -> tuple[str, bool]:
    """(precision of products of float32 operands, whether operands become float32 first).

    float64 has no product with a float32 sum; and Triton's interpreter computes wrongly in bfloat16.
    """
    cuda = not interpreted() and triton.runtime.driver.active.get_current_target().backend == "cuda"
    return "tf32x3" if cuda else "ieee", interpreted() or x.dtype == torch.float64


def rank_step(rank: int) -> int:
    """How much of a term's rank a tile takes at a time: little, since float32 operands fill the shared memory."""
    return min(padded(rank), 32)


def addressable(x_HND: Tensor) -> Tensor:
    """The same rows, at offsets within a head that a 32-bit index reaches, with unit stride."""
    reach = (x_HND.shape[1] - 1) * x_HND.stride(1) + x_HND.shape[2]
    return x_HND if (x_HND.stride(2) == 1 or x_HND.shape[2] == 1) and reach < 1 << 31 else x_HND.contiguous()
