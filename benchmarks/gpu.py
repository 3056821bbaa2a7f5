"""Triton kernels on a GPU: are they right, and how fast are they?  `python -m benchmarks.gpu --json build/performance/gpu.json`

Three steps, printed as one table: every kernel against the float64 reference of the tests; captures in bfloat16 against the CPU
in float32; time of each kernel against SDPA and against the floor. Without a GPU nothing is measured, and the script says so.
`--device cpu` runs the same steps at tiny sizes in Triton's interpreter, for which times mean nothing.

Exit status 0: everything is within its tolerance, or there is no GPU; 1: something is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_rows import Limit, Row, table

NOT_MEASURED = "not measured: no GPU"
SMOKE_LENGTHS = (2048, 8192)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    asked = _parser().parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(NOT_MEASURED)
        return 0
    tiny = asked.device == "cpu"
    if tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device(asked.device)
    rows = []
    for row in measured(device, asked.smoke, tiny, Limit(asked.limit_seconds), asked.captures):
        rows.append(row)
        print(table([row]).splitlines()[1], file=sys.stderr, flush=True)
    print(device_name(device))
    print(table(rows))
    if asked.json is not None:
        write(asked.json, device, rows)
    return 0 if all(row.holds is not False for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="device under test (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument(
        "--limit-seconds", type=float, default=600.0, help="begin nothing after this long (default: %(default)s)"
    )
    parser.add_argument("--no-captures", dest="captures", action="store_false", help="leave out what needs the default model")
    return parser


def measured(device: torch.device, smoke: bool, tiny: bool, limit: Limit, captures: bool) -> Iterator[Row]:
    """All rows, one by one."""
    from benchmarks import gpu_captures, gpu_checks, gpu_timings

    yield from gpu_checks.check(device, limit, smoke, tiny)
    if captures:
        yield from _unless_spent(limit, "captures", gpu_captures.check(device))
    rounds = 1 if tiny else 3 if smoke else 7
    lengths = (32, 65) if tiny else SMOKE_LENGTHS if smoke else gpu_timings.LENGTHS
    shape = gpu_timings.Shape(2, 1, 16) if tiny else gpu_timings.Shape()
    dtypes = (torch.bfloat16,) if smoke or tiny else (torch.bfloat16, torch.float32)
    layers = []
    for row in gpu_timings.measure(device, limit, lengths, dtypes, shape, rounds, 64 if tiny else 8192):
        layers.append(row)
        yield row
    if captures:
        yield from gpu_captures.against_forward(device, limit, layers, rounds)


def _unless_spent(limit: Limit, quantity: str, rows: Iterator[Row]) -> Iterator[Row]:
    if limit.spent():
        yield Row(quantity, 0, "bfloat16", note="not measured: the time limit was reached")
    else:
        yield from rows


def write(path: Path, device: torch.device, rows: Sequence[Row]) -> None:
    """The rows as JSON, with what the targets of the design are compared with; beside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = f"torch {torch.__version__}"
    data = {"device": f"{device_name(device)}, {versions}", "rows": [asdict(row) for row in rows], "targets": targets(rows)}
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(data, indent=1), encoding="utf-8")
    beside.rename(path)


def targets(rows: Sequence[Row]) -> dict[str, Any]:
    """`capture_ratio` and `floor_ratio` at 32,768 tokens in bfloat16, as far as they were measured, and what limits them."""
    from benchmarks.gpu_timings import LAYER, TARGET_TOKENS

    found = {row.quantity: row for row in rows if row.tokens == TARGET_TOKENS and row.dtype == "bfloat16"}
    made: dict[str, Any] = {}
    if (capture := found.get("capture, composed")) is not None and capture.ratio is not None:
        made["capture_ratio"] = capture.ratio
    if (layer := found.get(LAYER)) is not None and layer.floor_ratio is not None:
        made["floor_ratio"] = layer.floor_ratio
    timed = [row for row in found.values() if row.seconds is not None and row.floor_ratio is not None and row is not layer]
    if made and timed:
        slowest = max(timed, key=lambda row: row.seconds or 0.0)
        made["limit"] = f"longest kernel: {slowest.quantity}, {slowest.floor_ratio:.1f} × its floor"
    return made


def device_name(device: torch.device) -> str:
    """The GPU's name, or what stands in for it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter: times mean nothing"


if __name__ == "__main__":
    sys.exit(main())
