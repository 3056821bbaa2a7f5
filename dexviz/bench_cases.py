"""What `dexviz bench` sets side by side on one prompt: plain forward passes, captures, one more map, and dense maps with numpy.

Every pass leaves out the logits of all positions but the last, as a capture does. Stock models are built by transformers alone
and share the weights with the pair's base; they never met our attention function.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from dexviz.corpora import held_out_text
from dexviz.dense_statistics import layer_numbers
from dexviz.errors import PromptError
from dexviz.headmaps import head_map
from dexviz.models import ModelPair, View
from dexviz.recorder import capture
from dexviz.records import CaptureRequest, Tokens
from dexviz.scores import LayerRecord
from dexviz.tokens import label_ids

TITLES = {
    "sdpa": "SDPA forward, stock model",
    "seam": "forward through our attention function",
    "base": "capture of the base",
    "variant": "capture of the variant",
    "map": "another head's full map",
    "dense": "output_attentions=True, numpy",
}
"""Name of a case → what it is; the first is what the others are held against."""
POOL = 128
_DENSE_SHARE = 0.7
"""Largest share of this machine's memory that dense maps may take."""


class Cases:
    """The calls that are measured on one pair and one prompt."""

    def __init__(self, pair: ModelPair, tokens: Tokens) -> None:
        self.pair, self.tokens = pair, tokens
        self.ids = torch.from_numpy(tokens.ids)[None].to(pair.base.model.device)
        self.request = CaptureRequest(pool=POOL, similarity=True)
        self.records: list[LayerRecord] = []

    def call(self, name: str) -> Callable[[], Any]:
        """The work of a case, ready to be called; what it needs from the model is made here, not in the call."""
        if name == "map" and not self.records:
            self._capture(self.pair.variant)
        if name == "sdpa":
            return self._forward(stock_model(self.pair.base.model, "sdpa"))
        if name == "seam":
            return self._forward(self.pair.base.model, self.pair.base)
        if name == "dense":
            return self._dense_call()
        return {"base": self._capture_base, "variant": self._capture_variant, "map": self._map}[name]

    def left_out(self, name: str) -> str | None:
        """Why a case is not measured here; None where it is."""
        layout, n = self.pair.base.layout, len(self.tokens)
        if name == "variant" and self.pair.variant.adapter is None and self.pair.variant.loaded is self.pair.base.loaded:
            return "There is no variant."
        if name == "sdpa" and not self.pair.base.model._supports_sdpa:
            return "This family has no SDPA implementation."
        if name == "dense":
            if set(layout.projections) != set(layout.modules):
                return "Head outputs cannot be read before the output projection of this family."
            return self._too_dense(layout.layers * layout.heads * n * n * 4)
        return None

    def _too_dense(self, needed: int) -> str | None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.ids.device.type == "cpu" and needed > _DENSE_SHARE * memory:
            return f"The maps alone take {needed / 1e9:.1f} GB of the {memory / 1e9:.1f} GB of this machine."
        return None

    def _forward(self, model: PreTrainedModel, view: View | None = None) -> Callable[[], Any]:
        options = _last_only(model)

        def plain() -> Any:
            return model(self.ids, use_cache=False, **options).logits

        def viewed() -> Any:
            assert view is not None
            with view.active():
                return plain()

        return plain if view is None else viewed

    def _capture(self, view: View) -> Any:
        records: list[LayerRecord] = []
        taken = capture(view, self.tokens, self.request, keep=records.append)
        self.records = records
        return taken

    def _capture_base(self) -> Any:
        return self._capture(self.pair.base)

    def _capture_variant(self) -> Any:
        return self._capture(self.pair.variant)

    def _map(self) -> Any:
        """The middle layer's first adapted head, exact."""
        record = self.records[len(self.records) // 2]
        return head_map(record, int(record.operator.heads[0]) if record.operator is not None else 0)

    def _dense_call(self) -> Callable[[], Any]:
        model = stock_model(self.pair.base.model, "eager")
        dense = DenseMaps(model, self.pair.base, POOL)
        return lambda: dense(self.ids)


class DenseMaps:
    """`output_attentions=True` on the stock model, then the capture's numbers in numpy, layer by layer."""

    def __init__(self, model: PreTrainedModel, base: View, pool: int) -> None:
        self.model, self.pool = model, pool
        names = {id(module): name for name, module in base.model.named_modules()}
        self.projections = {
            layer: model.get_submodule(names[id(target)]) for layer, target in sorted(base.layout.projections.items())
        }
        self.heads = base.layout.heads

    def __call__(self, ids: torch.Tensor) -> list[dict[str, np.ndarray]]:
        """The numbers of each layer. Maps are dropped as soon as they are used; the model returns them all at once."""
        outputs: dict[int, torch.Tensor] = {}
        handles = [
            module.register_forward_pre_hook(lambda _, args, layer=layer: outputs.update({layer: args[0]}))
            for layer, module in self.projections.items()
        ]
        try:
            maps = list(self.model(ids, use_cache=False, output_attentions=True, **_last_only(self.model)).attentions)
        finally:
            for handle in handles:
                handle.remove()
        numbers = []
        for i, layer in enumerate(self.projections):
            a_HNN, maps[i] = maps[i][0].float().cpu().numpy(), None
            o_HNE = outputs.pop(layer)[0].unflatten(-1, (self.heads, -1)).transpose(0, 1).float().cpu().numpy()
            numbers.append(layer_numbers(a_HNN, o_HNE, pool=min(self.pool, ids.shape[1])))
            del a_HNN
        return numbers


def stock_model(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """The same weights in a model that transformers builds with an attention implementation of its own.

    Raises:
        ValueError: the family has no such implementation.
    """
    config = copy.deepcopy(model.config)
    made: Any = type(model)._from_config(config, attn_implementation=implementation, dtype=model.dtype)
    made.load_state_dict(model.state_dict(), assign=True)
    return cast(PreTrainedModel, made.to(model.device).eval().requires_grad_(False))


def reading(pair: ModelPair, count: int, seed: int = 0) -> Tokens:
    """The first `count` tokens of the held-out address, from the start again where it is too short; random ids where the model
    has no tokenizer.

    Raises:
        PromptError: more tokens than the models read.
    """
    limit = min(pair.base.loaded.max_tokens, pair.variant.loaded.max_tokens)
    if not 2 <= count <= limit:
        raise PromptError(f"2 to {limit:,} tokens", f"{count:,}", "Change --lengths.")
    tokenizer = pair.base.loaded.tokenizer
    if tokenizer is None:
        vocabulary = int(pair.base.model.config.get_text_config().vocab_size)
        ids = np.random.default_rng(seed).integers(0, vocabulary, count)
        labels = tuple(map(str, ids.tolist()))
    else:
        text = tokenizer(held_out_text(), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        ids = np.resize(np.asarray(text, dtype=np.int64), count)
        labels = label_ids(tokenizer, ids.tolist())
    return Tokens(ids.astype(np.int64), labels, "", np.zeros((count, 2), np.int64), np.zeros(count, bool))


def _last_only(model: PreTrainedModel) -> dict[str, int]:
    """Keeps the model from computing logits at every position, where it can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
