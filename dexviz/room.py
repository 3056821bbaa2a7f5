"""Whether there is room for a capture or a map of a loaded view, before it is started."""

from __future__ import annotations

import inspect

import torch

from dexviz.budget import Estimate, ModelSize, estimated, free_memory
from dexviz.errors import BudgetError, PromptError
from dexviz.models import View
from dexviz.records import CaptureRequest, Tokens

_BYTES_PER_ENTRY = 8


def estimate(view: View, tokens: Tokens | int, request: CaptureRequest | None = None, *, keep_bytes: int = 0) -> Estimate:
    """Time and memory that `dexviz.capture` of so many tokens would take, and the memory that is free. Runs nothing.

    Args:
        tokens: the prompt, or its length.
        keep_bytes: bytes up to which Q, K and V stay after it.

    Raises:
        PromptError: no tokens.
    """
    count = tokens if isinstance(tokens, int) else len(tokens)
    if count < 1:
        raise PromptError("at least one token", str(count), "Enter a prompt.")
    return estimated(size_of(view), count, request, keep=keep_bytes, available=_free(view.model.device))


def size_of(view: View) -> ModelSize:
    """What the cost of a capture follows from."""
    layout, model, config = view.layout, view.model, view.model.config.get_text_config()
    hidden = int(getattr(config, "hidden_size", layout.heads * layout.value_width))
    shortened = "logits_to_keep" in inspect.signature(model.forward).parameters
    return ModelSize(
        layers=len(layout.modules),
        heads=layout.heads,
        kv_heads=layout.kv_heads,
        key_width=layout.key_width,
        value_width=layout.value_width,
        hidden=hidden,
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        logits=0 if shortened else int(config.vocab_size),
        context=view.loaded.max_tokens,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
    )


def check_room(entries: int) -> None:
    """Refuse exact maps, S and A in float32, that take more than half of the free memory.

    Raises:
        BudgetError: with what is needed and what is there.
    """
    needed, free = entries * _BYTES_PER_ENTRY, free_memory()
    if free is not None and needed > free // 2:
        raise BudgetError(
            f"exact maps of at most {free // 2 / 1e9:.1f} GB, half of the free memory",
            f"{needed / 1e9:.1f} GB",
            "Ask for fewer maps, a window, or tiles (pool).",
        )


def _free(device: torch.device) -> int | None:
    """Bytes that can still be taken on the device: what torch holds there without using it can be."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
