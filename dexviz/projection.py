"""The output projection W_O that follows attention, in whichever layout the model keeps it."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Projection = nn.Linear | Conv1D


def is_projection(module: nn.Module) -> bool:
    """True for the layouts that `rows` understands: Linear ([out, in]) and Conv1D ([in, out])."""
    return isinstance(module, Projection)


def rows(projection: Projection) -> Tensor:
    """W_O acting on row vectors, a view of the weight: [H · E, out]; head h owns rows h·E to (h+1)·E − 1."""
    return projection.weight.T if isinstance(projection, nn.Linear) else projection.weight


def of_head(projection: Projection, head: int, width: int) -> Tensor:
    """W_O,h, a view: [E, out]."""
    return rows(projection)[head * width : (head + 1) * width]
