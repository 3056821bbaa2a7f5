"""One case of `dexviz bench` in a process of its own, for its peak memory: `python -m dexviz.bench_process JSON`.

The JSON names the case, the tokens, how to load the pair, the seed and the threads; the last line printed is a `Peak` as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from dexviz import peak_memory
from dexviz.bench_cases import Cases, reading
from dexviz.errors import DexvizError
from dexviz.models import ModelPair, load_pair

_WARM_UP = 16


def main() -> int:
    """Load, warm up on a few tokens, run the case once, and print what it took."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    try:
        taken = measured(load_pair(**asked["source"]), asked["name"], asked["tokens"], asked["seed"])
    except (DexvizError, torch.OutOfMemoryError, MemoryError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(taken) + "\n")
    return 0


@torch.inference_mode()
def measured(pair: ModelPair, name: str, tokens: int, seed: int) -> dict[str, Any]:
    """The fields of a `Peak`."""
    Cases(pair, reading(pair, min(_WARM_UP, tokens), seed)).call(name)()
    call = Cases(pair, reading(pair, tokens, seed)).call(name)
    cuda = pair.base.model.device.type == "cuda"
    held = _settle_cuda() if cuda else peak_memory.settle()
    start = time.perf_counter()
    kept = call()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    extra = torch.cuda.max_memory_allocated() - held if cuda else peak_memory.extra(held)
    del kept
    return {"extra_bytes": extra, "held_bytes": held, "seconds": seconds}


def _settle_cuda() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    sys.exit(main())
