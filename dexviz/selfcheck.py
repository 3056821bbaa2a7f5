"""What a model turns out to be when it runs: the load-time self-check of a model routed through the seam.

One probe forward over a dozen tokens proves that every layer to which the configuration gives softmax attention calls the
seam once (DiffLlama: twice, on the same Q and K), that row sums are 1 (less the sink's share), that nothing lies above the
diagonal, that head counts agree with the configuration, and that the logits are the stock implementation's. It also finds the
output projection that takes O as it is, by value; of a DIFF Transformer, the one that takes S V as its convention has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dexviz import attention, diff, projection
from dexviz.attention import AttentionCall
from dexviz.errors import DexvizError, ModelError
from dexviz.gates import watch_gates

_PROBE_TOKENS = 13
_WITHOUT_SOFTMAX = {"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"}
"""Kinds of layers in a configuration's `layer_types` that have no attention map."""
_LOGIT_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_COARSE_TOLERANCE = 8e-2
"""Half-precision models: largest logit deviation as a share of the largest logit."""


class _Probe:
    """Keeps all calls of a pass, and λ of DIFF V2 before the sigmoid."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.gates: dict[int, Tensor] = {}

    def __call__(self, call: AttentionCall) -> None:
        self.calls.append(call)

    def gate(self, layer: int, gate_BNP: Tensor) -> None:
        self.gates[layer] = gate_BNP


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
    differential: diff.Convention | None
    """How a DIFF Transformer pairs its heads and makes λ; None for other models."""
    projections: Mapping[int, projection.Projection]
    """Layer → output projection, where it takes O as it is; a layer with a norm or gate in between is missing."""
    checks: Mapping[str, float]
    """Largest deviations that the probe measured."""


@torch.no_grad()
def check(model: PreTrainedModel) -> Layout:
    """Adopt the model into the seam and prove that captures of it can be trusted.

    Raises:
        ModelError: the model does not run or does not dispatch through the seam, or a check failed; says which and by how
            much.
    """
    attention.adopt(model)
    watch_gates(model)
    ids = probe_ids(model)
    probe = _Probe()
    inputs: dict[nn.Module, Tensor] = {}
    with eval_mode(model), _projection_inputs(model, inputs), attention.active(None, probe):
        logits = _logits(model, ids)
    if not probe.calls:
        raise attention.unsupported(model)
    calls = _by_layer(model, probe.calls)
    first = {layer: of_layer[0] for layer, of_layer in calls.items()}
    checks = _deviations(model, list(first.values()))
    differential = _convention(model, calls)
    if differential is not None:
        checks["projected"] = _projected_deviation(model, differential, calls, probe.gates, inputs)
    with eval_mode(model):
        checks["logits"] = _logit_deviation(model, ids, logits)
    call = next(iter(first.values()))
    return Layout(
        layers=max(_layer_count(model), max(first) + 1),
        heads=call.inputs.heads,
        kv_heads=call.inputs.k_BGMD.shape[1],
        key_width=call.inputs.q_BHND.shape[-1],
        value_width=call.inputs.v_BGME.shape[-1],
        modules={layer: first[layer].module for layer in sorted(first)},
        differential=differential,
        projections={} if differential else _direct_projections(first, inputs),
        checks=checks,
    )


def context_length(model: PreTrainedModel) -> int:
    """How many tokens the model can read; 2²⁰ where its configuration sets no limit."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20)


def probe_ids(model: PreTrainedModel) -> Tensor:
    """Token ids of a probe forward, int64 [1, N], always the same."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    shape = (1, min(_PROBE_TOKENS, context_length(model)))
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(model.device)


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of a forward pass, whose failures of any kind become one line."""
    try:
        return model(ids, use_cache=False).logits
    except DexvizError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ModelError(
            f"{model.config.model_type} to run on {ids.shape[-1]} tokens",
            reason,
            "Check the model's configuration, or choose another model.",
        ) from error


def _layer_count(model: PreTrainedModel) -> int:
    """Decoder layers; the decoder of an encoder-decoder family counts its own."""
    config = model.config.get_text_config()
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def _promised_layers(model: PreTrainedModel) -> set[int]:
    """Layers to which the configuration gives softmax attention: all, but for the other kinds in a hybrid."""
    kinds = dict(enumerate(getattr(model.config.get_text_config(), "layer_types", None) or ()))
    return {layer for layer in range(_layer_count(model)) if kinds.get(layer) not in _WITHOUT_SOFTMAX}


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout; the mode comes back."""
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


def _by_layer(model: PreTrainedModel, calls: list[AttentionCall]) -> dict[int, list[AttentionCall]]:
    """Calls of each layer; where a layer calls more than once, it is on the same Q and K (DIFF)."""
    found: dict[int, list[AttentionCall]] = {}
    for call in calls:
        earlier = found.setdefault(call.layer, [call])[0]
        if call is earlier:
            continue
        found[call.layer].append(call)
        same = torch.equal(earlier.inputs.q_BHND, call.inputs.q_BHND) and torch.equal(earlier.inputs.k_BGMD, call.inputs.k_BGMD)
        if not same:
            raise _failed(model, "one attention map a layer and head", f"several different ones in layer {call.layer}")
    if unseen := _promised_layers(model) - set(found):
        raise _failed(model, "an attention call in every layer that has attention", f"none in layers {sorted(unseen)}")
    seen = {layer: len(of_layer) for layer, of_layer in found.items()}
    if len(set(seen.values())) != 1 or max(seen.values()) > 2:
        raise _failed(model, "the same number of attention calls in every layer, one or two", str(sorted(seen.values())))
    shapes = {(c[0].inputs.heads, c[0].inputs.v_BGME.shape[-1]) for c in found.values()}
    if len(shapes) != 1:
        raise _failed(model, "the same heads and value width in every layer", str(sorted(shapes)))
    return found


def _convention(model: PreTrainedModel, calls: Mapping[int, list[AttentionCall]]) -> diff.Convention | None:
    """How the layers of a DIFF Transformer pair their heads, by what they carry; None for other models."""
    found = {layer: diff.convention_of(of_layer[0].module, len(of_layer)) for layer, of_layer in calls.items()}
    if len(set(found.values())) != 1:
        names = sorted({convention.name if convention else "ordinary attention" for convention in found.values()})
        raise _failed(model, "the same kind of attention in every layer", ", ".join(names))
    convention = next(iter(found.values()))
    heads = next(iter(calls.values()))[0].inputs.heads
    if convention is not None and heads % 2:
        raise _failed(model, "an even number of heads in a DIFF Transformer, which pairs them", str(heads))
    return convention


def _projected_deviation(
    model: PreTrainedModel,
    convention: diff.Convention,
    calls: Mapping[int, list[AttentionCall]],
    gates: Mapping[int, Tensor],
    inputs: Mapping[nn.Module, Tensor],
) -> float:
    """Largest deviation of S V, normalised as the convention says, from what an output projection is fed with; relative."""
    worst = 0.0
    for layer, of_layer in calls.items():
        if convention.tokenwise and layer not in gates:
            raise _failed(model, "a λ projection that runs with its layer", f"none in layer {layer}")
        module = of_layer[0].module
        lam = diff.token_lambda(gates[layer]) if convention.tokenwise else diff.layer_lambda(module)
        joined = diff.joined([call.inputs for call in of_layer])
        first, second = (diff.logical_values(convention, joined, side) for side in (0, 1))
        if not torch.equal(first, second):
            raise _failed(model, f"the same values for both heads of a pair ({convention.pairing})", f"others in layer {layer}")
        o_HNE = torch.cat([call.o_BHNE[0] for call in of_layer], dim=-1)
        mine = diff.projected(convention, module, diff.logical_output(convention, o_HNE, lam)).float()
        fed = [x[0].float() for m in module.modules() if (x := inputs.get(m)) is not None and x[0].shape == mine.shape]
        scale = mine.abs().max().clamp(min=1e-6)
        worst = max(worst, min((float((x - mine).abs().max() / scale) for x in fed), default=float("inf")))
    if not worst <= _LOGIT_TOLERANCE.get(model.dtype, _COARSE_TOLERANCE):
        raise _failed(
            model, f"differential attention as {convention.name} has it, {convention.pairing}", f"a deviation of {worst:.2g}"
        )
    return worst


def _deviations(model: PreTrainedModel, calls: list[AttentionCall]) -> dict[str, float]:
    deviations = []
    for call in calls:
        a_BHNM = call.probabilities()
        total = a_BHNM.sum(dim=-1)
        excess = total - 1 if call.inputs.sinks_H is None else (total - 1).clamp(min=0)
        deviations.append([float(excess.abs().max()), float(a_BHNM.triu(diagonal=1).abs().max())])
    rows, above = torch.tensor(deviations).amax(dim=0).tolist()
    if not rows <= 1e-3:
        raise _failed(model, "rows of every attention map to sum to 1", f"a deviation of {rows:.2g}")
    if not above <= 0:
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
        stock = _logits(model, ids)
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
