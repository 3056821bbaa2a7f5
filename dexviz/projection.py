"""Linear maps before and after attention, W_Q, W_K, W_V and W_O, in whichever layout the model keeps them."""

from __future__ import annotations

from torch import Tensor, addmm, nn
from transformers.pytorch_utils import Conv1D

Projection = nn.Linear | Conv1D


def is_projection(module: nn.Module) -> bool:
    """True for the layouts that `rows` understands: Linear ([out, in]) and Conv1D ([in, out])."""
    return isinstance(module, Projection)


def rows(projection: Projection, weight: Tensor | None = None) -> Tensor:
    """W_O acting on row vectors, a view of the weight: [H · E, out]; head h owns rows h·E to (h+1)·E − 1.

    Args:
        weight: takes the place of the module's own, in the same layout.
    """
    weight = projection.weight if weight is None else weight
    return weight.T if isinstance(projection, nn.Linear) else weight


def of_head(projection: Projection, head: int, width: int, weight: Tensor | None = None) -> Tensor:
    """W_O,h, a view: [E, out]."""
    return rows(projection, weight)[head * width : (head + 1) * width]


def features(projection: Projection) -> tuple[int, int]:
    """(out, in), whatever the layout."""
    inputs, outputs = rows(projection).shape
    return outputs, inputs


def apply(projection: Projection, x: Tensor, weight: Tensor) -> Tensor:
    """What the module makes of x, [..., in] → [..., out], with `weight` in place of its own: the same calls, bit for bit."""
    if isinstance(projection, nn.Linear):
        return nn.functional.linear(x, weight, projection.bias)
    return addmm(projection.bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], projection.nf)
