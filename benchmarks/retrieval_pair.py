"""The runs behind docs/retrieval.md: a Llama and a DiffLlama trained from scratch on the retrieval language, three seeds each.

    python -m benchmarks.retrieval_pair             # whatever is missing, then the page and the shipped pair
    python -m benchmarks.retrieval_pair --page      # the page and the shipped pair from what is there
    python -m benchmarks.retrieval_pair --run llama-0

One run is one process with one thread; as many work at once as there are cores (`--workers`). Runs are kept in build/retrieval
and never made twice; a stopped one goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.retrieval_measure import measure
from benchmarks.retrieval_page import SEEDS, write_page
from benchmarks.retrieval_training import CHECKPOINT, KINDS, LOG, Recipe, train
from dexviz.models import load_model

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "build" / "retrieval"
SHIPPED = ROOT / "pairs" / "retrieval"
RESULT = "measured.json"
SECONDS = "seconds.txt"
"""Seconds that a run has trained so far, over all its processes."""


def main() -> None:
    """Make the missing runs, then the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--page", action="store_true", help="only write the page, and ship the pair, from the runs that are there"
    )
    parser.add_argument("--run", choices=names(), help="make one run in this process")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once, one thread each")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run)
        return
    if not arguments.page:
        make_runs([name for name in names() if not (RUNS / name / RESULT).is_file()], max(1, arguments.workers))
    write_page(RUNS, ROOT / "docs" / "retrieval.md")
    ship()


def names() -> list[str]:
    """All runs, the two models of a seed side by side."""
    return [f"{kind}-{seed}" for seed in SEEDS for kind in KINDS]


def make_runs(waiting: list[str], workers: int) -> None:
    """Make the runs in processes of their own, so many at once; the first that fails stops the rest from starting."""
    working: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    while (waiting and not failed) or working:
        while waiting and not failed and len(working) < workers:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "benchmarks.retrieval_pair", "--run", name]
            working[name] = subprocess.Popen(command, cwd=ROOT)
        time.sleep(0.5)
        ended = [name for name, process in working.items() if process.poll() is not None]
        failed += [name for name in ended if working.pop(name).returncode]
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed; what is done is kept, and the same command goes on from there")


def run(name: str) -> None:
    """Train one model, or go on with it, and measure it."""
    torch.set_num_threads(1)
    kind, seed = name.rsplit("-", 1)
    folder, recipe = RUNS / name, Recipe()
    folder.mkdir(parents=True, exist_ok=True)
    spent = float((folder / SECONDS).read_text()) if (folder / SECONDS).is_file() and (folder / CHECKPOINT).is_file() else 0.0
    start = time.perf_counter()

    def note(line: dict) -> None:
        seconds = spent + time.perf_counter() - start
        (folder / SECONDS).write_text(f"{seconds:.1f}\n")
        share = ", ".join(f"{100 * right:.0f} % of {facts}" for facts, right in line["accuracy"].items())
        print(
            f"{name}: step {line['step']}/{recipe.steps}, loss {line['loss']:.4f}, right {share} facts, {seconds:.0f} s",
            flush=True,
        )

    train(kind, int(seed), recipe, folder, note)
    found = {
        "seconds": float((folder / SECONDS).read_text()),
        **measure(load_model(str(folder), device="cpu", dtype="float32")),
    }
    beside = folder / f"{RESULT}.new"
    beside.write_text(json.dumps(found), encoding="utf-8")
    beside.replace(folder / RESULT)
    print(f"{name}: measured", flush=True)


def ship() -> None:
    """Copy the pair of the first seed, with its logs, to where `load_pair` and the app find it."""
    for kind in KINDS:
        source, target = RUNS / f"{kind}-{SEEDS[0]}", SHIPPED / kind
        if not (source / RESULT).is_file():
            continue
        target.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.name == LOG or (path.suffix in (".json", ".safetensors") and path.name != RESULT):
                shutil.copyfile(path, target / path.name)


if __name__ == "__main__":
    main()
