"""TransformerLens on the same model, tokens and numbers, in an environment of its own: `benchmarks.performance` runs this file.

Standard input is JSON: `folder` (the model), `ids`, `pool`, `rounds` (0: one call after a warm-up on a few tokens, for its
peak memory), `threads`. The last line printed is JSON: `timing` (as `dexviz.speed.Timing`, the ratio to a stock SDPA forward in
the same rounds) or `peak` (as `dexviz.benchmark.Peak`), and `versions`. Attention patterns and head outputs are cached, nothing
else.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from dexviz import peak_memory
from dexviz.dense_statistics import layer_numbers

_WARM_UP = 16
_LAST_ONLY = {"use_cache": False, "logits_to_keep": 1}
_WANTED = ("hook_pattern", "hook_z")


def main() -> None:
    """Answer what standard input asks."""
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    ids = torch.tensor(asked["ids"])[None]
    bridge = TransformerBridge.boot_transformers(asked["folder"], dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        answer = {"timing": timing(bridge, ids, asked)} if asked["rounds"] else {"peak": peak(bridge, ids, asked["pool"])}
    versions = {name: version(name) for name in ("transformer-lens", "transformers", "torch", "numpy")}
    print(json.dumps({**answer, "versions": versions}))


def capture(bridge: Any, ids: torch.Tensor, pool: int) -> list[Any]:
    """Cache all attention patterns and head outputs, then compute each layer's numbers and drop its cache."""
    _, cache = bridge.run_with_cache(
        ids, return_cache_object=False, names_filter=lambda name: name.endswith(_WANTED), **_LAST_ONLY
    )
    numbers = []
    for layer in range(bridge.cfg.n_layers):
        a_HNN, z_NHE = (cache.pop(f"blocks.{layer}.attn.{name}")[0] for name in _WANTED)
        numbers.append(layer_numbers(a_HNN.numpy(), z_NHE.transpose(0, 1).numpy(), pool=min(pool, ids.shape[1])))
    return numbers


def timing(bridge: Any, ids: torch.Tensor, asked: dict[str, Any]) -> dict[str, float]:
    """Rounds of a stock SDPA forward and of the capture, in turns, after one round that does not count."""
    stock = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32, attn_implementation="sdpa").eval()
    calls = [lambda: stock(ids, **_LAST_ONLY), lambda: capture(bridge, ids, asked["pool"])]
    rounds = []
    for turn in range(-1, asked["rounds"]):
        seconds = {}
        for i in (0, 1) if turn % 2 else (1, 0):
            seconds[i] = _timed(calls[i])
        if turn >= 0:
            rounds.append(seconds)
    own = [seconds[1] for seconds in rounds]
    ratio = statistics.median(seconds[1] / seconds[0] for seconds in rounds)
    return {"median": statistics.median(own), "fastest": min(own), "ratio": ratio}


def peak(bridge: Any, ids: torch.Tensor, pool: int) -> dict[str, float]:
    """One call above what the process holds after a warm-up."""
    capture(bridge, ids[:, :_WARM_UP], pool)
    held = peak_memory.settle()
    seconds = _timed(lambda: capture(bridge, ids, pool))
    return {"extra_bytes": peak_memory.extra(held), "held_bytes": held, "seconds": seconds}


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
