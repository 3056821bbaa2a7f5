"""Captures on a GPU in bfloat16 against the CPU in float32: `python -m benchmarks.gpu --smoke`.

Loads the default pair on both devices (each load runs the self-check), captures base and variant of one prompt, and compares
within the stated tolerances. Exit status 0: all hold; 1: one does not; 0 with a note: there is no GPU, nothing was run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

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


@dataclass(frozen=True)
class Row:
    """One comparison."""

    view: str
    quantity: str
    measured: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.tolerance


def main() -> int:
    """Run the smoke check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the only mode there is so far")
    parser.add_argument("--device", default="cuda", help="device under test (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        note = "not run: no CUDA device on this machine"
        print(json.dumps({"run": False, "note": note}) if arguments.json else note)
        return 0
    started = time.perf_counter()
    rows = list(smoke(arguments.device))
    seconds = time.perf_counter() - started
    if arguments.json:
        print(
            json.dumps(
                {"run": True, "device": device_name(arguments.device), "seconds": seconds, "rows": [asdict(r) for r in rows]}
            )
        )
    else:
        print(f"{device_name(arguments.device)}, bfloat16, against the CPU in float32; {seconds:.1f} s")
        for row in rows:
            print(f"{row.view:8} {row.quantity:32} {row.measured:9.2e} ≤ {row.tolerance:.0e}  {'ok' if row.holds else 'FAILS'}")
    return 0 if all(row.holds for row in rows) else 1


def smoke(device: str) -> Iterator[Row]:
    """Compare captures of both views on `device` in bfloat16 with the CPU in float32."""
    reference = load_pair("smollm2-135m", adapter="default", device="cpu", dtype="float32")
    tested = load_pair("smollm2-135m", adapter="default", device=device, dtype="bfloat16")
    for view in ("base", "variant"):
        yield from compare(view, take(tested, view), take(reference, view))


def take(pair: ModelPair, view: str) -> Capture:
    """The capture that is compared."""
    request = CaptureRequest(maps=HEADS, similarity=True, pool=16)
    return capture(pair.base if view == "base" else pair.variant, pair.tokenize(PROMPT), request)


def compare(view: str, tested: Capture, reference: Capture) -> Iterator[Row]:
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
        "top token's probability, |Δ|": abs(float(tested.logits_top.prob[0] - reference.logits_top.prob[0])),
    }
    for quantity, value in measured.items():
        yield Row(view, quantity, value, TOLERANCES[quantity])


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


if __name__ == "__main__":
    sys.exit(main())
