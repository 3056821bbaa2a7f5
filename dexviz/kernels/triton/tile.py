"""One tile of S = Σ_t A_t ∘ (U_t W_tᵀ) inside a kernel, from Q, K and each row's log-sum-exp.

Every index comes as a tensor that broadcasts against the others, so that the same code makes a tile of one head, [BM, BN], and
of G heads at once, [G, BM, BN]: `s`, `h` are scalars or [G, 1, 1]; `row` is [.., BM, 1], `col` [.., 1, BN]; `across` runs over
a width as [.., 1, BD], `down` as [.., BD, 1]. Rows and columns count within the block of rows; `x` is a `Source` of pointers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl


class Source(NamedTuple):
    """What tiles are computed from: tensors first, then their strides and the block's measures."""

    q: Any
    k: Any
    lse: Any
    mask: Any
    bias: Any
    heads: Any
    u: Any
    w: Any
    q_h: int
    q_n: int
    k_h: int
    k_n: int
    mask_h: int
    mask_n: int
    bias_h: int
    bias_n: int
    u_t: int
    u_s: int
    u_n: int
    w_t: int
    w_s: int
    w_n: int
    rows: int
    cols: int
    first: int
    """Column of the block at which row 0 of the block stands."""
    scores: int
    groups: int
    depth: int
    rank: int
    scale: float
    cap: float


@no_type_check
@triton.jit
def column_stop(x, row_stop, CAUSAL: tl.constexpr):
    """Past the last column that a row before `row_stop` may see."""
    stop = x.cols
    if CAUSAL:
        stop = tl.minimum(stop, row_stop + x.first)
    return stop


@no_type_check
@triton.jit
def query_tile(x, h, row, across, UPCAST: tl.constexpr):
    q = tl.load(x.q + h * x.q_h + row * x.q_n + across, mask=(row < x.rows) & (across < x.depth), other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@no_type_check
@triton.jit
def logits(
    x, h, q, row, col, down,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What the softmax is taken of; −∞ where the row may not see the column."""
    k = tl.load(x.k + (h // x.groups) * x.k_h + col * x.k_n + down, mask=(col < x.cols) & (down < x.depth), other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    z = tl.dot(q, k, input_precision=PRECISION) * x.scale
    if CAP:
        z = x.cap * (1 - 2 / (tl.exp(2 * z / x.cap) + 1))
    seen = (row < x.rows) & (col < x.cols)
    if BIAS:
        z += tl.load(x.bias + h * x.bias_h + row * x.bias_n + col, mask=seen, other=0.0).to(tl.float32)
    if CAUSAL:
        seen = seen & (col <= row + x.first)
    if MASK:
        seen = seen & (tl.load(x.mask + h * x.mask_h + row * x.mask_n + col, mask=seen, other=0) != 0)
    return tl.where(seen, z, float("-inf"))


@no_type_check
@triton.jit
def probabilities(
    x, t: tl.constexpr, s, row, col, across, down,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A of the softmax head that term t of score head s reads; zero for score heads that do not exist."""
    h = tl.load(x.heads + t * x.scores + s, mask=s < x.scores, other=0)
    q = query_tile(x, h, row, across, UPCAST)
    z = logits(x, h, q, row, col, down, CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST)
    lse = tl.load(x.lse + h * x.rows + row, mask=(row < x.rows) & (s < x.scores), other=float("inf"))
    return tl.exp(z - lse)


@no_type_check
@triton.jit
def _low_rank(x, u, w, row, col, kacross, kdown, real, PRECISION: tl.constexpr):
    rows = tl.load(u + row * x.u_n + kacross, mask=real & (row < x.rows) & (kacross < x.rank), other=0.0)
    cols = tl.load(w + col * x.w_n + kdown, mask=real & (col < x.cols) & (kdown < x.rank), other=0.0)
    return tl.dot(rows, cols, input_precision=PRECISION)


@no_type_check
@triton.jit
def weights(x, t: tl.constexpr, s, row, col, kacross, kdown, GAIN: tl.constexpr, PRECISION: tl.constexpr):
    """U_t W_tᵀ: of a gain for each row and one for each column (GAIN 1), or of any rank (GAIN 2), in steps."""
    real = s < x.scores
    u, w = x.u + t * x.u_t + s * x.u_s, x.w + t * x.w_t + s * x.w_s
    if GAIN == 1:
        rows = tl.load(u + row * x.u_n, mask=real & (row < x.rows), other=0.0)
        product = rows * tl.load(w + col * x.w_n, mask=real & (col < x.cols), other=0.0)
    else:
        product = _low_rank(x, u, w, row, col, kacross, kdown, real, PRECISION)
        for start in range(kacross.numel, x.rank, kacross.numel):
            product += _low_rank(x, u, w, row, col, start + kacross, start + kdown, real, PRECISION)
    return product


@no_type_check
@triton.jit
def score_tile(
    x, s, row, col, across, down, kacross, kdown,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """S of score head s."""
    total = probabilities(x, 0, s, row, col, across, down, CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST)
    if GAIN > 0:
        total *= weights(x, 0, s, row, col, kacross, kdown, GAIN, PRECISION)
    for t in tl.static_range(1, TERMS):
        a = probabilities(x, t, s, row, col, across, down, CAUSAL, MASK, BIAS, CAP, PRECISION, UPCAST)
        if GAIN > 0:
            a *= weights(x, t, s, row, col, kacross, kdown, GAIN, PRECISION)
        total += a
    return total
