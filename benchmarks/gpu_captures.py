"""Captures on a device in bfloat16 against the CPU in float32, and the time of a capture against the SDPA forward pass.

Loads the default pair on both devices (each load runs the self-check) and captures base and variant of one prompt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_rows import Limit, Row, compared, timed
from benchmarks.gpu_timings import LAYER
from dexviz.kernels import backend
from dexviz.models import ModelPair, load_pair
from dexviz.recorder import capture
from dexviz.records import Capture, CaptureRequest

PROMPT = (
    "The key to the old lighthouse is under the third stone. The keeper's daughter sold apples at the market, and nobody "
    "asked her about the storm. Question: where is the key? Answer: under the"
)
HEADS = ((0, 0), (12, 3), (29, 8))
TOLERANCES = {
    "map, mean |Δ|": 2e-3,
    "entropy, mean |Δ| in nats": 3e-2,
    "sink share, mean |Δ|": 2e-2,
    "cosine similarity, mean |Δ|": 2e-2,
    "λ, max |Δ|": 1e-6,
    "row sum − 1, max |Δ|": 1e-3,
    "top token's probability, |Δ|": 5e-2,
}
"""Largest deviation of bfloat16 from float32 that passes, by quantity; both views."""


def check(device: torch.device) -> Iterator[Row]:
    """One row a view, set of kernels and quantity; the interpreter takes too long for Triton captures of this model."""
    sets = ("eager", "triton") if device.type == "cuda" else ("eager",)
    reference = load_pair("smollm2-135m", adapter="default", device="cpu", dtype="float32")
    tested = load_pair("smollm2-135m", adapter="default", device=str(device), dtype="bfloat16")
    for view in ("base", "variant"):
        expected = take(reference, view, "eager")
        for kernels in sets:
            found = take(tested, view, kernels)
            used = found.provenance["kernels"]
            yield compared(f"{kernels} kernels ran, {view}", len(found.tokens), "bfloat16", float(used != kernels), 0.0)
            yield from compare(f"{view}, {kernels}", found, expected)


def take(pair: ModelPair, view: str, kernels: str) -> Capture:
    """The capture that is compared."""
    request = CaptureRequest(maps=HEADS, similarity=True, pool=16)
    with _kernels(kernels):
        return capture(pair.base if view == "base" else pair.variant, pair.tokenize(PROMPT), request)


class _kernels:
    """The operators that captures take within it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = os.environ.get(backend.VARIABLE)
        os.environ[backend.VARIABLE] = self.name

    def __exit__(self, *_: Any) -> None:
        if self.before is None:
            del os.environ[backend.VARIABLE]
        else:
            os.environ[backend.VARIABLE] = self.before


def compare(label: str, tested: Capture, reference: Capture) -> Iterator[Row]:
    """One row a quantity."""

    def mean(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.nanmean(np.abs(one - other)))

    measured = {
        "map, mean |Δ|": max(mean(tested.maps[h].scores, reference.maps[h].scores) for h in HEADS),
        "entropy, mean |Δ| in nats": mean(tested.stats["entropy"], reference.stats["entropy"]),
        "sink share, mean |Δ|": mean(tested.stats["sink"], reference.stats["sink"]),
        "cosine similarity, mean |Δ|": mean(tested.similarity["cosine"], reference.similarity["cosine"]),
        "λ, max |Δ|": float(np.abs(tested.lam - reference.lam).max()),
        "row sum − 1, max |Δ|": max(float(np.abs(tested.maps[h].attention.sum(axis=1) - 1).max()) for h in HEADS),
        "top token's probability, |Δ|": _top_difference(tested, reference),
    }
    for quantity, value in measured.items():
        yield compared(f"{quantity}, {label}", len(tested.tokens), "bfloat16", value, TOLERANCES[quantity])


def _top_difference(tested: Capture, reference: Capture) -> float:
    """Of the reference's most likely token: 1 where the tested capture does not name it at all."""
    top = int(reference.logits_top.ids[0])
    found = np.flatnonzero(tested.logits_top.ids == top)
    return 1.0 if not len(found) else float(abs(tested.logits_top.prob[found[0]] - reference.logits_top.prob[0]))


def against_forward(device: torch.device, limit: Limit, layers: list[Row], rounds: int) -> Iterator[Row]:
    """The SDPA forward pass, and what it costs with a capture in it: each layer's SDPA replaced by the measured kernels.

    Composed from the layer's own rows, since the default model refuses prompts of more than 8,192 tokens.

    Args:
        layers: rows of `gpu_timings.measure`, of which those of the whole layer in bfloat16 count.
    """
    pair = load_pair("smollm2-135m", adapter=None, device=str(device), dtype="bfloat16")
    model, depth = pair.base.model, pair.base.layout.layers
    for row in layers:
        if row.quantity != LAYER or row.dtype != "bfloat16" or row.seconds is None or row.sdpa_seconds is None:
            continue
        if limit.spent():
            yield Row("SDPA forward", row.tokens, row.dtype, note="not measured: the time limit was reached")
            continue
        ids = torch.randint(0, 1000, (1, row.tokens), generator=torch.Generator().manual_seed(0)).to(device)

        def forward(ids: torch.Tensor = ids) -> Any:
            with torch.inference_mode(), pair.base.active():
                return model(ids, use_cache=False, logits_to_keep=1).logits

        try:
            plain = timed(forward, device, rounds)
        except torch.OutOfMemoryError:
            yield Row("SDPA forward", row.tokens, row.dtype, note="not measured: does not fit in memory")
            continue
        whole = plain + depth * (row.seconds - row.sdpa_seconds)
        yield Row("SDPA forward", row.tokens, row.dtype, seconds=plain, sdpa_seconds=plain, ratio=1.0)
        yield Row("capture, composed", row.tokens, row.dtype, seconds=whole, sdpa_seconds=plain, ratio=whole / plain)
