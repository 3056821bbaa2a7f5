"""From a layer's Q, K, V and its DEX operator to score terms: attention, signed and contribution scores.

    signed, DEX:         S_ij = ρ_j A_ij for selected heads, A_ij for the others
    contribution:        S_ij = A_ij ⟨o_i, v_j⟩ / ‖o_i‖²   (DEX: o', and v' = v (I − λ W_D)); rows sum to 1
    DIFF (see diff.py):  two terms

Source: README, "What is computed". Axes: H query heads, S score heads, N tokens, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dexviz import diff, projection
from dexviz.delta_weights import Deltas
from dexviz.dex import DexOperator, gains
from dexviz.errors import CaptureError
from dexviz.kernels.output import attention_output
from dexviz.kernels.softmax import AttentionInputs
from dexviz.kernels.terms import ScoreMap, ScoreTerm


@dataclass(frozen=True)
class LayerRecord:
    """What one layer's score maps depend on, for one prompt. Small enough to keep: Q, K and V."""

    layer: int
    module: nn.Module
    inputs: AttentionInputs
    operator: DexOperator | None
    projection: projection.Projection | None
    """Output projection, where it takes O as it is."""
    differential: diff.Convention | None = None
    deltas: Deltas | None = None
    """The view's changes of projections, which W_O may be among."""
    lam: float | Tensor = 0.0
    """DIFF: λ of the layer, or [P, N] where it depends on the token."""

    def output(self) -> Tensor:
        """O, [H, N, E]: recomputed from Q, K and V."""
        return attention_output(self.inputs)[0]

    def adapted(self, o_HNE: Tensor) -> Tensor:
        """O', [H, N, E]; the same tensor where DEX is off."""
        return o_HNE if self.operator is None else self.operator(o_HNE[None])[0]


def score_map(record: LayerRecord, score: str, space: str, o_HNE: Tensor | None = None, fused: bool = False) -> ScoreMap:
    """The layer's score maps as terms.

    Args:
        o_HNE: saves recomputing O for contribution scores.
        fused: O becomes known row by row, while the map is streamed: contribution scores take their U from there.

    Raises:
        CaptureError: residual space where something lies between attention and W_O.
    """
    heads = tuple(range(record.inputs.heads))
    if score == "attention":
        return ScoreMap(record.inputs, (ScoreTerm(heads),))
    if record.differential:
        if space == "residual":
            raise CaptureError(
                "value space for a DIFF Transformer, whose values DEX leaves alone", "residual space", "Use value space."
            )
        o = record.output() if o_HNE is None and score == "contribution" else o_HNE
        return diff.score_map(record.differential, record.inputs, score, record.lam, o)
    if score == "signed":
        gain = column_gains(record, space)
        return ScoreMap(record.inputs, (ScoreTerm(heads, w_SMK=None if gain is None else gain[0][..., None]),))
    if fused:
        return ScoreMap(record.inputs, (ScoreTerm(heads, lambda o, *_: along(record.adapted(o)), adapted_values(record)),))
    o_HNE = record.adapted(record.output() if o_HNE is None else o_HNE)
    return ScoreMap(record.inputs, (ScoreTerm(heads, u_SNK=along(o_HNE), w_SMK=adapted_values(record)),))


def along(o_SNE: Tensor) -> Tensor:
    """o / ‖o‖², [S, N, E], in at least float32; zero where the output is zero."""
    o_SNE = o_SNE.to(torch.promote_types(o_SNE.dtype, torch.float32))
    square = o_SNE.square().sum(dim=-1, keepdim=True)
    return torch.where(square > 0, o_SNE / square.where(square > 0, 1.0), 0.0)


def values(record: LayerRecord) -> Tensor:
    """V of every query head, [H, N, E], in at least float32."""
    v_GME = record.inputs.v_BGME[0].to(record.inputs.dtype)
    return v_GME.repeat_interleave(record.inputs.groups, dim=0)


def adapted_values(record: LayerRecord) -> Tensor:
    """v' = v (I − λ W_D) of selected heads, v of the others, [H, N, E]."""
    v_HME = values(record)
    return v_HME if record.operator is None else record.operator(v_HME[None])[0]


def column_gains(record: LayerRecord, space: str) -> tuple[Tensor, Tensor] | None:
    """(ρ, ε) of every head, each [H, N]; 1 and 0 on unselected heads. None where DEX is off.

    Raises:
        CaptureError: residual space where something lies between attention and W_O.
    """
    operator = record.operator
    if operator is None:
        return None
    v_SME = record.inputs.v_BGME[0, operator.heads // record.inputs.groups].to(record.inputs.dtype)
    metric = _metric(record, operator) if space == "residual" else None
    rho, residue = gains(v_SME, operator.w_d, float(operator.lam().detach()), metric)
    ones = torch.ones(record.inputs.heads, v_SME.shape[1], dtype=rho.dtype, device=rho.device)
    return ones.index_copy(0, operator.heads, rho), torch.zeros_like(ones).index_copy(0, operator.heads, residue)


def _metric(record: LayerRecord, operator: DexOperator) -> Tensor:
    """W_O,h W_O,hᵀ of the selected heads, [S, E, E], as the view has W_O: the inner product of residual space."""
    if record.projection is None:
        raise CaptureError(
            "a model whose output projection directly follows attention",
            f"layer {record.layer}, where a norm or gate lies in between",
            "Use value space for this model.",
        )
    width = record.inputs.v_BGME.shape[-1]
    weight = record.projection.weight if record.deltas is None else record.deltas.weight(record.projection)
    w_SED = torch.stack([projection.of_head(record.projection, h, width, weight) for h in operator.heads.tolist()])
    w_SED = w_SED.detach().to(record.inputs.dtype)
    return w_SED @ w_SED.transpose(-1, -2)
