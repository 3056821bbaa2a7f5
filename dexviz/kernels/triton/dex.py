"""DEX on head outputs, fused: O'_h = O_h − λ · O_h W_D on selected heads, a copy of the others.

Axes: B batch, H query heads, N tokens, E value width.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dexviz.kernels.triton.launch import dot_settings, padded

_ROWS, _COLUMNS, _DEPTH = 64, 64, 64


def dex_output(o_BHNE: Tensor, w_EE: Tensor, lam: Tensor, heads_S: Tensor) -> Tensor:
    """Twin of `dexviz.kernels.dex.dex_output`; the product is rounded once, from float32."""
    return _Dex.apply(o_BHNE, w_EE, lam, heads_S)


class _Dex(torch.autograd.Function):
    """Backward is two matrix products and a sum, which torch's own kernels do as well as any; it can be differentiated."""

    @staticmethod
    def forward(ctx: Any, o_BHNE: Tensor, w_EE: Tensor, lam: Tensor, heads_S: Tensor) -> Tensor:
        ctx.save_for_backward(o_BHNE, w_EE, lam, heads_S)
        return _launch(o_BHNE, w_EE, lam, heads_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        o_BHNE, w_EE, lam, heads_S = ctx.saved_tensors
        (grad_BHNE,) = grads
        g_BSNE, w, strength = grad_BHNE.index_select(1, heads_S), w_EE.to(grad_BHNE.dtype), lam.to(grad_BHNE.dtype)
        along_o = along_w = along_lam = None
        if ctx.needs_input_grad[0]:
            along_o = grad_BHNE.index_add(1, heads_S, strength * (g_BSNE @ w.T), alpha=-1)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            o_BSNE = o_BHNE.index_select(1, heads_S)
            product_EE = (o_BSNE.flatten(0, 2).T @ g_BSNE.flatten(0, 2)).to(w_EE.dtype)
            along_w = -lam.to(w_EE.dtype) * product_EE
            along_lam = -(product_EE * w_EE).sum().to(lam.dtype).reshape(lam.shape)
        return along_o, along_w, along_lam, None


def _launch(o_BHNE: Tensor, w_EE: Tensor, lam: Tensor, heads_S: Tensor) -> Tensor:
    o_BHNE = o_BHNE if o_BHNE.stride(-1) == 1 else o_BHNE.contiguous()
    b, h, n, e = o_BHNE.shape
    out_BHNE = torch.empty((b, h, n, e), dtype=o_BHNE.dtype, device=o_BHNE.device)
    selected_H = torch.zeros(h, dtype=torch.int32, device=o_BHNE.device).index_fill_(0, heads_S, 1)
    side = min(padded(e), _COLUMNS)
    grid = (triton.cdiv(n, _ROWS), b * h, triton.cdiv(e, side))
    strides = (*o_BHNE.stride()[:3], *out_BHNE.stride()[:3])
    w_EE = w_EE.detach().to(o_BHNE.dtype).contiguous()
    settings = dot_settings(o_BHNE)
    _dex[grid](o_BHNE, w_EE, lam.detach(), selected_H, out_BHNE, *strides, h, n, e, _ROWS, side, _DEPTH, *settings)
    return out_BHNE


@no_type_check
@triton.jit
def _dex(
    o, w, lam, selected, out, o_b, o_h, o_n, out_b, out_h, out_n, heads, rows, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of rows and columns of one head of one batch."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    row = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    col = (tl.program_id(2) * BN + tl.arange(0, BN))[None, :]
    inside = (row < rows) & (col < width)
    o += b * o_b + h * o_h
    result = tl.load(o + row * o_n + col, mask=inside, other=0.0)
    if tl.load(selected + h) != 0:
        change = tl.zeros([BM, BN], tl.float32)
        for start in range(0, width, BK):
            across = (start + tl.arange(0, BK))[None, :]
            down = (start + tl.arange(0, BK))[:, None]
            x = tl.load(o + row * o_n + across, mask=(row < rows) & (across < width), other=0.0)
            y = tl.load(w + down * width + col, mask=(down < width) & (col < width), other=0.0)
            if UPCAST:
                x, y = x.to(tl.float32), y.to(tl.float32)
            change += tl.dot(x, y, input_precision=PRECISION)
        result = (result.to(tl.float32) - tl.load(lam).to(tl.float32) * change).to(out.dtype.element_ty)
    tl.store(out + b * out_b + h * out_h + row * out_n + col, result, mask=inside)
