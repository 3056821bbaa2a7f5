"""DIFF Transformer  (arXiv 2410.05258) as transformers' DiffLlama implements it: S = A₁ − λ A₂ on H/2 logical heads.

    λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init,l
    output = (1 − λ_init) · RMSNorm(S [V₁; V₂])

Logical head p takes the softmax heads p and p + H/2, and the key/value heads p // g and H_kv/2 + p // g, g = H / H_kv.
Attention is called twice a layer on the same Q and K, once with V₁ and once with V₂; `joined` makes one call of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dexviz.errors import ModelError
from dexviz.kernels.softmax import AttentionInputs
from dexviz.kernels.terms import ScoreMap, ScoreTerm


def joined(first: AttentionInputs, second: AttentionInputs) -> AttentionInputs:
    """The two calls of a layer as one whose values are [V₁; V₂], twice as wide."""
    return replace(first, v_BGME=torch.cat([first.v_BGME, second.v_BGME], dim=-1))


def layer_lambda(module: nn.Module) -> float:
    """λ of a layer, as the model computes it: both exponentials are rounded to the model's type before they are subtracted.

    Raises:
        ModelError: the module does not carry the four λ vectors of DIFF.
    """
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init")
    if missing := [name for name in names if not hasattr(module, name)]:
        raise ModelError(
            "a DIFF Transformer whose attention carries λ_q1, λ_k1, λ_q2, λ_k2 and λ_init",
            f"{type(module).__name__} without {', '.join(missing)}",
            "Ask for the attention score of this model.",
        )
    q1, k1, q2, k2, initial = (getattr(module, name) for name in names)
    first, second = (torch.exp((q * k).detach().sum(dtype=torch.float32)).to(q.dtype) for q, k in ((q1, k1), (q2, k2)))
    return float(first - second + initial)


def score_map(module: nn.Module, inputs: AttentionInputs, score: str, o_HNE: Tensor | None) -> ScoreMap:
    """Signed or contribution scores of the logical heads: two terms.

    Args:
        inputs: the joined call of the layer.
        o_HNE: A_h [V₁; V₂] of every softmax head; needed for contribution scores.
    """
    half = inputs.heads // 2
    plus, minus = tuple(range(half)), tuple(range(half, 2 * half))
    lam = layer_lambda(module)
    like = inputs.q_BHND
    if score == "signed":
        factor_SNK = torch.full((half, like.shape[2], 1), -lam, dtype=inputs.dtype, device=like.device)
        return ScoreMap(inputs, (ScoreTerm(plus), ScoreTerm(minus, u_SNK=factor_SNK)))
    assert o_HNE is not None
    o_SNE = logical_output(o_HNE.to(inputs.dtype), lam)
    square = o_SNE.square().sum(dim=-1, keepdim=True)
    u_SNE = torch.where(square > 0, o_SNE / square.where(square > 0, 1.0), 0.0)
    v_SME = inputs.v_BGME[0].to(inputs.dtype).repeat_interleave(inputs.groups, dim=0)[:half]
    return ScoreMap(inputs, (ScoreTerm(plus, u_SNE, v_SME), ScoreTerm(minus, -lam * u_SNE, v_SME)))


def logical_output(o_HNE: Tensor, lam: float) -> Tensor:
    """(A₁ − λ A₂) [V₁; V₂] of the logical heads, before the norm: [H/2, N, E]."""
    half = len(o_HNE) // 2
    return o_HNE[:half] - lam * o_HNE[half:]
