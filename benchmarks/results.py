"""The runs behind docs/results.md: DEX, full DEX and the controls on the default model, three seeds each.

    python -m benchmarks.results            # whatever is missing, then the page
    python -m benchmarks.results --page     # the page from what is there

Every run is kept in build/results and never made twice; a stopped one goes on from its last checkpoint. Several processes may
work at once: each takes the next run that nobody else is at.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.results_page import KL_EVERY, METHODS, SEEDS, write_page
from dexviz.engine import share_cores
from dexviz.heldout import block_losses, held_out_blocks, held_out_pieces, measure
from dexviz.models import LoadedModel, View, load_model, make_pair
from dexviz.needles import Needle, NeedleMaker
from dexviz.questions import score
from dexviz.train_config import TrainConfig
from dexviz.training import train

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "build" / "results"
MODEL = "smollm2-135m"
LENGTHS, DEPTHS, PER_CELL = (256, 512), (0.1, 0.3, 0.5, 0.7, 0.9), 4


def config(name: str, seed: int) -> TrainConfig:
    """What all runs share, and what the method adds."""
    return TrainConfig(**METHODS[name], steps=100, block=256, batch=4, precision="bf16", evaluate_every=0, seed=seed)


def main() -> None:
    """Make the missing runs, then the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="only write the page from the runs that are there")
    parser.add_argument("--threads", type=int, help="threads of this process; two processes of one thread beat one of two")
    arguments = parser.parse_args()
    if not arguments.page:
        share_cores()
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        _runs()
    write_page(RUNS, ROOT)


def _runs() -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    loaded = load_model(MODEL)
    needles = NeedleMaker(loaded.tokenizer, loaded.max_tokens).grid(LENGTHS, DEPTHS, PER_CELL, 0)
    with _claim("base") as mine:
        if mine:
            view = View("base", loaded, title=loaded.name)
            _measure(loaded, None, needles, RUNS / "base.json", {}, block_losses(view, held_out_blocks(view)))
    base = _awaited(RUNS / "base.json")
    before = np.array(base["loss"])
    for seed in SEEDS:
        for name in METHODS:
            with _claim(f"{name}-{seed}") as mine:
                if mine:
                    _run(loaded, name, seed, needles, before)
                    write_page(RUNS, ROOT)


def _run(loaded: LoadedModel, name: str, seed: int, needles: list[Needle], before: np.ndarray) -> None:
    folder, start = RUNS / f"{name}-{seed}", time.perf_counter()
    settings = config(name, seed)
    print(f"{name}, seed {seed}: training", flush=True)
    result = train(loaded, folder, settings, base_losses=before, on_step=_note)
    seconds = time.perf_counter() - start
    about = {"parameters": result.parameters, "seconds": seconds, "lambda": result.lambdas, "config": asdict(settings)}
    _measure(loaded, str(folder), needles, RUNS / f"{name}-{seed}.json", about, result.block_losses)
    print(f"{name}, seed {seed}: {100 * result.change:+.2f} % in {seconds:.0f} s", flush=True)


def _note(line: dict) -> None:
    if line["step"] % 20 == 0:
        print(f"step {line['step']}: loss {line['loss']:.4f}", flush=True)


def _measure(
    loaded: LoadedModel, adapter: str | None, needles: list[Needle], path: Path, about: dict, losses: np.ndarray
) -> None:
    """Keep the losses of every held-out block, KL of every third, and log-likelihoods of every needle's candidates."""
    base = View("base", loaded, title=loaded.name)
    view = make_pair(loaded, adapter=adapter).variant if adapter else base
    pieces = held_out_pieces(base)
    third = replace(pieces, ids=pieces.ids[::KL_EVERY], document=pieces.document[::KL_EVERY])
    found = {
        **about,
        "tokens": [len(ids) - 1 for ids in pieces.ids],
        "loss": losses.tolist(),
        "kl": measure(base, view, third).kl.tolist() if adapter else None,
        "needles": [{"length": n.length, "depth": n.depth} for n in needles],
        "candidates": np.asarray(score(view, needles)).tolist(),
    }
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(found), encoding="utf-8")
    beside.rename(path)


@contextmanager
def _claim(name: str) -> Iterator[bool]:
    """Whether this process is to make a run: it is missing, and no living process is at it."""
    lock = RUNS / f"{name}.lock"
    if (RUNS / f"{name}.json").is_file() or (lock.is_file() and Path(f"/proc/{lock.read_text() or 0}").exists()):
        yield False
        return
    lock.unlink(missing_ok=True)
    try:
        with lock.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)


def _awaited(path: Path) -> dict:
    """What another process is measuring."""
    while not path.is_file():
        time.sleep(5)
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
