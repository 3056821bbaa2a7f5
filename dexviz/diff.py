"""DIFF Transformers (arXiv 2410.05258, and V2 of 2026): S = A₁ − λ A₂ on H/2 logical heads, under three conventions.

    first paper   λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init,l, one a layer;   output = (1 − λ_init) · RMSNorm(S [V₁; V₂])
    V2            λ_ip = sigmoid(x_i W_λ)_p, one a token and logical head;           output = S V

| convention | a module follows it that has                                   | maps of head p | attention calls a layer |
|------------|----------------------------------------------------------------|----------------|-------------------------|
| HALVES     | λ_q1, λ_k1, λ_q2, λ_k2, `lambda_init`; transformers' DiffLlama | p and p + H/2  | two, with V₁ and V₂     |
| NEIGHBOURS | the same names; the authors' first code                        | 2p and 2p + 1  | one, with [V₁; V₂]      |
| TOKENWISE  | `lambda_proj`, whose output before the sigmoid has H/2 entries | 2p and 2p + 1  | one; a pair shares K, V |

The norm is the module's `groupnorm` or `subln`. Names alone prove nothing: `dexviz.selfcheck` takes a model for a DIFF
Transformer only if `projected` of a probe's maps is what its output projection is fed with. A further convention is one more
entry of `CONVENTIONS`.

Axes: P = H/2 logical heads, N tokens, E value width; others as in `dexviz.kernels.softmax`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from dexviz.errors import ModelError
from dexviz.kernels.softmax import AttentionInputs
from dexviz.kernels.terms import ScoreMap, ScoreTerm

_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init")
_GATE = "lambda_proj"
_NORMS = ("groupnorm", "subln")


@dataclass(frozen=True)
class Convention:
    """How a family of DIFF Transformers pairs its softmax heads, calls attention, and makes λ."""

    name: str
    pairing: str
    """The two softmax heads of logical head p, in words."""
    calls: int
    """Attention calls a layer: two on the same Q and K, whose values belong side by side, or one."""
    neighbours: bool
    tokenwise: bool = False
    """λ is one a token and logical head, made by the module `lambda_proj`; else one a layer."""

    def pairs(self, heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Softmax heads of A₁ and of A₂, by logical head."""
        if self.neighbours:
            return tuple(range(0, heads, 2)), tuple(range(1, heads, 2))
        return tuple(range(heads // 2)), tuple(range(heads // 2, heads))

    def matches(self, module: nn.Module, calls: int) -> bool:
        """Whether an attention module has what the convention needs, and calls attention as often."""
        return calls == self.calls and not missing(module, self.tokenwise)


HALVES = Convention("halves", "p, p + H/2", calls=2, neighbours=False)
NEIGHBOURS = Convention("neighbours", "2p, 2p + 1", calls=1, neighbours=True)
TOKENWISE = Convention("V2", "2p, 2p + 1", calls=1, neighbours=True, tokenwise=True)
CONVENTIONS = (HALVES, NEIGHBOURS, TOKENWISE)


def missing(module: nn.Module, tokenwise: bool = False) -> list[str]:
    """Names that a module of a DIFF Transformer would have and this one lacks."""
    return [name for name in ((_GATE,) if tokenwise else _VECTORS) if not hasattr(module, name)]


def convention_of(module: nn.Module, calls: int) -> Convention | None:
    """The convention that an attention module follows by its names; None for ordinary attention.

    Raises:
        ModelError: attention is called twice, as in DIFF Transformers, but the module lacks its λ.
    """
    found = next((convention for convention in CONVENTIONS if convention.matches(module, calls)), None)
    if found is None and calls == HALVES.calls:
        raise ModelError(
            "a DIFF Transformer whose attention carries λ_q1, λ_k1, λ_q2, λ_k2 and λ_init",
            f"{type(module).__name__} without {', '.join(missing(module))}",
            "Choose a model that follows one of the conventions in dexviz/diff.py.",
        )
    return found


def gate_of(module: nn.Module) -> nn.Module:
    """The module that makes λ of every token and logical head, before the sigmoid: [B, N, P]."""
    gate = getattr(module, _GATE)
    assert isinstance(gate, nn.Module)
    return gate


def joined(calls: Sequence[AttentionInputs]) -> AttentionInputs:
    """The calls of a layer as one whose values are [V₁; V₂], side by side; a single call as it is."""
    first, *others = calls
    return replace(first, v_BGME=torch.cat([call.v_BGME for call in calls], dim=-1)) if others else first


def layer_lambda(module: nn.Module) -> float:
    """λ of a layer, as the model computes it: both exponentials are rounded to the model's type before they are subtracted."""
    q1, k1, q2, k2, initial = (getattr(module, name) for name in _VECTORS)
    first, second = (torch.exp((q * k).detach().sum(dtype=torch.float32)).to(q.dtype) for q, k in ((q1, k1), (q2, k2)))
    return float(first - second + initial)


def token_lambda(gate_BNP: Tensor) -> Tensor:
    """λ of V2 from what its gate puts out, of one prompt: sigmoid, [P, N]."""
    return torch.sigmoid(gate_BNP[0].float()).T.contiguous()


def score_map(
    convention: Convention, inputs: AttentionInputs, score: str, lam: float | Tensor, o_HNE: Tensor | None
) -> ScoreMap:
    """Signed or contribution scores of the logical heads: two terms.

    Args:
        inputs: the calls of the layer, joined.
        lam: λ of the layer, or [P, N].
        o_HNE: A_h [V₁; V₂] of every softmax head; needed for contribution scores.
    """
    plus, minus = convention.pairs(inputs.heads)
    like = inputs.q_BHND
    if score == "signed":
        lam_PNK = column(lam, like.device, inputs.dtype).expand(len(plus), like.shape[2], 1)
        return ScoreMap(inputs, (ScoreTerm(plus), ScoreTerm(minus, u_SNK=-lam_PNK)))
    assert o_HNE is not None
    o_SNE = logical_output(convention, o_HNE.to(inputs.dtype), lam)
    square = o_SNE.square().sum(dim=-1, keepdim=True)
    u_SNE = torch.where(square > 0, o_SNE / square.where(square > 0, 1.0), 0.0)
    v_SME = logical_values(convention, inputs)
    minus_SNE = -column(lam, like.device, inputs.dtype) * u_SNE
    return ScoreMap(inputs, (ScoreTerm(plus, u_SNE, v_SME), ScoreTerm(minus, minus_SNE, v_SME)))


def column(lam: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """λ where it multiplies rows: [P, N, 1], or [1, 1, 1] for the whole layer."""
    lam_PN = lam if isinstance(lam, Tensor) else torch.full((1, 1), lam)
    return lam_PN.to(device, dtype)[..., None]


def logical_values(convention: Convention, inputs: AttentionInputs, side: int = 0) -> Tensor:
    """Values that the first or the second map of every logical head is applied to, [P, N, E]; the same for both."""
    heads = torch.tensor(convention.pairs(inputs.heads)[side], device=inputs.v_BGME.device)
    return inputs.v_BGME[0, heads // inputs.groups].to(inputs.dtype)


def logical_output(convention: Convention, o_HNE: Tensor, lam: float | Tensor) -> Tensor:
    """(A₁ − λ A₂) [V₁; V₂] of the logical heads, before the norm: [P, N, E]."""
    plus, minus = (list(heads) for heads in convention.pairs(len(o_HNE)))
    return o_HNE[plus] - column(lam, o_HNE.device, o_HNE.dtype) * o_HNE[minus]


def projected(convention: Convention, module: nn.Module, o_PNE: Tensor) -> Tensor:
    """What the layer feeds to its output projection, [N, P · E]: (1 − λ_init) · RMSNorm(o); V2 has neither."""
    o_NPE = o_PNE.transpose(0, 1)
    if not convention.tokenwise:
        norm = next((getattr(module, name) for name in _NORMS if hasattr(module, name)), nn.Identity())
        o_NPE = (1 - float(cast(float, module.lambda_init))) * norm(o_NPE)
    return o_NPE.flatten(1)
