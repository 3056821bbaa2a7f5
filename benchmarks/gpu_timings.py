"""Time of each Triton kernel on one layer's attention, against SDPA and against the floor, at growing numbers of tokens.

The floor is the larger of operations / rate of a matrix product in the same type and bytes / rate of a copy, both rates
measured here on the same device. Operations are those of the matrix products over causal entries, each computed once; bytes are
operands read once and results written once. Exponentials and logarithms are not counted, so that no kernel reaches its floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_rows import Limit, Row, timed
from dexviz.kernels.softmax import AttentionInputs, MaskSpec, row_blocks
from dexviz.kernels.terms import ScoreMap, ScoreTerm
from dexviz.kernels.tiles import tile_edges
from dexviz.kernels.triton import dex, divergence, gram, maps, rows, softmax, source, tiles

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
POOL = 128
LAYER = "capture of one layer"
TARGET_TOKENS = 32768


@dataclass(frozen=True)
class Shape:
    """The attention of one layer; by default that of SmolLM2-135M."""

    heads: int = 9
    kv_heads: int = 3
    width: int = 64


@dataclass(frozen=True)
class Peaks:
    """What the device does at best, measured."""

    operations: float
    """Of a matrix product, a second."""
    bytes: float
    """Read and written by a copy, a second."""

    def floor(self, operations: float, moved: float) -> float:
        return max(operations / self.operations, moved / self.bytes)


@dataclass(frozen=True)
class Part:
    """Something that is timed, and what it cannot do without."""

    quantity: str
    work: Callable[[], Any]
    operations: float
    bytes: float
    memory: float = 0.0
    """Bytes that it holds beside its operands."""


@dataclass
class Setting:
    """One layer's operands of some number of tokens."""

    n: int
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    score: ScoreMap = field(init=False)
    out_HNE: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        make = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make, device=self.device, dtype=self.dtype)

        s = self.shape
        q, k, v = (normal(1, heads, self.n, s.width) for heads in (s.heads, s.kv_heads, s.kv_heads))
        inputs = AttentionInputs(q, k, v, s.width**-0.5, MaskSpec(self.n, self.n))
        gain = normal(s.heads, self.n, 1).float()
        self.score = ScoreMap(inputs, (ScoreTerm(tuple(range(s.heads)), w_SMK=gain),))
        self.out_HNE = torch.empty_like(q[0])

    def blocks(self) -> list[tuple[int, int]]:
        return list(row_blocks(self.n, source.rows_per_block(self.shape.heads, self.n)))

    def sdpa(self) -> torch.Tensor:
        x = self.score.inputs
        shared = {"enable_gqa": True} if x.groups > 1 else {}
        return F.scaled_dot_product_attention(x.q_BHND, x.k_BGMD, x.v_BGME, is_causal=True, scale=x.scale, **shared)


def measure_peaks(device: torch.device, dtype: torch.dtype, side: int, rounds: int) -> Peaks:
    """Rates of a square matrix product of this side and of a copy of 64 such matrices."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = timed(lambda: one @ other, device, rounds)
    big = torch.zeros(64 * side * side, dtype=dtype, device=device)
    target = torch.empty_like(big)
    copy = timed(lambda: target.copy_(big), device, rounds)
    return Peaks(2 * side**3 / product, 2 * big.numel() * big.element_size() / copy)


def parts(setting: Setting) -> list[Part]:
    """The kernels of a capture, one by one and together."""
    score, n, s = setting.score, setting.n, setting.shape
    size, pairs = setting.out_HNE.element_size(), n * (n + 1) / 2
    logits = 2.0 * s.width * pairs * s.heads
    queries, keys = size * n * s.width * s.heads, size * n * s.width * s.kv_heads
    read = queries + keys
    ready = [softmax.score_rows(score, a, b) for a, b in setting.blocks()]
    edges, device, head = tile_edges(0, n, max(1, min(POOL, n // 16))), setting.device, s.heads - 1
    w, lam = torch.zeros(s.width, s.width, dtype=setting.dtype, device=device), torch.zeros((), device=device)
    chosen = torch.arange(0, s.heads, 2, device=device)
    tile = tiles.Tiles(s.heads, edges, edges, 0, torch.zeros((), device=device))

    def each(consume: Callable[[Any], Any]) -> Callable[[], None]:
        def over_all() -> None:
            for block in ready:
                consume(block)

        return over_all

    def together() -> None:
        kept = (tiles.Tiles(s.heads, edges, edges, 0, torch.zeros((), device=device)), gram.Gram(s.heads, device))
        for a, b in setting.blocks():
            block = softmax.score_rows(score, a, b, setting.out_HNE)
            _sums(block)
            for consumer in kept:
                consumer.add(block)

    products = pairs * s.heads * (s.heads + 1)
    results = 4.0 * n * s.heads * 8
    both = 2 * logits
    return [
        Part("first pass, with O", each(lambda b: softmax.score_rows(score, b.start, b.stop, setting.out_HNE)), both, 2 * read),
        Part("statistics", each(_sums), logits, read + results),
        Part(f"tiles, {len(edges) - 1} a side", each(tile.add), logits, read),
        Part("Gram", each(gram.Gram(s.heads, device).add), logits + products, read),
        Part("Jensen-Shannon", each(divergence.JensenShannon(s.heads, device).add), logits, read),
        Part(
            "one head's map, S and A",
            each(lambda b: maps.write_map(b.launch.source, b.settings, head)),
            logits / s.heads,
            8.0 * n * n,
            8.0 * ready[0].stop * n,
        ),
        Part(
            "DEX on O",
            lambda: dex.dex_output(setting.out_HNE[None], w, lam, chosen),
            2.0 * n * s.width**2 * len(chosen),
            2 * queries,
        ),
        Part(LAYER, together, both + products, 2 * read + results),
    ]


def _sums(block: Any) -> Any:
    return rows.row_sums(block, offset=0, sink=1, local=8, threshold=1e-3, spans={})


def measure(
    device: torch.device,
    limit: Limit,
    lengths: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    shape: Shape,
    rounds: int,
    side: int,
) -> Iterator[Row]:
    """One row a kernel, type and number of tokens."""
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        peaks = measure_peaks(device, dtype, side, rounds)
        yield Row("matrix product, operations a second", side, name, note=f"{peaks.operations:.3e}")
        yield Row("copy, bytes a second", side, name, note=f"{peaks.bytes:.3e}")
        for n in lengths:
            if limit.spent():
                yield Row("all kernels", n, name, note="not measured: the time limit was reached")
                continue
            try:
                yield from _of_length(Setting(n, shape, dtype, device), peaks, limit, rounds)
            except torch.OutOfMemoryError:
                yield Row("all kernels", n, name, note="not measured: does not fit in memory")


def _of_length(setting: Setting, peaks: Peaks, limit: Limit, rounds: int) -> Iterator[Row]:
    name, device = str(setting.dtype).removeprefix("torch."), setting.device
    sdpa = timed(setting.sdpa, device, rounds)
    yield Row("SDPA", setting.n, name, seconds=sdpa, sdpa_seconds=sdpa, ratio=1.0)
    for part in parts(setting):
        if limit.spent():
            yield Row(part.quantity, setting.n, name, note="not measured: the time limit was reached")
        elif part.memory > _free(device):
            yield Row(part.quantity, setting.n, name, note=f"not measured: {part.memory / 1e9:.1f} GB do not fit in memory")
        else:
            seconds = timed(part.work, device, rounds)
            floor = peaks.floor(part.operations, part.bytes)
            yield Row(part.quantity, setting.n, name, seconds, sdpa, seconds / sdpa, floor, seconds / floor)


def _free(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
