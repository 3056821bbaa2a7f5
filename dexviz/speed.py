"""How fast the base, the unmerged variant and the merged variant read a prompt, measured in turns on the same tokens.

Rounds are paired: each times every model once, in an order drawn anew, and ratios are medians over rounds. (An order that only
rotates would always put the same model after the same other one, whose freed memory and caches it would meet.)
The merged variant is the base's own model called with merged output projections: nothing is written or copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from dexviz.errors import AdapterError
from dexviz.merging import merged_projections
from dexviz.models import ModelPair

TOKENS = 512
ROUNDS = 7
_WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """One model's forward pass over all rounds."""

    median: float
    """Seconds."""
    fastest: float
    """Seconds."""
    ratio: float
    """Median over rounds of its time divided by the base's in the same round."""


@dataclass(frozen=True)
class Speed:
    """Forward passes without a cache on one prompt; None where there is nothing to measure."""

    tokens: int
    rounds: int
    threads: int
    base: Timing
    variant: Timing | None
    merged: Timing | None
    reason: str | None
    """Why there is no merged model to measure."""


@torch.inference_mode()
def measure_speed(
    pair: ModelPair,
    *,
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Speed:
    """Time base, variant and merged variant on `tokens` random ids, or as many as the contexts hold."""
    tokens = min(tokens, pair.base.loaded.max_tokens, pair.variant.loaded.max_tokens)
    vocabulary = int(pair.base.model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
    calls, reason = _calls(pair, ids)
    timings = in_turns(calls, pair.base.model.device, rounds, warm_up=_WARM_UP, progress=progress)
    threads = torch.get_num_threads()
    return Speed(tokens, rounds, threads, timings["base"], timings.get("variant"), timings.get("merged"), reason)


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    *,
    warm_up: int,
    at_most: Mapping[str, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time every call once a round, in an order drawn anew; ratios are to the first call in the same round.

    Args:
        warm_up: rounds before the first that counts.
        at_most: rounds after which a slow call is left out.
    """
    names = list(calls)
    limit = np.array([(at_most or {}).get(name, rounds) for name in names])
    seconds = np.full((rounds, len(names)), np.nan)
    order = np.random.default_rng(0)
    for turn in range(-warm_up, rounds):
        for i in order.permutation(len(names)):
            if turn < limit[i]:
                elapsed = _timed(calls[names[i]], device)
                if turn >= 0:
                    seconds[turn, i] = elapsed
        if progress is not None:
            progress(turn + warm_up + 1, rounds + warm_up)
    return {
        name: Timing(
            float(np.nanmedian(seconds[:, i])),
            float(np.nanmin(seconds[:, i])),
            float(np.nanmedian(seconds[:, i] / seconds[:, 0])),
        )
        for i, name in enumerate(names)
    }


def _calls(pair: ModelPair, ids: torch.Tensor) -> tuple[dict[str, Callable[[], Any]], str | None]:
    """What to time, the base first, and why the merged model is missing if it is."""

    def forward(view: Any) -> Callable[[], Any]:
        own = ids.to(view.model.device)

        def call() -> Any:
            with view.active():
                return view.model(own, use_cache=False).logits

        return call

    calls = {"base": forward(pair.base)}
    if pair.variant.adapter is None:
        if pair.variant.loaded is pair.base.loaded:
            return calls, "There is no variant."
        return {**calls, "variant": forward(pair.variant)}, "The variant is a model of its own; there is nothing to merge."
    calls["variant"] = forward(pair.variant)
    try:
        weights = merged_projections(pair.variant)
    except AdapterError as error:
        return calls, str(error)
    own = ids.to(pair.base.model.device)

    def merged() -> Any:
        with pair.base.active():
            return functional_call(pair.base.model, weights, (own,), {"use_cache": False}).logits

    return {**calls, "merged": merged}, None


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, with the work that it left to the device."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
