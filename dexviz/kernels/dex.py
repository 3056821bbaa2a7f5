"""DEX on head outputs: O'_h = O_h − λ · O_h W_D for selected heads  (arXiv 2505.16333, Eq. 3-5)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from dexviz.kernels.backend import attempt, chosen


def dex_output(
    o_BHNE: Float[Tensor, "B H N E"], w_EE: Float[Tensor, "E E"], lam: Float[Tensor, ""], heads_S: Int[Tensor, " S"]
) -> Float[Tensor, "B H N E"]:
    """Adapted head outputs, [B, H, N, E]; differentiable in `o_BHNE`, `w_EE` and `lam`.

    Args:
        o_BHNE: attention outputs of H heads, width E.
        w_EE: W_D, applied to row vectors.
        lam: λ, a scalar tensor. At λ = 0 the result equals `o_BHNE` bit for bit.
        heads_S: int64 indices of the heads that are adapted.
    """
    if chosen(o_BHNE.device).name != "triton":
        return _eager(o_BHNE, w_EE, lam, heads_S)
    return attempt(o_BHNE.device, lambda: _triton(o_BHNE, w_EE, lam, heads_S), lambda: _eager(o_BHNE, w_EE, lam, heads_S))


def _eager(o_BHNE: Tensor, w_EE: Tensor, lam: Tensor, heads_S: Tensor) -> Tensor:
    o_BSNE = o_BHNE.index_select(1, heads_S)
    change_BSNE = lam.to(o_BHNE.dtype) * (o_BSNE @ w_EE.to(o_BHNE.dtype))
    return o_BHNE.index_add(1, heads_S, change_BSNE, alpha=-1)


def _triton(o_BHNE: Tensor, w_EE: Tensor, lam: Tensor, heads_S: Tensor) -> Tensor:
    from dexviz.kernels.triton import dex

    return dex.dex_output(o_BHNE, w_EE, lam, heads_S)
