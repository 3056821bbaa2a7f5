"""Every Triton kernel compiled for GPUs that are not there: does it compile, and does it fit the shared memory?

    python -m benchmarks.gpu_compile [--all] [--target 80 --target 90]

The kernels' own host code runs, on CPU tensors, with a driver that names a target and launches nothing. Exit status 1 where a
kernel does not compile or takes more shared memory than the target has.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

os.environ["TRITON_INTERPRET"] = "0"  # before the first import of a kernel

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dexviz.kernels.softmax import AttentionInputs, MaskSpec
from dexviz.kernels.terms import ScoreMap, ScoreTerm
from dexviz.kernels.tiles import tile_edges
from dexviz.kernels.triton import dex, divergence, gram, rows, softmax, tiles

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227}
"""What a block may take, by compute capability (CUDA C++ Programming Guide, table of technical specifications)."""
CPU = torch.device("cpu")
KINDS = ("attention", "gain", "contribution", "two terms", "two contributions")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (64, 128, 256)


@dataclass(frozen=True)
class Variant:
    """What kernels are specialised for."""

    kind: str
    dtype: torch.dtype
    width: int
    extras: str
    """ "plain", or "everything": soft-cap, sinks, an additive mask and a bias."""

    def __str__(self) -> str:
        return f"{self.kind}, {str(self.dtype).removeprefix('torch.')}, width {self.width}, {self.extras}"


@dataclass(frozen=True)
class Compiled:
    """One kernel of one variant."""

    kernel: str
    variant: str
    target: int
    shared: int
    """Bytes of shared memory a block."""
    resources: str
    """Registers and stack a thread, as cuobjdump prints them; empty where that tool is missing."""

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_KB[self.target] * 1024


class NoDevice:
    """A driver that names a target and has no device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def variants(everything: bool) -> Iterator[Variant]:
    """All of them, or the one whose kernels take the most shared memory."""
    if everything:
        yield from (Variant(*shape, "plain") for shape in itertools.product(KINDS, DTYPES, WIDTHS))
        yield from (Variant("two contributions", *shape, "everything") for shape in itertools.product(DTYPES, WIDTHS))
    else:
        yield Variant("contribution", torch.float32, 128, "plain")


def compile_all(capability: int, everything: bool) -> Iterator[Compiled]:
    """Each kernel of each variant, compiled for one target."""
    whole, found = JITFunction.run, []

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = whole(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.__name__, made))
        return made

    driver.set_active(NoDevice(capability))
    JITFunction.run = compiled
    try:
        seen = set()
        for variant in variants(everything):
            launch(variant)
            for name, made in found:
                if (key := (name, made.hash)) not in seen:
                    seen.add(key)
                    yield Compiled(name, str(variant), capability, made.metadata.shared, resources(made.asm["cubin"]))
            found.clear()
    finally:
        JITFunction.run = whole


def launch(variant: Variant) -> None:
    """Everything that a capture launches, on tensors whose values do not matter."""
    score = score_map(variant)
    n = score.inputs.mask.queries
    block = softmax.score_rows(score, 0, n, torch.empty_like(score.inputs.q_BHND[0]))
    rows.row_sums(block, offset=0, sink=1, local=8, threshold=1e-3, spans={"a": (0, 9)})
    edges = tile_edges(0, n, 2)
    for consumer in (
        tiles.Tiles(score.heads, edges, edges, 0, torch.zeros(())),
        gram.Gram(score.heads, CPU),
        divergence.JensenShannon(score.heads, CPU),
    ):
        consumer.add(block)
    block.head(0)
    softmax.score_rows(score, 0, n)
    o = score.inputs.q_BHND
    dex.dex_output(o, torch.empty(variant.width, variant.width, dtype=o.dtype), torch.zeros(()), torch.tensor([0]))


def score_map(variant: Variant, tokens: int = 256, heads: int = 18) -> ScoreMap:
    """Score maps of a layer of this variant; of more heads than the Gram kernel takes at once."""

    def zeros(*shape: int, dtype: torch.dtype = variant.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    two, whole = "two" in variant.kind, tuple(range(2 * heads if "two" in variant.kind else heads))
    q, k = zeros(1, len(whole), tokens, variant.width), zeros(1, heads // 2, tokens, variant.width)
    mask, special = MaskSpec(tokens, tokens), {}
    if variant.extras == "everything":
        mask = MaskSpec(tokens, tokens, lambda a, b, c, d: zeros(1, 1, b - a, d - c, dtype=torch.float32))
        special = {"softcap": 9.0, "sinks_H": zeros(len(whole)), "bias_BHNM": zeros(1, 1, tokens, tokens)}
    inputs = AttentionInputs(q, k, k, variant.width**-0.5, mask, **special)
    rank = variant.width if "contribution" in variant.kind else 1
    side = zeros(heads, tokens, rank, dtype=torch.float32)
    plain, gain = variant.kind == "attention", variant.kind == "gain"
    groups = (whole[:heads], whole[heads:]) if two else (whole,)
    return ScoreMap(inputs, tuple(ScoreTerm(g, *((None, None) if plain else (None if gain else side, side))) for g in groups))


def resources(cubin: bytes) -> str:
    """Registers and stack of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False)
    return " ".join(word for word in done.stdout.split() if word.startswith(("REG:", "STACK:")))


def main() -> int:
    """Compile and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every dtype, score and width, not a few")
    parser.add_argument("--target", type=int, action="append", choices=sorted(SHARED_KB), help="compute capability; repeatable")
    arguments = parser.parse_args()
    fits = True
    for capability in arguments.target or (80, 90):
        for made in compile_all(capability, arguments.all):
            fits &= made.fits
            verdict = "ok" if made.fits else f"exceeds {SHARED_KB[made.target]} KB"
            print(
                f"sm_{made.target} {made.kernel:12} {made.shared / 1024:7.1f} KB  {verdict}  {made.variant}  {made.resources}"
            )
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
