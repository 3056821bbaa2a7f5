"""From attention calls of a pass to layer records: one call a layer, or as many as a convention of DIFF Transformers has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dexviz import diff
from dexviz.attention import AttentionCall
from dexviz.dex import DexOperator
from dexviz.kernels.softmax import AttentionInputs
from dexviz.models import View
from dexviz.scores import LayerRecord


@dataclass(frozen=True)
class SeenLayer:
    """A layer whose calls are all there."""

    record: LayerRecord
    call: AttentionCall
    """The last one."""
    o_HNE: Tensor
    """Attention output before DEX: A_h V, in DIFF A_h [V₁; V₂], of every softmax head."""


def record_of(
    view: View,
    module: nn.Module,
    layer: int,
    inputs: AttentionInputs,
    operator: DexOperator | None = None,
    lam: float | Tensor = 0.0,
) -> LayerRecord:
    """The record of one layer of the view's pass."""
    layout, adapter = view.layout, view.adapter
    deltas = adapter.deltas if adapter is not None else None
    return LayerRecord(layer, module, inputs, operator, layout.projections.get(layer), layout.differential, deltas, lam)


class LayerCalls:
    """A recorder that gathers what belongs to one layer and hands it on: calls, and λ where the layer makes it from tokens."""

    def __init__(self, view: View, seen: Callable[[SeenLayer], None]) -> None:
        self.view, self.seen = view, seen
        self._waiting: list[AttentionCall] = []
        self._gates: dict[int, Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether every call has been handed on."""
        return not self._waiting

    def __call__(self, call: AttentionCall) -> None:
        """See `dexviz.attention.Recorder`."""
        if self.view.layout.differential is None:
            record = record_of(self.view, call.module, call.layer, call.inputs, call.operator)
            self.seen(SeenLayer(record, call, call.o_BHNE[0]))
            return
        self._waiting.append(call)
        self._hand_on(call.layer)

    def gate(self, layer: int, gate_BNP: Tensor) -> None:
        """See `dexviz.gates.Gated`: λ of DIFF V2, before or after the layer's attention call."""
        self._gates[layer] = diff.token_lambda(gate_BNP)
        self._hand_on(layer)

    def _hand_on(self, layer: int) -> None:
        convention = self.view.layout.differential
        assert convention is not None
        calls = [call for call in self._waiting if call.layer == layer]
        if len(calls) < convention.calls or (convention.tokenwise and layer not in self._gates):
            return
        self._waiting.clear()
        last = calls[-1]
        lam = self._gates.pop(layer) if convention.tokenwise else diff.layer_lambda(last.module)
        inputs = diff.joined([call.inputs for call in calls])
        record = record_of(self.view, last.module, layer, inputs, lam=lam)
        self.seen(SeenLayer(record, last, torch.cat([call.o_BHNE[0] for call in calls], dim=-1)))
