"""Loops over the rows of a block of logits or scores, written so that each inner one becomes vector instructions.

    e^x = 2^n 2^f,  n = round(x / ln 2),  2^f by a polynomial on [−½, ½];   ln x = e ln 2 + ln m by one on m in [√½, √2)

Relative error of e^x below 3e-6, absolute error of ln x below 1e-6 in float32. Coefficients: Cephes (Moshier).
Sums may be reassociated. A float's bits order like an integer's, which is how maxima become vector instructions too.

Axes: X rows (heads × query rows), C columns of the block, Q named ranges of keys, P tiles a side.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_MATHS = {"contract", "reassoc", "nsz", "arcp", "afn", "nnan"}
"""Infinities stay meaningful: they stand for hidden keys."""
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": _MATHS, "error_model": "numpy"}
_f, _i = np.float32, np.int32
_COLUMNS = 1024
"""Columns of nine heads' rows that the first-level cache holds."""
_CHUNK = 256
"""Columns whose largest entry is found at once, so that a search for its place is short."""
SUMS = 6
"""Σ|S|, Σ|S| ln |S|, Σ S, max |S|, how many |S| ≥ τ, Σ|S| of the last keys."""


def _jit(loop: Any) -> Any:
    """Compiled on its first call, and kept on disk where there is a folder for it."""
    try:
        return njit(cache=True, **_OPTIONS)(loop)
    except RuntimeError:
        return njit(**_OPTIONS)(loop)


@no_type_check
@intrinsic
def _float_of(typing: Any, bits: Any):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@no_type_check
@intrinsic
def _bits_of(typing: Any, number: Any):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@no_type_check
@_jit
def _ordered(bits):
    """Integers in the order of the floats whose bits they are made of; its own inverse."""
    return _i(bits ^ ((bits >> _i(31)) & _i(0x7FFFFFFF)))


@no_type_check
@_jit
def _largest(row):
    top = _i(-(2**31))
    for c in range(row.shape[0]):
        top = max(top, _ordered(_bits_of(row[c])))
    return _float_of(_ordered(top))


@no_type_check
@_jit
def _exponentials(row, top):
    """row ← p = e^(row − top) where that is a normal number, else 0; (Σ p, Σ p log₂ p)."""
    total, weighted = _f(0), _f(0)
    for c in range(row.shape[0]):
        y = (row[c] - top) * _f(1.44269504088896341)
        bounded = y if y > _f(-126) else _f(-126)
        n = _i(bounded - _f(0.5))
        f = bounded - _f(n)
        p = _f(1.535336188319500e-4)
        p = p * f + _f(1.339887440266574e-3)
        p = p * f + _f(9.618437357674640e-3)
        p = p * f + _f(5.550332471162809e-2)
        p = p * f + _f(2.402264791363012e-1)
        p = p * f + _f(6.931472028550421e-1)
        p = p * f + _f(1)
        p = p * _float_of(_i((n + _i(127)) << _i(23)))
        p = p if y >= _f(-126) else _f(0)
        row[c] = p
        total += p
        weighted += p * bounded
    return total, weighted


@no_type_check
@_jit
def _shared(row, share):
    for c in range(row.shape[0]):
        row[c] *= share


@no_type_check
@_jit
def _gained(row, share, gain, out):
    for c in range(row.shape[0]):
        p = row[c] * share
        row[c] = p
        out[c] = p * gain[c]


@no_type_check
@_jit
def softmax(z_HRC, low_R, high_R, c0, sink_H, gain_HM, s_HRC, plogp_HR):
    """Rows of logits become probabilities p in place: of the keys [low, high), with one more logit in the sum; the rest is 0.

    Args:
        low_R, high_R: absolute keys; the block's first column is key c0.
        gain_HM: a gain for each absolute key, or nothing.
        s_HRC: receives p times the gain, where there are gains.
        plogp_HR: receives Σ p ln p, which costs less here than from p alone.
    """
    width, gains = z_HRC.shape[2], gain_HM.shape[0] > 0
    for h in range(z_HRC.shape[0]):
        for r in range(z_HRC.shape[1]):
            low = min(max(low_R[r] - c0, 0), width)
            high = min(max(high_R[r] - c0, low), width)
            row = z_HRC[h, r, low:high]
            top = max(_largest(row), sink_H[h])
            share, plogp = _f(0), _f(0)
            if top > _f(-np.inf):
                seen, weighted = _exponentials(row, top)
                total = seen + np.exp(sink_H[h] - top)
                share = _f(1) / total
                plogp = (weighted * _f(0.6931471805599453) - np.log(total) * seen) * share
            else:
                row[:] = _f(0)
            plogp_HR[h, r] = plogp
            if gains:
                _gained(row, share, gain_HM[h, c0 + low : c0 + high], s_HRC[h, r, low:high])
                s_HRC[h, r, :low] = _f(0)
                s_HRC[h, r, high:] = _f(0)
            else:
                _shared(row, share)
            z_HRC[h, r, :low] = _f(0)
            z_HRC[h, r, high:] = _f(0)


@no_type_check
@_jit
def _plain_sums(row, threshold):
    total, net, above = _f(0), _f(0), _f(0)
    for c in range(row.shape[0]):
        mass = abs(row[c])
        total += mass
        net += row[c]
        above += _f(1) if mass >= threshold else _f(0)
    return total, net, above


@no_type_check
@_jit
def _weighted_logarithms(row):
    """Σ|S| ln |S|; what is 0 adds 0."""
    total = _f(0)
    for c in range(row.shape[0]):
        mass = abs(row[c])
        bits = _bits_of(mass)
        e = _i(_i(bits - _i(0x3F3504F3)) >> _i(23))
        m = _float_of(_i(bits - _i(e << _i(23)))) - _f(1)
        p = _f(7.0376836292e-2)
        p = p * m + _f(-1.1514610310e-1)
        p = p * m + _f(1.1676998740e-1)
        p = p * m + _f(-1.2420140846e-1)
        p = p * m + _f(1.4249322787e-1)
        p = p * m + _f(-1.6668057665e-1)
        p = p * m + _f(2.0000714765e-1)
        p = p * m + _f(-2.4999993993e-1)
        p = p * m + _f(3.3333331174e-1)
        square = m * m
        total += mass * (_f(e) * _f(0.6931471805599453) + (m - _f(0.5) * square + m * square * p))
    return total


@no_type_check
@_jit
def _mass_on(row, start, stop):
    total = _f(0)
    for c in range(max(start, 0), min(stop, row.shape[0])):
        total += abs(row[c])
    return total


@no_type_check
@_jit
def _first_largest(row):
    """(largest |S|, the first column that has it)."""
    top, chunk = _i(-1), 0
    for start in range(0, row.shape[0], _CHUNK):
        part, here = row[start : start + _CHUNK], _i(-1)
        for c in range(part.shape[0]):
            here = max(here, _bits_of(abs(part[c])))
        if here > top:
            top, chunk = here, start
    c = chunk
    while c < row.shape[0] - 1 and _bits_of(abs(row[c])) != top:
        c += 1
    return _float_of(top), c


@no_type_check
@_jit
def row_sums(s_SRC, first, local, threshold, ranges_Q2, known_S, sums_ASR, argmax_SR, spans_QSR):
    """What the statistics of each row are made of (see SUMS), the first column of largest |S|, and Σ|S| on ranges of columns.

    Args:
        first: column at which the block's first row stands.
        known_S: heads whose Σ|S| ln |S| is known already.
    """
    for s in range(s_SRC.shape[0]):
        for r in range(s_SRC.shape[1]):
            row = s_SRC[s, r]
            total, net, above = _plain_sums(row, threshold)
            sums_ASR[0, s, r], sums_ASR[2, s, r], sums_ASR[4, s, r] = total, net, above
            if not known_S[s]:
                sums_ASR[1, s, r] = _weighted_logarithms(row)
            sums_ASR[3, s, r], argmax_SR[s, r] = _first_largest(row)
            sums_ASR[5, s, r] = _mass_on(row, first + r - local + 1, first + r + 1)
            for q in range(ranges_Q2.shape[0]):
                spans_QSR[q, s, r] = _mass_on(row, ranges_Q2[q, 0], ranges_Q2[q, 1])


@no_type_check
@_jit
def _dots(one, a, b, c, d):
    """Four inner products in one sweep over the first vector."""
    to_a, to_b, to_c, to_d = _f(0), _f(0), _f(0), _f(0)
    for i in range(one.shape[0]):
        x = one[i]
        to_a += x * a[i]
        to_b += x * b[i]
        to_c += x * c[i]
        to_d += x * d[i]
    return to_a, to_b, to_c, to_d


@no_type_check
@_jit
def gram(s_SRC, gram_SS):
    """Adds Σ S_g S_h over the block's entries, row by row, to float64 sums of the upper triangle."""
    last = s_SRC.shape[0] - 1
    for r in range(s_SRC.shape[1]):
        for start in range(0, s_SRC.shape[2], _COLUMNS):
            stop = min(start + _COLUMNS, s_SRC.shape[2])
            for g in range(last + 1):
                one = s_SRC[g, r, start:stop]
                for h in range(g, last + 1, 4):
                    a, b = s_SRC[h, r, start:stop], s_SRC[min(h + 1, last), r, start:stop]
                    c, d = s_SRC[min(h + 2, last), r, start:stop], s_SRC[min(h + 3, last), r, start:stop]
                    products = _dots(one, a, b, c, d)
                    for i in range(min(4, last + 1 - h)):
                        gram_SS[g, h + i] += products[i]


@no_type_check
@_jit
def _add_row(row, sums, highs, lows, signed):
    for c in range(row.shape[0]):
        s = row[c]
        sums[c] += s
        highs[c] = s if s > highs[c] else highs[c]
    if signed:
        for c in range(row.shape[0]):
            lows[c] = row[c] if row[c] < lows[c] else lows[c]


@no_type_check
@_jit
def _add_four_rows(one, two, three, four, sums, highs, lows, signed):
    """Four rows at once, so that the columns' sums are read and written once for them."""
    for c in range(one.shape[0]):
        a, b, x, y = one[c], two[c], three[c], four[c]
        sums[c] += (a + b) + (x + y)
        a = a if a > b else b
        x = x if x > y else y
        a = a if a > x else x
        highs[c] = a if a > highs[c] else highs[c]
    if signed:
        for c in range(one.shape[0]):
            a, b, x, y = one[c], two[c], three[c], four[c]
            a = a if a < b else b
            x = x if x < y else y
            a = a if a < x else x
            lows[c] = a if a < lows[c] else lows[c]


@no_type_check
@_jit
def _sum(row):
    total = _f(0)
    for c in range(row.shape[0]):
        total += row[c]
    return total


@no_type_check
@_jit
def _smallest(row):
    least = _i(2**31 - 1)
    for c in range(row.shape[0]):
        least = min(least, _ordered(_bits_of(row[c])))
    return _float_of(_ordered(least))


@no_type_check
@_jit
def _empty_into_tiles(columns_3C, edges, sum_P, high_P, low_P):
    """Columns gathered over a band's rows go into the band's tiles; the columns start anew at 0."""
    width = columns_3C.shape[1]
    for p in range(sum_P.shape[0]):
        start, stop = max(edges[p], 0), min(edges[p + 1], width)
        if start < stop:
            sum_P[p] += _sum(columns_3C[0, start:stop])
            high_P[p] = max(high_P[p], _largest(columns_3C[1, start:stop]))
            low_P[p] = min(low_P[p], _smallest(columns_3C[2, start:stop]))
    columns_3C[:] = _f(0)


@no_type_check
@_jit
def tiles(s_SRC, signed, first_row, row_edges, col_edges, columns_3C, sum_SPP, high_SPP, low_SPP):
    """A block's rows go into tile sums and extremes; rows outside the edges are passed over.

    Args:
        signed: whether entries may be negative.
        first_row: absolute position of the block's first row.
        col_edges: borders of the tiles, counted from the block's first column.
        columns_3C: zeros, for sums, maxima and minima over the rows of a band; left as zeros.
    """
    rows = s_SRC.shape[1]
    for band in range(row_edges.shape[0] - 1):
        start, stop = max(row_edges[band] - first_row, 0), min(row_edges[band + 1] - first_row, rows)
        if start >= stop:
            continue
        for s in range(s_SRC.shape[0]):
            sums, highs, lows, block = columns_3C[0], columns_3C[1], columns_3C[2], s_SRC[s]
            fours = start + (stop - start) // 4 * 4
            for r in range(start, fours, 4):
                _add_four_rows(block[r], block[r + 1], block[r + 2], block[r + 3], sums, highs, lows, signed)
            for r in range(fours, stop):
                _add_row(block[r], sums, highs, lows, signed)
            _empty_into_tiles(columns_3C, col_edges, sum_SPP[s, band], high_SPP[s, band], low_SPP[s, band])
