"""One tile of S = Σ_t A_t ∘ (U_t W_tᵀ) of one head inside a kernel, from Q, K and each row's log-sum-exp.

`x` is a `Source` of pointers. `row` is [BM, 1] and `col` [1, BN], both counted within the block of rows; `low` and `high`
[BM, 1] are the range of columns that each row sees; `d` and `k` run over the key width, [BD], and a step of the rank, [BK].
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
    low: Any
    high: Any
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
    scores: int
    groups: int
    depth: int
    rank: int
    scale: float
    cap: float


@no_type_check
@triton.jit
def seen_columns(x, row):
    """(low, high) of each row; rows past the last see nothing."""
    inside = row < x.rows
    return tl.load(x.low + row, mask=inside, other=0), tl.load(x.high + row, mask=inside, other=0)


@no_type_check
@triton.jit
def column_range(x, low, high, BN: tl.constexpr):
    """Columns [start, stop) outside of which no row sees anything; the start is a multiple of BN."""
    alive = high > low
    start = tl.min(tl.where(alive, low, x.cols))
    return start // BN * BN, tl.max(tl.where(alive, high, 0))


@no_type_check
@triton.jit
def query_tile(x, h, row, d, UPCAST: tl.constexpr):
    q = tl.load(x.q + h * x.q_h + row * x.q_n + d[None, :], mask=(row < x.rows) & (d[None, :] < x.depth), other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@no_type_check
@triton.jit
def logits(
    x, h, q, row, col, low, high, d,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What the softmax is taken of; −∞ where the row may not see the column."""
    inside = (col < x.cols) & (d[:, None] < x.depth)
    k = tl.load(x.k + (h // x.groups) * x.k_h + col * x.k_n + d[:, None], mask=inside, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    z = tl.dot(q, k, input_precision=PRECISION) * x.scale
    if CAP:
        z = x.cap * (1 - 2 / (tl.exp(2 * z / x.cap) + 1))
    seen = (col >= low) & (col < high)
    if BIAS:
        z += tl.load(x.bias + h * x.bias_h + row * x.bias_n + col, mask=seen, other=0.0).to(tl.float32)
    if MASK:
        seen = seen & (tl.load(x.mask + h * x.mask_h + row * x.mask_n + col, mask=seen, other=0) != 0)
    return tl.where(seen, z, float("-inf"))


@no_type_check
@triton.jit
def probabilities(
    x, t, s, row, col, low, high, d,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A of the softmax head that term t of score head s reads; zero for score heads that do not exist."""
    h = tl.load(x.heads + t * x.scores + s, mask=s < x.scores, other=0)
    q = query_tile(x, h, row, d, UPCAST)
    z = logits(x, h, q, row, col, low, high, d, MASK, BIAS, CAP, PRECISION, UPCAST)
    lse = tl.load(x.lse + h * x.rows + row, mask=(row < x.rows) & (s < x.scores), other=float("inf"))
    return tl.exp(z - lse)


@no_type_check
@triton.jit
def _low_rank(x, u, w, row, col, k, real, PRECISION: tl.constexpr):
    across, down = k[None, :], k[:, None]
    rows = tl.load(u + row * x.u_n + across, mask=real & (row < x.rows) & (across < x.rank), other=0.0)
    cols = tl.load(w + col * x.w_n + down, mask=real & (col < x.cols) & (down < x.rank), other=0.0)
    return tl.dot(rows, cols, input_precision=PRECISION)


@no_type_check
@triton.jit
def weights(x, t, s, row, col, k, GAIN: tl.constexpr, PRECISION: tl.constexpr):
    """U_t W_tᵀ: of a gain for each row and one for each column (GAIN 1), or of any rank (GAIN 2), in steps."""
    real = s < x.scores
    u, w = x.u + t * x.u_t + s * x.u_s, x.w + t * x.w_t + s * x.w_s
    if GAIN == 1:
        rows = tl.load(u + row * x.u_n, mask=real & (row < x.rows), other=0.0)
        product = rows * tl.load(w + col * x.w_n, mask=real & (col < x.cols), other=0.0)
    else:
        product = _low_rank(x, u, w, row, col, k, real, PRECISION)
        for start in range(k.numel, x.rank, k.numel):
            product += _low_rank(x, u, w, row, col, start + k, real, PRECISION)
    return product


@no_type_check
@triton.jit
def score_tile(
    x, s, row, col, low, high, d, k,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    GAIN: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """S of score head s, [BM, BN]."""
    total = tl.zeros([row.shape[0], col.shape[1]], tl.float32)
    for t in range(TERMS):
        a = probabilities(x, t, s, row, col, low, high, d, MASK, BIAS, CAP, PRECISION, UPCAST)
        if GAIN > 0:
            a *= weights(x, t, s, row, col, k, GAIN, PRECISION)
        total += a
    return total
