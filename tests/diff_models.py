"""Small DIFF Transformers of the conventions that transformers does not have, written from the papers' formulas.

Both are Llama with another attention module, which goes through AttentionInterface. Axes: B prompts, N tokens, H softmax heads,
P = H / 2 logical heads, G key heads, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from tests.families import VOCAB, perturb


class _Attention(nn.Module):
    """What both have in common: projections, positions, and one call of the attention interface."""

    def __init__(self, config: LlamaConfig, layer_idx: int, values: int, value_width: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.width = config, layer_idx, config.head_dim
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = self.heads // self.key_heads
        self.scaling, self.is_causal = self.width**-0.5, True
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.key_heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, values * value_width, bias=False)
        self.o_proj = nn.Linear(self.heads // 2 * value_width, config.hidden_size, bias=False)
        self.value_width = value_width

    def attend(self, x_BNC: Tensor, positions: tuple[Tensor, Tensor], mask: Any, repeat: int, cache: Any) -> Tensor:
        """Outputs of all softmax heads, [B, N, H, E]; every value head serves `repeat` key heads."""
        q, k, v = (
            proj(x_BNC).unflatten(-1, (-1, width)).transpose(1, 2)
            for proj, width in ((self.q_proj, self.width), (self.k_proj, self.width), (self.v_proj, self.value_width))
        )
        q, k = apply_rotary_pos_emb(q, k, *positions)
        v = v.repeat_interleave(repeat, dim=1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling)[0]


class NeighbourAttention(_Attention):
    """The authors' first code: maps 2p and 2p + 1, values twice as wide, one λ a layer, RMSNorm with weights a head."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.num_key_value_heads // 2, 2 * config.head_dim)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.1 * torch.randn(self.width)))
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        self.subln = nn.RMSNorm(2 * self.width, eps=1e-5)

    def lam(self) -> Tensor:
        return torch.exp(self.lambda_q1 @ self.lambda_k1) - torch.exp(self.lambda_q2 @ self.lambda_k2) + self.lambda_init

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        o_BNHE = self.attend(hidden_states, position_embeddings, attention_mask, 2, cache)
        o_BNPE = o_BNHE[:, :, 0::2] - self.lam() * o_BNHE[:, :, 1::2]
        return self.o_proj(((1 - self.lambda_init) * self.subln(o_BNPE)).flatten(2)), None


class TokenwiseAttention(_Attention):
    """V2: twice the query heads in every group, maps 2p and 2p + 1 on the same keys and values, λ from the token, no norm."""

    late = False
    """Whether λ is computed after attention rather than before."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.num_key_value_heads, config.head_dim)
        self.lambda_proj = nn.Linear(config.hidden_size, self.heads // 2, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        gate = None if self.late else self.lambda_proj(hidden_states)
        o_BNHE = self.attend(hidden_states, position_embeddings, attention_mask, 1, cache)
        gate_BNP = self.lambda_proj(hidden_states) if gate is None else gate
        o_BNPE = o_BNHE[:, :, 0::2] - torch.sigmoid(gate_BNP)[..., None] * o_BNHE[:, :, 1::2]
        return self.o_proj(o_BNPE.flatten(2)), None


class LateTokenwiseAttention(TokenwiseAttention):
    """The same, λ after attention."""

    late = True


def build_diff(attention: type[_Attention], *, heads: int = 8, key_heads: int = 4, seed: int = 0) -> PreTrainedModel:
    """A Llama of two layers with such attention, perturbed as `tests.families` does it."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
        for layer, block in enumerate(model.model.layers):
            block.self_attn = attention(config, layer)
        perturb(model)
    return model.eval()
