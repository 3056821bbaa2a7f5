"""λ of DIFF V2 depends on the tokens: the module that makes it tells whoever records the pass.

The hook stays on the model and reads the context (`dexviz.context`): a pass that nobody records does nothing in it, and two
passes at once do not see each other.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from dexviz import diff
from dexviz.context import active_recorder

_WATCHED = "_dexviz_gate"


@runtime_checkable
class Gated(Protocol):
    """A recorder that wants λ of DIFF V2."""

    def gate(self, layer: int, gate_BNP: Tensor) -> None:
        """What a layer's `lambda_proj` put out, before the sigmoid."""


def watch_gates(model: nn.Module) -> None:
    """Let the λ projections of a DIFF V2 model tell the active recorder what they put out. Idempotent."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and not diff.missing(module, tokenwise=True):
            gate = diff.gate_of(module)
            if not gate.__dict__.get(_WATCHED):
                gate.register_forward_hook(partial(_tell, int(cast(int, module.layer_idx))))
                gate.__dict__[_WATCHED] = True


def _tell(layer: int, gate: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    recorder: Any = active_recorder()
    if isinstance(recorder, Gated):
        recorder.gate(layer, output)
