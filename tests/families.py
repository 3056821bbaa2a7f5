"""Tiny randomly initialised models of many transformers families, with the facts that tests need about each.

Every family runs in float32 in well under a second. Weights are perturbed after the initialisation, so that attention is
far from uniform and nothing that matters (sinks, biases, norms, λ of DIFF) keeps a trivial initial value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
WINDOW = 7
"""Sliding window or attention chunk of the families that have one; tests use longer prompts."""


@dataclass(frozen=True)
class Family:
    """One architecture: `heads` query heads share `kv_heads` key/value heads of width `width`, in `layers` layers."""

    name: str
    config: Mapping[str, Any]
    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    width: int = 8
    value_width: int = 8
    sinks: bool = False
    """True where rows of the attention map sum to less than 1."""
    windowed: tuple[int, ...] = ()
    """Layers that see only the last WINDOW tokens, or their own chunk of WINDOW tokens."""
    model_type: str = ""
    """Name in transformers, where it differs from ours."""
    traits: tuple[str, ...] = field(default=())
    """What is special about its attention, in words."""

    @property
    def gqa(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def sdpa(self) -> bool:
        """False where torch's scaled_dot_product_attention cannot compute what the family computes."""
        return not {"soft-cap", "sinks"} & set(self.traits)


def _llama_like(**extra: Any) -> dict[str, Any]:
    """Settings that most families share: hidden size 48, six query heads, two key/value heads, width 8."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**common, **extra}


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


_SLIDE = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["full_attention", "full_attention"],
}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}


def _plain(name: str, **extra: Any) -> Family:
    """A family that differs from Llama in nothing that its facts show."""
    return Family(name, _llama_like(**extra))


def _mha(name: str, config: Mapping[str, Any], **facts: Any) -> Family:
    """A family without grouped queries: four heads of width 8."""
    return Family(name, config, **{"heads": 4, "kv_heads": 4, **facts})


_CAPTURED = (
    _plain("llama"),
    _plain("qwen2", sliding_window=None),
    _plain("qwen3"),
    Family("mistral", _llama_like(sliding_window=WINDOW), windowed=(0, 1)),
    Family(
        "gemma2",
        _llama_like(query_pre_attn_scalar=8, attn_logit_softcapping=2.0, **_SLIDE),
        windowed=(0,),
        traits=("soft-cap",),
    ),
    Family("gemma3", _llama_like(query_pre_attn_scalar=8, **_SLIDE), windowed=(0,), model_type="gemma3_text"),
    Family("phi3", _without(_llama_like(), "head_dim"), traits=("fused",)),
    _mha("gpt2", _GPT, traits=("fused",)),
    _mha(
        "gpt_neox",
        _without(_llama_like(hidden_size=32, num_attention_heads=4, rotary_pct=0.5), "head_dim", "num_key_value_heads"),
        traits=("fused",),
    ),
    _mha(
        "opt",
        _without(
            _llama_like(hidden_size=32, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32),
            "head_dim",
            "num_key_value_heads",
            "intermediate_size",
        ),
    ),
    _plain("olmo2"),
    _plain("granite", attention_multiplier=0.5, residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=3.0),
    Family("cohere2", _without(_llama_like(**_SLIDE), "head_dim"), windowed=(0,)),
    _plain("starcoder2", use_bias=True, sliding_window=None),
    Family(
        "gpt_oss",
        _llama_like(num_local_experts=4, num_experts_per_tok=2, rope_parameters=_ROPE, **_SLIDE),
        sinks=True,
        windowed=(0,),
        traits=("sinks",),
    ),
    Family(
        "diffllama",
        _llama_like(hidden_size=64, num_attention_heads=8, num_key_value_heads=4),
        heads=8,
        kv_heads=4,
        traits=("diff",),
    ),
    Family("stablelm", _without(_llama_like(partial_rotary_factor=0.5, use_qkv_bias=True), "head_dim")),
    Family(
        "llama4",
        _llama_like(
            intermediate_size_mlp=64,
            num_local_experts=2,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            floor_scale=4,
        ),
        windowed=(0,),
        model_type="llama4_text",
        traits=("chunked",),
    ),
    Family("deepseek_v3", _without(_llama_like(**_MLA), "head_dim"), kv_heads=6, width=12, value_width=6, traits=("mla",)),
    _plain("smollm3", no_rope_layers=[1, 0]),
    Family("mixtral", _llama_like(num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW), windowed=(0, 1)),
    _plain("qwen2_moe", shared_expert_intermediate_size=32, **_EXPERTS),
    Family("gptj", {**_GPT, "rotary_dim": 4}, heads=4, kv_heads=4),
    Family("exaone4", _llama_like(**_SLIDE), windowed=(0,)),
)
_BETWEEN = (
    Family("bitnet", _without(_llama_like(), "head_dim"), traits=("norm before the output projection",)),
    Family("qwen3_next", _llama_like(**_EXPERTS, **_LINEAR), traits=("gate before the output projection",)),
    Family("qwen3_5", _llama_like(**_LINEAR), model_type="qwen3_5_text", traits=("gate before the output projection",)),
)
_OUTSIDE = (
    _mha("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    _mha("mpt", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    _mha(
        "gpt_neo",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    _mha("falcon", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _CAPTURED + _BETWEEN}
"""Families whose attention goes through transformers' AttentionInterface, so that dexviz captures them."""
NO_MERGE: tuple[str, ...] = tuple(family.name for family in _BETWEEN)
"""Those of FAMILIES with a norm or gate between attention and output projection: DEX cannot be merged there."""
REFUSED: dict[str, Family] = {family.name: family for family in _OUTSIDE}
"""Families that accept any attention implementation and never call it."""


def build(name: str, seed: int = 0, *, attn: str = "eager", **overrides: Any) -> PreTrainedModel:
    """The family's tiny model in eval mode, with the same weights for the same `seed`.

    `attn` is transformers' attention implementation; `overrides` replace settings of the config.
    """
    family = FAMILIES.get(name) or REFUSED[name]
    config = AutoConfig.for_model(family.model_type or name, **{**family.config, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32)
        perturb(model)
    return model.eval()


@torch.no_grad()
def perturb(model: PreTrainedModel) -> None:
    """Add noise: unit gain to matrices and embeddings, 0.2 to vectors (biases, norms, λ), 1 to attention sinks."""
    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[-1]
        scale = 1.0 if name.endswith("sinks") else 0.2 if parameter.ndim < 2 else fan_in**-0.5
        parameter.add_(scale * torch.randn_like(parameter))


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids int64 [batch, tokens], none of them a special one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, tokens), generator=generator)
