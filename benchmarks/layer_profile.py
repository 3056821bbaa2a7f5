"""Where a capture's time goes: each part of one layer on its own, over the blocks and threads that a capture uses.

    python -m benchmarks.layer_profile [--tokens 2048] [--out build/performance/profile.json]

Parts run after each other on the Q, K and V of the default model's middle layer, one sweep over all blocks a part; medians of
rounds, times the number of layers. The floor of a product is its multiplications at the rate of one large product in the same
run. `benchmarks.performance` puts the result into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dexviz.engine import share_cores

MODEL, POOL, ROUNDS = "smollm2-135m", 128, 9
_RATE_SIZE = 1536


@dataclass(frozen=True)
class Part:
    """One sweep over a layer's blocks."""

    name: str
    work: Callable[[int, int], Any]
    """What is done with the rows [start, stop)."""
    multiplications: float | None = None
    """Of the whole sweep, for products."""


def main() -> int:
    """Measure, print, and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the profile as JSON")
    arguments = parser.parse_args()
    share_cores()
    profile = measured(arguments.tokens, arguments.rounds)
    for row in profile["rows"]:
        floor = f", floor {row['floor_seconds']:.3f} s" if "floor_seconds" in row else ""
        print(f"{row['part']:36} {row['seconds']:.3f} s{floor}")
    print(profile["note"])
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(profile, indent=1), encoding="utf-8")
    return 0


@torch.inference_mode()
def measured(tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each part, summed over the layers."""
    from dexviz.kernels.workers import spread

    layers, score = middle_layer(tokens)
    parts, blocks = list(sweeps(score)), score_blocks(score)
    threads = min(torch.get_num_threads(), len(blocks))
    seconds = np.zeros((rounds + 1, len(parts) + 1))
    o_HNE = torch.randn(score.inputs.heads, tokens, score.inputs.v_BGME.shape[-1])
    for turn in range(rounds + 1):
        for i, part in enumerate(parts):

            def share(index: int, part: Part = part) -> None:
                for start, stop in blocks[index::threads]:
                    part.work(start, stop)

            seconds[turn, i] = timed(lambda share=share: spread(share, threads))  # type: ignore[misc]
        seconds[turn, -1] = timed(lambda: cka(o_HNE))
    rate = multiplication_rate()
    rows: list[dict[str, Any]] = []
    for part, value in zip(parts, np.median(seconds[1:], axis=0), strict=False):
        row: dict[str, Any] = {"part": part.name, "seconds": layers * float(value)}
        if part.multiplications is not None:
            row["floor_seconds"] = layers * part.multiplications / rate
        rows.append(row)
    o = score.inputs.heads * score.inputs.v_BGME.shape[-1]
    products = tokens * o * o
    rows.append(
        {
            "part": "CKA of the head outputs",
            "seconds": layers * float(np.median(seconds[1:, -1])),
            "floor_seconds": layers * products / 2 / rate,
        }
    )
    note = (
        f"Each part alone, over the {len(blocks)} blocks of a layer and {threads} threads, times {layers} layers. The floor of "
        f"a product counts visible entries only, at {2 * rate / 1e9:,.0f} GFLOP/s, the rate of one product of {_RATE_SIZE:,} × "
        f"{_RATE_SIZE:,} matrices in the same run; CKA's counts one triangle of the symmetric product."
    )
    return {"tokens": tokens, "rows": rows, "note": note}


def middle_layer(tokens: int) -> tuple[int, Any]:
    """(layers of the model, the prepared score map of the middle one)."""
    from dexviz.attention import AttentionCall, active
    from dexviz.kernels.compiled import rows
    from dexviz.kernels.terms import ScoreMap, ScoreTerm
    from dexviz.models import load_pair

    model = load_pair(MODEL, device="cpu", dtype="float32").base.model
    layers = int(model.config.get_text_config().num_hidden_layers)
    kept: list[AttentionCall] = []
    ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    with active(None, lambda call: kept.append(call) if call.layer == layers // 2 else None):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    inputs = kept[0].inputs
    return layers, rows.prepared(ScoreMap(inputs, (ScoreTerm(tuple(range(inputs.heads))),)))


def score_blocks(score: Any) -> list[tuple[int, int]]:
    """The blocks that a capture makes of it."""
    from dexviz.kernels import terms

    return terms.row_blocks(score)


def sweeps(score: Any) -> Any:
    """The parts in the order of the work."""
    from dexviz.kernels.compiled import loops, rows
    from dexviz.kernels.tiles import tile_edges

    x, n = score.inputs, score.inputs.mask.queries
    groups, members, _, depth = score.q_GIND.shape
    largest = max((stop - start) * stop for start, stop in score_blocks(score)) * x.heads
    own = threading.local()

    def maps(start: int, stop: int) -> torch.Tensor:
        """Memory of a block that this thread works on again and again, as in a capture."""
        if not hasattr(own, "maps"):
            own.maps = torch.rand(largest)
        shape = (x.heads, stop - start, stop)
        return own.maps[: math.prod(shape)].view(shape)

    edges, pairs = tile_edges(0, n, min(POOL, n)), x.heads * n * (n + 1) / 2
    none = np.empty((0, 0), dtype=np.float32)

    def block_of(start: int, stop: int) -> Any:
        from dexviz.kernels.terms import ScoreBlock

        s_SRC = maps(start, stop)
        known = (True,) * x.heads
        return ScoreBlock(s_SRC, (s_SRC,), start, stop, 0, s_SRC.shape[-1], torch.zeros(s_SRC.shape[:2]), known)

    def qk(start: int, stop: int) -> None:
        q_GXD = torch.from_numpy(np.ascontiguousarray(score.q_GIND[:, :, start:stop]).reshape(groups, -1, depth))
        torch.bmm(q_GXD, torch.from_numpy(score.k_GDM[:, :, :stop]), out=maps(start, stop).view(groups, -1, stop))

    def softmax(start: int, stop: int) -> None:
        a_HRC = maps(start, stop).numpy()
        plogp_HR = np.empty(a_HRC.shape[:2], dtype=np.float32)
        low_R, high_R = score.low_N[start:stop], score.high_N[start:stop]
        loops.softmax(a_HRC, low_R, high_R, 0, score.sinks_H, none, a_HRC, plogp_HR)

    def av(start: int, stop: int) -> None:
        a_GXC = maps(start, stop).view(groups, members * (stop - start), stop)
        torch.bmm(a_GXC, torch.from_numpy(score.v_GME[:, :stop]))

    def statistics(start: int, stop: int) -> None:
        rows.row_sums(block_of(start, stop), offset=0, sink=1, local=8, threshold=1e-3, spans={})

    def tiles(start: int, stop: int) -> None:
        if not hasattr(own, "tiles"):
            own.tiles = rows.Tiles(x.heads, edges, edges, 0, torch.zeros(()))
        own.tiles.add(block_of(start, stop))

    def gram(start: int, stop: int) -> None:
        rows.Gram(x.heads, torch.device("cpu")).add(block_of(start, stop))

    yield Part("Q Kᵀ", qk, pairs * depth)
    yield Part("softmax, with entropy", softmax)
    yield Part("A V", av, pairs * x.v_BGME.shape[-1])
    yield Part("statistics of the rows", statistics)
    yield Part(f"tiles, {min(POOL, n)} × {min(POOL, n)}", tiles)
    yield Part("Gram matrix of the score maps", gram)


def cka(o_HNE: torch.Tensor) -> None:
    from dexviz.kernels.similarity import linear_cka

    linear_cka(o_HNE)


def multiplication_rate() -> float:
    """Multiplications a second of one large product in float32: the median of five."""
    a, b = torch.randn(2, _RATE_SIZE, _RATE_SIZE)
    seconds = sorted(timed(lambda: a @ b) for _ in range(5))[2]
    return float(_RATE_SIZE**3 / seconds)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
