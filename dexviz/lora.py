"""The LoRA control (arXiv 2106.09685) on the output projection W_O, trained through peft, with as many parameters as DEX has.

DEX has L · (E² + 1) parameters. A rank costs in + out of them in a layer, so ranks of neighbouring size are dealt out to the
layers. What was trained is kept as low-rank changes of W_O, in dexviz's own adapter format: peft is needed to train only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dexviz import deltas, projection
from dexviz.attention import attach
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import AdapterError, TrainingError
from dexviz.models import LoadedModel, View
from dexviz.trainee import Trainee

_PEFT_NAME = "dexviz"


def ranks(loaded: LoadedModel) -> dict[str, int]:
    """LoRA rank of every layer's output projection, by module name, that together cost what DEX on that model costs."""
    layout = loaded.layout
    names = {id(module): name for name, module in loaded.model.named_modules()}
    found = {names[id(module)]: projection.rows(module).shape for module in layout.projections.values()}
    if not found:
        raise AdapterError("a model whose output projections can be found", loaded.name, "Choose another model or method.")
    wanted = len(layout.modules) * (layout.value_width**2 + 1)
    total = max(len(found), round(wanted * len(found) / sum(sum(shape) for shape in found.values())))
    low, more = divmod(total, len(found))
    return {name: low + (place < more) for place, name in enumerate(found)}


def control(loaded: LoadedModel) -> DexAdapter:
    """An adapter without DEX that holds low-rank changes of W_O, all zero."""
    layout = loaded.layout
    changes = deltas.for_model(loaded.model, layout, parts=("o",), ranks=ranks(loaded))
    config = DexConfig(((),) * layout.layers, layout.value_width, layout.heads)
    return DexAdapter(config, changes).requires_grad_(False)


class LoraTrainee(Trainee):
    """LoRA in training: peft's factors within the model act, the adapter receives them at the end."""

    def __init__(self, view: View, adapter: DexAdapter, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(view, adapter)
        self._layers = dict(layers)
        self.factors = nn.ParameterList([p for layer in layers.values() for p in layer.parameters() if p.requires_grad])

    def groups(self) -> Mapping[str, list[nn.Parameter]]:
        """LoRA's factors alone."""
        return {"lora": list(self.factors)}

    @torch.no_grad()
    def finish(self) -> None:
        """Hand the factors over to the adapter: ΔW = scale · B A."""
        changes = self.adapter.deltas
        assert changes is not None
        for name, layer in self._layers.items():
            a, b, scale = (getattr(layer, part)[_PEFT_NAME] for part in ("lora_A", "lora_B", "scaling"))
            changes.set_low_rank(name, a.weight.float(), scale * b.weight.float())
        self.adapter.eval().requires_grad_(False)


@contextmanager
def injected(loaded: LoadedModel) -> Iterator[dict[str, nn.Module]]:
    """Put peft's LoRA layers in place of the output projections, and the projections back at the end.

    Raises:
        TrainingError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        todo = "Install it: pip install 'dexviz[lora]'."
        raise TrainingError("the package peft, which trains LoRA", "none", todo) from error
    wanted = ranks(loaded)
    originals = {name: loaded.model.get_submodule(name) for name in wanted}
    attach(loaded.model, None)  # an adapter that was trained before would act while LoRA is trained
    settings = peft.LoraConfig(
        r=min(wanted.values()),
        lora_alpha=min(wanted.values()),
        rank_pattern=dict(wanted),
        alpha_pattern=dict(wanted),
        target_modules=list(wanted),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=all(isinstance(module, Conv1D) for module in originals.values()),
    )
    trainable = {name: p.requires_grad for name, p in loaded.model.named_parameters()}
    try:
        peft.inject_adapter_in_model(settings, loaded.model, adapter_name=_PEFT_NAME)
        layers = {name: loaded.model.get_submodule(name) for name in wanted}
        for layer in layers.values():
            for p in layer.parameters():
                if p.requires_grad:
                    p.data = p.data.float()  # peft takes the base's type, in which small steps would be lost
        yield layers
    finally:
        for name, module in originals.items():
            loaded.model.set_submodule(name, module)
        for name, p in loaded.model.named_parameters():
            p.requires_grad_(trainable[name])
        loaded.model.__dict__.pop("peft_config", None)
