"""The runs behind docs/performance.md: forward passes, captures and dense maps from 128 to 8,192 tokens, on the CPU.

    python -m benchmarks.performance            # whatever is missing, then the page
    python -m benchmarks.performance --page     # the page from what is there

Every finished case is kept in build/performance and not measured again while the engine's code stays the same, so that an
interrupted run goes on. TransformerLens is installed into an environment of its own there. Other work on the machine spoils
the numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.performance_page import PEER, write_page
from dexviz.engine import share_cores

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "build" / "performance"
MODEL, ADAPTER = "smollm2-135m", "default"
ROUNDS = {128: 9, 256: 9, 512: 9, 1024: 7, 2048: 7, 4096: 3, 8192: 3}
"""Tokens → rounds of timing."""
PEER_ROUNDS = 3
DEX_TOKENS, DEX_ROUNDS = 1024, 15
BROWSER = (512, 680, 2048, 8192)
PEER_PACKAGES = ("torch==2.13.0", "transformer-lens==4.3.0")
_ENGINE = ("attention", "bench*", "context", "dense*", "dex", "diff", "head*", "peak*", "rec*", "scores", "speed", "stream")


class Run:
    """What is measured, with the pair loaded once; each step is kept as a file."""

    def __init__(self, folder: Path, model: str, adapter: str) -> None:
        self.folder, self.source = folder, {"base": model, "adapter": adapter, "device": "cpu"}
        self.code = code_digest(ROOT)
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def pair(self) -> Any:
        """The models, in float32 on the CPU."""
        from dexviz.models import load_pair

        return load_pair(**self.source)

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A step's result: read where it was made with this code, and not in vain for want of a peer; else made and written."""
        path = self.folder / f"{name}.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["code"] == self.code and not found["result"].get("retry"):
                return found["result"]
        print(f"{name} …", flush=True)
        result = make()
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps({"code": self.code, "result": result}), encoding="utf-8")
        beside.rename(path)
        return result

    def length(self, count: int, rounds: int) -> None:
        """All cases on one prompt, the peer among them."""
        from dexviz.bench_cases import Cases, reading
        from dexviz.benchmark import BenchConfig, peak_of, time_cases

        def timed() -> dict[str, Any]:
            timings, left_out = time_cases(self.pair, count, BenchConfig((count,), rounds), _note)
            return {"rounds": rounds, "timings": {k: asdict(v) for k, v in timings.items()}, "left_out": left_out}

        def peak(name: str) -> dict[str, Any]:
            found = peak_of(name, count, self.source)
            return {"left_out": found} if isinstance(found, str) else asdict(found)

        for name in self.kept(f"time-{count}", timed)["timings"]:
            self.kept(f"memory-{count}-{name}", lambda name=name: peak(name))
        tokens = reading(self.pair, count)
        reason = Cases(self.pair, tokens).left_out("dense")
        for step, peer_rounds in (("peer-time", PEER_ROUNDS), ("peer-memory", 0)):
            made = {"left_out": reason} if reason else None
            self.kept(f"{step}-{count}", lambda made=made, rounds=peer_rounds: made or self._peer(tokens.ids.tolist(), rounds))

    def _peer(self, ids: list[int], rounds: int) -> dict[str, Any]:
        import torch

        from dexviz.bench_cases import POOL
        from dexviz.fetching import resolve_model

        python, failure = installed_peer(self.folder / "peer")
        if failure:
            return {"left_out": failure, "retry": True}
        folder = str(resolve_model(self.source["base"]))
        asked = {"folder": folder, "ids": ids, "pool": POOL, "rounds": rounds, "threads": torch.get_num_threads()}
        command = [str(python), str(ROOT / "benchmarks" / "peer.py")]
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"left_out": f"{PEER} failed: {lines[-1][:200]}", "retry": True}
        return json.loads(done.stdout.splitlines()[-1])

    def dex(self) -> None:
        """The variant, unmerged and merged, against the base."""
        from dexviz.speed import measure_speed

        def measured() -> dict[str, Any]:
            adapter, model = self.pair.variant.adapter, self.pair.base.model
            speed = measure_speed(self.pair, tokens=DEX_TOKENS, rounds=DEX_ROUNDS)
            added = sum(len(o.heads) * o.w_d.numel() for o in adapter.operators.values())
            return {**asdict(speed), "operations_share": added / sum(p.numel() for p in model.parameters())}

        self.kept("dex", measured)

    def sizes(self) -> None:
        """What a capture of the base holds afterwards, from one of a few tokens."""
        from dexviz.bench_cases import POOL, Cases, reading

        def measured() -> dict[str, float]:
            cases = Cases(self.pair, reading(self.pair, POOL))
            taken = cases.call("base")()
            tensors = [t for r in cases.records for t in (r.inputs.q_BHND, r.inputs.k_BGMD, r.inputs.v_BGME)]
            return {
                "qkv": sum(t.numel() * t.element_size() for t in tensors) / POOL,
                "statistics": sum(values.nbytes for values in taken.stats.values()) / POOL,
                "tiles": taken.pooled.nbytes + taken.pooled_extreme.nbytes,
            }

        self.kept("sizes", measured)


def main() -> None:
    """Make what is missing, then the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page from what is there")
    parser.add_argument("--lengths", type=int, nargs="+", choices=tuple(ROUNDS), default=tuple(ROUNDS), metavar="N")
    arguments = parser.parse_args()
    if not arguments.page:
        share_cores()
        measure(Run(RUNS, MODEL, ADAPTER), arguments.lengths)
    write_page(RUNS, ROOT / "docs")


def measure(run: Run, lengths: list[int]) -> None:
    """Every step that is missing."""
    from benchmarks.browser_bytes import browser_bytes
    from dexviz.benchmark import machine

    run.kept("machine", lambda: machine(run.pair))
    for count in lengths:
        run.length(count, ROUNDS[count])
    run.sizes()
    run.dex()
    for count in BROWSER:
        if count <= max(lengths):
            run.kept(f"browser-{count}", lambda count=count: browser_bytes(run.pair, count))


def installed_peer(folder: Path) -> tuple[Path, str | None]:
    """(the Python of the peer's environment, why it could not be installed or None). Installed once."""
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(PEER_PACKAGES)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python, None
    print(f"installing {PEER} into {folder} …", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEER_PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return python, f"{PEER} could not be installed: {(done.stderr.strip().splitlines() or ['pip failed'])[-1][:200]}"
    stamp.write_text(wanted, encoding="utf-8")
    return python, None


def code_digest(root: Path) -> str:
    """Names the code that is measured: the engine, its kernels and this benchmark."""
    files = {path for name in _ENGINE for path in (root / "dexviz").glob(f"{name}.py")}
    files |= {path for path in (root / "dexviz" / "kernels").rglob("*") if path.suffix in (".py", ".cpp", ".c", ".h")}
    files.add(root / "benchmarks" / "peer.py")
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _note(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{stage}: round {done}/{total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
