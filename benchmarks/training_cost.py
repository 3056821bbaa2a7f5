"""What training costs: throughput of `full` against `attention-only` and `adapter`, in turns, and peak memory of the command.

python -m benchmarks.training_cost
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from dexviz import attention
from dexviz.engine import share_cores
from dexviz.models import View, load_model, make_pair
from dexviz.train_config import TrainConfig
from dexviz.trainee import Trainee, optimizer
from dexviz.training import new_adapter, training_blocks

MODEL = "smollm2-135m"
ROUNDS = 9
KINDS = {
    "attention-only": TrainConfig(method="attention-only", calibration_blocks=1, steps=ROUNDS),
    "full": TrainConfig(mode="full", calibration_blocks=1, steps=ROUNDS),
    "adapter": TrainConfig(calibration_blocks=1, steps=ROUNDS),
}


def main() -> None:
    """Print seconds a step, their ratios to attention-only, and the peak memory of `train` in each mode, as JSON."""
    share_cores()
    print(json.dumps({"seconds_a_step": throughput(), "peak_gib": {kind: peak_memory(kind) for kind in KINDS}}, indent=1))


def throughput() -> dict[str, dict[str, float]]:
    """Whole optimiser steps on one model, the kinds in turns: median seconds, and median ratio to attention-only."""
    loaded = load_model(MODEL)
    base = View("base", loaded, title=loaded.name)
    seconds = np.zeros((ROUNDS, len(KINDS)))
    steps = []
    for config in KINDS.values():
        blocks = training_blocks(loaded, config)
        adapter = new_adapter(base, blocks, config)
        trainee = Trainee(make_pair(loaded, adapter=adapter).variant, adapter)
        steps.append((trainee, optimizer(trainee, config), torch.from_numpy(blocks.training[: config.batch])))
    for turn in range(-1, ROUNDS):
        for i in np.roll(np.arange(len(KINDS)), turn):
            trainee, descent, ids = steps[i]
            attention.attach(loaded.model, trainee.adapter)
            trainee.set_step(turn + 2)
            start = time.perf_counter()
            trainee(ids)["loss"].backward()
            descent.step()
            descent.zero_grad()
            if turn >= 0:
                seconds[turn, i] = time.perf_counter() - start
    return {
        kind: {"median": float(np.median(seconds[:, i])), "ratio": float(np.median(seconds[:, i] / seconds[:, 0]))}
        for i, kind in enumerate(KINDS)
    }


def peak_memory(kind: str) -> float:
    """Peak resident memory of `python -m dexviz train` over three steps, GiB."""
    options = {"attention-only": ["--method", "attention-only"], "full": ["--mode", "full"], "adapter": []}[kind]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, "-m", "dexviz", "train", "--out", str(Path(folder) / "out"), "--steps", "3", *options]
        process = subprocess.Popen([*command, "--evaluate-every", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, f"train {kind} failed"
    return usage.ru_maxrss / (1 << 20)


if __name__ == "__main__":
    main()
