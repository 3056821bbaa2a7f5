"""Every Triton kernel on a device against the float64 reference of the tests, on operands rounded to the type under test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_rows import Limit, Row, compared
from dexviz.kernels.softmax import row_blocks
from dexviz.kernels.terms import ScoreMap
from dexviz.kernels.tiles import tile_edges
from dexviz.kernels.triton import dex, divergence, gram, rows, softmax, tiles
from tests import reference as ref
from tests.score_cases import Case, Layer, layer, low_rank

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
BLOCK = 1000
LAM = 0.3


def cases(smoke: bool, tiny: bool) -> list[tuple[Case, torch.dtype]]:
    """What is checked: sizes, types, grouped queries, windows, soft-caps, sinks, and every kind of score."""
    wide = partial(Case, width=64, value_width=64)
    few = [wide(63, kv_heads=1, groups=3, kind="contribution"), wide(63, kv_heads=2, kind="two terms", window=9)]
    if tiny:
        return [(few[0], torch.float32), (few[1], torch.bfloat16)]
    many = [
        *few,
        wide(1025, kv_heads=3, groups=3, kind="gain"),
        wide(1025, kv_heads=2, groups=2, kind="two contributions", window=300, softcap=20.0, sinks=True),
        replace(wide(257, kv_heads=2, groups=9, kind="row gain"), width=128, value_width=128),
    ]
    if not smoke:
        many += [wide(3000, kv_heads=1, groups=4, kind="contribution"), wide(3000, kv_heads=2, kind="attention", window=512)]
    return [(case, dtype) for case in many for dtype in TOLERANCES]


def check(device: torch.device, limit: Limit, smoke: bool, tiny: bool) -> Iterator[Row]:
    """One row an operator and case."""
    for case, dtype in cases(smoke, tiny):
        name = str(dtype).removeprefix("torch.")
        if limit.spent():
            yield Row(f"kernels, {case.kind}", case.tokens, name, note="not measured: the time limit was reached")
            continue
        given = rounded(layer(case), dtype)
        for quantity, error in errors(given, device, dtype):
            yield compared(f"{quantity}, {case.kind}", case.tokens, name, error, TOLERANCES[dtype])


def rounded(exact: Layer, dtype: torch.dtype) -> Layer:
    """The same case with Q, K and V rounded to a type, U and W to float32, and the dense results of these operands."""
    x = exact.score.inputs
    q, k, v = (t.to(dtype) for t in (x.q_BHND, x.k_BGMD, x.v_BGME))
    sinks = None if x.sinks_H is None else x.sinks_H.float()
    terms = tuple(
        replace(t, **{side: None if (u := getattr(t, side)) is None else u.float() for side in ("u_SNK", "w_SMK")})
        for t in exact.score.terms
    )
    n = q.shape[2]
    mask = np.tril(np.ones((n, n), bool)) if x.mask.block is None else x.mask.block(0, n, 0, n)[0, 0].numpy()
    dense = [t[0].double().numpy() for t in (q, k, v)]
    a = ref.attention(*dense[:2], x.scale, mask, x.softcap, None if sinks is None else sinks.double().numpy())
    wide = tuple(replace(t, u_SNK=_double(t.u_SNK), w_SMK=_double(t.w_SMK)) for t in terms)
    s = sum(a[list(t.heads_S)] * low_rank(t, n) for t in wide)
    inputs = replace(x, q_BHND=q, k_BGMD=k, v_BGME=v, sinks_H=sinks)
    return Layer(ScoreMap(inputs, terms), a, s, ref.outputs(a, dense[2]))


def errors(case: Layer, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """(operator, its largest error) on the device."""
    score, n = on(case.score, device), case.s_SNN.shape[1]
    asked = {"sink": 2, "local": 5, "threshold": 0.01, "spans": {"all": (0, n), "needle": (n // 3, n // 3 + 1)}}
    edges = tile_edges(0, n, min(16, n))
    tiled = tiles.Tiles(score.heads, edges, edges, 0, torch.zeros((), device=device))
    grams, js = gram.Gram(score.heads, device), divergence.JensenShannon(score.heads, device)
    out_HNE = torch.full(case.o_HNE.shape, torch.nan, dtype=dtype, device=device)
    sums, maps = [], 0.0
    for start, stop in row_blocks(n, BLOCK):
        block = softmax.score_rows(score, start, stop, out_HNE)
        sums.append(rows.row_sums(block, offset=0, **asked))
        for consumer in (tiled, grams, js):
            consumer.add(block)
        for head in (0, score.heads - 1):
            maps = max(maps, error(block.head(head)[0], case.s_SNN[head, start:stop, block.c0 : block.c1]))
    stats = rows.RowSums.joined(sums).statistics()
    expected = ref.row_statistics(case.s_SNN, **asked)
    at = np.nan_to_num(expected.pop("argmax"), nan=0).astype(int)
    found = np.nan_to_num(stats.pop("argmax").cpu().numpy(), nan=0).astype(int)
    sizes = np.abs(case.s_SNN)
    wrong = float(np.abs(np.take_along_axis(sizes, found[..., None], 2) - np.take_along_axis(sizes, at[..., None], 2)).max())
    expected.pop("sparsity")
    yield "output", error(out_HNE, case.o_HNE)
    yield "map", maps
    yield "statistics", max(error(stats[name], values) for name, values in expected.items())
    yield "size at argmax", wrong / max(1.0, float(sizes.max()))
    dense = [ref.tiled(s, edges.numpy(), edges.numpy()) for s in case.s_SNN]
    yield "tile means", error(tiled.means(), np.stack([mean for mean, _ in dense]))
    yield "tile extremes", error(tiled.extremes().abs(), np.abs(np.stack([extreme for _, extreme in dense])))
    yield "cosine", error(grams.cosine(), ref.cosine_similarity(case.s_SNN))
    yield "Jensen-Shannon", error(js.similarity(), ref.js_similarity(case.s_SNN))
    yield "DEX", dex_error(case, device, dtype)


def dex_error(case: Layer, device: torch.device, dtype: torch.dtype) -> float:
    """Of the fused DEX kernel on the case's outputs, every second head adapted."""
    heads, _, width = case.o_HNE.shape
    o = torch.from_numpy(case.o_HNE).to(dtype)
    w = torch.randn(width, width, generator=torch.Generator().manual_seed(0)).div(width**0.5).to(dtype)
    selected = np.arange(heads) % 2 == 0
    lam, chosen = torch.tensor(LAM, device=device), torch.from_numpy(np.flatnonzero(selected)).to(device)
    mine = dex.dex_output(o[None].to(device), w.to(device), lam, chosen)
    return error(mine[0], ref.dex_outputs(o.double().numpy(), w.double().numpy(), LAM, selected))


def on(score: ScoreMap, device: torch.device) -> ScoreMap:
    """The same maps on a device."""

    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    x = score.inputs
    block = x.mask.block
    inputs = replace(
        x,
        q_BHND=move(x.q_BHND),
        k_BGMD=move(x.k_BGMD),
        v_BGME=move(x.v_BGME),
        sinks_H=move(x.sinks_H),
        mask=x.mask if block is None else replace(x.mask, block=lambda *edges: block(*edges).to(device)),
    )
    return ScoreMap(inputs, tuple(replace(t, u_SNK=move(t.u_SNK), w_SMK=move(t.w_SMK)) for t in score.terms))


def error(mine: Tensor, expected: np.ndarray) -> float:
    """Largest |Δ| relative to the largest |expected|, or to 1 where that is less; infinite where NaN stands elsewhere."""
    found = mine.detach().double().cpu().numpy()
    if not np.array_equal(np.isnan(found), np.isnan(expected)):
        return float("inf")
    return float(np.nanmax(np.abs(found - expected), initial=0.0) / max(1.0, np.nanmax(np.abs(expected), initial=0.0)))


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()
