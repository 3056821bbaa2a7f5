"""What a model turns out to be when it runs: the load-time self-check of a model routed through the seam.

One probe forward over a dozen tokens proves that every layer calls the seam once (DIFF: twice, on the same Q and K), that
row sums are 1 (less the sink's share), that nothing lies above the diagonal, that head counts agree with the configuration,
and that the logits are the stock implementation's. It also finds the output projection that takes O as it is, by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dexviz import attention, projection
from dexviz.attention import AttentionCall
from dexviz.errors import ModelError

_PROBE_TOKENS = 13
_LOGIT_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_COARSE_TOLERANCE = 8e-2
"""Half-precision models: largest logit deviation as a share of the largest logit."""


@dataclass(frozen=True)
class Layout:
    """Shape of a model's attention, as observed."""

    layers: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    modules: Mapping[int, nn.Module]
    """Layer → attention module, of the layers that have softmax attention; hybrids have others in between."""
    differential: bool
    """True for a DIFF Transformer, whose layers call attention twice on the same Q and K."""
    projections: Mapping[int, projection.Projection]
    """Layer → output projection, where it takes O as it is; a layer with a norm or gate in between is missing."""
    checks: Mapping[str, float]
    """Largest deviations that the probe measured."""

    @property
    def direct(self) -> bool:
        """True where W_O directly follows attention in every layer, so that merging and residual space are exact."""
        return not self.differential and set(self.projections) == set(self.modules)


@torch.no_grad()
def check(model: PreTrainedModel) -> Layout:
    """Adopt the model into the seam and prove that captures of it can be trusted.

    Raises:
        ModelError: the model does not dispatch through the seam, or a check failed; says which and by how much.
    """
    attention.adopt(model)
    ids = _probe_ids(model)
    calls: list[AttentionCall] = []
    inputs: dict[nn.Module, Tensor] = {}
    with _eval_mode(model), _projection_inputs(model, inputs), attention.active(None, calls.append):
        logits = model(ids, use_cache=False).logits
    if not calls:
        raise attention.unsupported(model)
    first, differential = _by_layer(model, calls)
    checks = _deviations(model, list(first.values()))
    with _eval_mode(model):
        checks["logits"] = _logit_deviation(model, ids, logits)
    call = next(iter(first.values()))
    config = model.config.get_text_config()
    return Layout(
        layers=max(int(config.num_hidden_layers), max(first) + 1),
        heads=call.inputs.heads,
        kv_heads=call.inputs.k_BGMD.shape[1],
        key_width=call.inputs.q_BHND.shape[-1],
        value_width=call.inputs.v_BGME.shape[-1],
        modules={layer: first[layer].module for layer in sorted(first)},
        differential=differential,
        projections={} if differential else _direct_projections(first, inputs),
        checks=checks,
    )


def _probe_ids(model: PreTrainedModel) -> Tensor:
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, _PROBE_TOKENS), generator=generator).to(model.device)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _projection_inputs(model: nn.Module, inputs: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Note what every Linear and Conv1D below an attention module is fed with."""

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[module] = args[0]

    owners = [m for m in model.modules() if hasattr(m, "layer_idx")]
    targets = {child for owner in owners for child in owner.modules() if projection.is_projection(child)}
    handles = [child.register_forward_pre_hook(note) for child in targets]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_layer(model: PreTrainedModel, calls: list[AttentionCall]) -> tuple[dict[int, AttentionCall], bool]:
    """First call of each layer, and whether layers call twice on the same Q and K (DIFF)."""
    first: dict[int, AttentionCall] = {}
    seen: dict[int, int] = {}
    for call in calls:
        earlier = first.setdefault(call.layer, call)
        seen[call.layer] = seen.get(call.layer, 0) + 1
        if not (
            torch.equal(earlier.inputs.q_BHND, call.inputs.q_BHND) and torch.equal(earlier.inputs.k_BGMD, call.inputs.k_BGMD)
        ):
            raise _failed(model, "one attention map a layer and head", f"several different ones in layer {call.layer}")
    if len(set(seen.values())) != 1 or max(seen.values()) > 2:
        raise _failed(model, "the same number of attention calls in every layer, one or two", str(sorted(seen.values())))
    shapes = {(c.inputs.heads, c.inputs.v_BGME.shape[-1]) for c in first.values()}
    if len(shapes) != 1:
        raise _failed(model, "the same heads and value width in every layer", str(sorted(shapes)))
    return first, max(seen.values()) == 2


def _deviations(model: PreTrainedModel, calls: list[AttentionCall]) -> dict[str, float]:
    rows, above = 0.0, 0.0
    for call in calls:
        a_BHNM = call.probabilities()
        total = a_BHNM.sum(dim=-1)
        excess = total - 1 if call.inputs.sinks_H is None else (total - 1).clamp(min=0)
        rows = max(rows, float(excess.abs().max()))
        above = max(above, float(a_BHNM.triu(diagonal=1).abs().max()))
    if not rows <= 1e-3:
        raise _failed(model, "rows of every attention map to sum to 1", f"a deviation of {rows:.2g}")
    if above > 0:
        raise _failed(model, "causal attention, nothing above the diagonal", f"a weight of {above:.2g} there")
    declared = getattr(model.config.get_text_config(), "num_attention_heads", None)
    heads = calls[0].inputs.heads
    if isinstance(declared, int) and declared != heads:
        raise _failed(model, f"{declared} query heads, as the configuration says", f"{heads}")
    return {"row_sum": rows, "above_diagonal": above}


def _logit_deviation(model: PreTrainedModel, ids: Tensor, logits: Tensor) -> float:
    """Largest deviation from the stock eager implementation, as a share of the largest logit."""
    model.set_attn_implementation("eager")
    try:
        stock = model(ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(attention.NAME)
    deviation = float((logits - stock).abs().max() / stock.abs().max().clamp(min=1e-6))
    if not deviation <= _LOGIT_TOLERANCE.get(logits.dtype, _COARSE_TOLERANCE):
        raise _failed(model, "the logits of the stock implementation", f"a relative deviation of {deviation:.2g}")
    return deviation


def _direct_projections(
    first: Mapping[int, AttentionCall], inputs: Mapping[nn.Module, Tensor]
) -> dict[int, projection.Projection]:
    found: dict[int, projection.Projection] = {}
    for layer, call in first.items():
        flat = call.o_BHNE.transpose(1, 2).flatten(2)
        for module in call.module.modules():
            fed = inputs.get(module)
            if fed is not None and fed.numel() == flat.numel() and torch.equal(fed.reshape(flat.shape), flat):
                assert isinstance(module, projection.Projection)
                found[layer] = module
    return found


def _failed(model: PreTrainedModel, expected: str, got: str) -> ModelError:
    return ModelError(
        expected,
        f"{got} in {model.config.model_type}",
        "dexviz would show wrong maps of this model, so it refuses it; choose another.",
    )
