"""Merging an adapter into a plain checkpoint that any runtime loads.

Changed projections are summed up, W ← W + ΔW. DEX is exact where W_O directly follows attention: with row vectors, then
W_O,h ← (I − λ W_D) W_O,h for selected heads (README, "What is computed"). The checkpoint is proven on a probe batch before it
is renamed into place.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dexviz import projection
from dexviz.adapter import new_folder
from dexviz.context import effective_weight
from dexviz.delta_weights import plain
from dexviz.dex import DexOperator
from dexviz.errors import AdapterError
from dexviz.models import View, load_model

_MERGE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_COARSE_MERGE_TOLERANCE = 5e-2
"""Half-precision models: largest logit deviation as a share of the largest logit."""
_PROBE_TOKENS = 33
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")
"""Settings of text generation that have no effect, and cannot be saved, without do_sample=True or with a single beam."""


@torch.no_grad()
def merged_projections(view: View) -> dict[str, Tensor]:
    """Parameter name → merged weight, in the base's layout and type: W_O where DEX acts, and every changed projection.

    Raises:
        AdapterError: there is no adapter, or DEX acts where something lies between attention and W_O.
    """
    adapter, layout = view.adapter, view.layout
    if adapter is None:
        raise AdapterError("a view with an adapter", f"the {view.name} view without one", "Load the pair with an adapter.")
    names = {id(parameter): name for name, parameter in view.model.named_parameters()}
    merged: dict[str, Tensor] = {}

    def place(target: projection.Projection, weight: Tensor) -> None:
        merged[names[id(target.weight)]] = weight.to(target.weight.dtype).contiguous()

    for name in adapter.deltas.entries if adapter.deltas is not None else ():
        changed = plain(name, view.model.get_submodule(name))
        place(changed, effective_weight(adapter, changed, torch.float64))
    for layer in range(len(adapter.config.heads)):
        operator = adapter.operator(layer)
        if operator is None:
            continue
        target = layout.projections.get(layer)
        if target is None:
            raise AdapterError(
                "a model whose output projection directly follows attention",
                f"{view.loaded.name}, where a norm or gate lies in between in layer {layer}",
                "Use the adapter unmerged.",
            )
        place(target, _adapted(operator, target, effective_weight(adapter, target, torch.float64)))
    return merged


def _adapted(operator: DexOperator, target: projection.Projection, weight: Tensor) -> Tensor:
    """(I − λ W_D) W_O,h of selected heads, W_O,h of the others, in the target's layout; `weight` in float64."""
    rows, width = projection.rows(target, weight).clone(), operator.w_d.shape[0]
    keep = torch.eye(width, dtype=rows.dtype, device=rows.device) - operator.lam().double() * operator.w_d.double()
    for head in operator.heads.tolist():
        span = slice(head * width, (head + 1) * width)
        rows[span] = keep @ rows[span]
    return rows.T if isinstance(target, torch.nn.Linear) else rows


@torch.no_grad()
def merge(view: View, out: str | Path) -> Path:
    """Write the variant as a plain checkpoint that any runtime loads, and prove that its logits are the variant's.

    Raises:
        AdapterError: no exact merge exists, the folder is in use, the disk is full, transformers cannot save the model's
            configuration, or the logits differ.
    """
    weights = merged_projections(view)
    with new_folder(Path(out), replaces=None) as work:
        state = {**view.model.state_dict(), **weights}
        try:
            _savable(view.model, work).save_pretrained(work, state_dict=state)
        except ValueError as error:
            raise AdapterError(
                f"a configuration of {view.loaded.name} that transformers can save",
                str(error),
                "Correct config.json or generation_config.json of the base.",
            ) from error
        if view.loaded.tokenizer is not None:
            view.loaded.tokenizer.save_pretrained(work)
        _prove(view, work)
    return Path(out)


def _savable(model: PreTrainedModel, work: Path) -> PreTrainedModel:
    """The model, or a shallow copy without the generation settings that it does not use, where these prevent saving it."""
    if not model.can_generate():
        return model
    try:
        model.generation_config.save_pretrained(work)
    except ValueError:
        model, generation = copy.copy(model), copy.deepcopy(model.generation_config)
        unused = [*(() if generation.do_sample else _SAMPLING), *(() if (generation.num_beams or 1) > 1 else _BEAMS)]
        generation.update(**dict.fromkeys(unused))
        model.generation_config = generation
    return model


def _prove(view: View, folder: Path) -> None:
    """Compare logits of the checkpoint in `folder` with the unmerged variant's on a probe batch."""
    vocabulary = int(view.model.config.get_text_config().vocab_size)
    shape = (2, min(_PROBE_TOKENS, view.loaded.max_tokens))
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1)).to(view.model.device)
    with view.active():
        expected = view.model(ids, use_cache=False).logits
    dtype = str(view.model.dtype).removeprefix("torch.")
    merged = load_model(str(folder), device=str(view.model.device), dtype=dtype, tokenizer=view.loaded.tokenizer is not None)
    deviation = float((merged.model(ids, use_cache=False).logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not deviation <= _MERGE_TOLERANCE.get(view.model.dtype, _COARSE_MERGE_TOLERANCE):
        raise AdapterError(
            "merged logits equal to the unmerged variant's",
            f"a relative deviation of {deviation:.2g}",
            "Use the adapter unmerged.",
        )
