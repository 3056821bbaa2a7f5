"""The one seam: the attention function that transformers calls in every layer.

`register()` puts one function into transformers' AttentionInterface and one into its mask interface, both under the name
"dexviz". Per call, DEX is applied to the attention output O, and a recorder, if one is active, sees Q, K, V, O and O'.
Which adapter and which recorder are active travels in a ContextVar (`dexviz.context`): a request changes nothing that others
share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from dexviz.context import active, active_adapter, active_recorder, attach, attached, watch
from dexviz.dex import DexOperator
from dexviz.errors import ModelError
from dexviz.kernels.output import BLOCK_ROWS, attention_output
from dexviz.kernels.softmax import AttentionInputs, MaskSpec, row_blocks, softmax_rows

__all__ = ["NAME", "AttentionCall", "Recorder", "active", "adopt", "attach", "attached", "register", "unsupported"]

NAME = "dexviz"


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer's attention, as a recorder sees it. Axes: see `dexviz.kernels.softmax`.

    While generating with a static cache, keys and values are overwritten later: compute within the call.
    """

    module: nn.Module
    layer: int
    inputs: AttentionInputs
    o_BHNE: Tensor
    """Attention output before DEX."""
    adapted_BHNE: Tensor
    """The same tensor object where no head is adapted; O' otherwise."""
    operator: DexOperator | None

    def probabilities(self) -> Tensor:
        """Dense attention map, [B, H, N, M]: for tests and short prompts."""
        x = self.inputs
        a_BHNM = x.q_BHND.new_zeros((*x.q_BHND.shape[:3], x.k_BGMD.shape[2]), dtype=x.dtype)
        for start, stop in row_blocks(x.mask.queries, BLOCK_ROWS):
            block = softmax_rows(x, start, stop)
            a_BHNM[:, :, start:stop, block.c0 : block.c1] = block.a_BHRC
        return a_BHNM


class _DescribedMask(Tensor):
    """Carries a MaskSpec where transformers passes on 4D tensors: the shape of the mask, and one byte of storage."""

    spec: MaskSpec | None = None

    @classmethod
    def of(cls, spec: MaskSpec, batch: int, device: torch.device | str) -> _DescribedMask:
        shape = (batch, 1, spec.queries, spec.keys)
        mask = torch.zeros((), dtype=torch.uint8, device=device).expand(shape).as_subclass(cls)
        mask.spec = spec
        return mask

    def contiguous(self, *args: Any, **kwargs: Any) -> _DescribedMask:
        """Itself: generation asks for a dense layout, which would lose the description."""
        return self


Recorder = Callable[[AttentionCall], None]


@runtime_checkable
class Attending(Protocol):
    """A recorder that recomputes probabilities anyway, and so computes the attention output too."""

    def output(self, module: nn.Module, layer: int, inputs: AttentionInputs, operator: DexOperator | None) -> Tensor | None:
        """O before DEX, [B, H, N, E]; None leaves it to the seam. The call with O follows."""

    def __call__(self, call: AttentionCall, /) -> None:
        """See the call."""


def adopt(model: PreTrainedModel) -> None:
    """Route the model's attention through this seam. Idempotent; weights are untouched.

    Raises:
        ModelError: transformers cannot change the model's attention implementation.
    """
    register()
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, KeyError) as error:
        raise unsupported(model) from error
    watch(model)


def unsupported(model: PreTrainedModel) -> ModelError:
    """The refusal of a family that never calls the attention interface."""
    family = getattr(model.config, "model_type", type(model).__name__)
    return ModelError(
        "a model whose layers all call transformers' AttentionInterface",
        f"{family}, whose attention does not dispatch through it",
        "Choose a family that does, such as Llama, Qwen, Mistral, Gemma, Phi, GPT-2, GPT-NeoX, OPT or OLMo.",
    )


def register() -> None:
    """Put the seam into transformers' attention and mask interfaces. Idempotent."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask, key, value = _described(attention_mask, query, key, value, causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    inputs = AttentionInputs(query, key, value, scale, mask, softcap, s_aux, position_bias)
    layer = int(cast(int, module.layer_idx))
    adapter, recorder = active_adapter(module), active_recorder()
    operator = adapter.operator(layer) if adapter is not None else None
    own = recorder.output(module, layer, inputs, operator) if isinstance(recorder, Attending) and not dropout else None
    o_BHNE = adapted_BHNE = attention_output(inputs, dropout) if own is None else own
    if operator is not None:
        adapted_BHNE = operator(o_BHNE)
    if recorder is not None:
        recorder(AttentionCall(module, layer, inputs, o_BHNE, adapted_BHNE, operator))
    return adapted_BHNE.transpose(1, 2).contiguous(), None


def _described(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[MaskSpec, Tensor, Tensor]:
    """The mask as a MaskSpec, and keys and values cropped where they are padded at the end (static caches)."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        if isinstance(mask, _DescribedMask) and mask.spec is not None:
            return mask.spec, key, value
        if mask.dtype == torch.uint8:
            raise ModelError(
                "attention masks that reach the attention function as the mask interface made them",
                "one that the model's own code has altered",
                "Choose another model, or one that leaves masks to transformers.",
            )
        dense = mask
        return MaskSpec(queries, keys, lambda r0, r1, c0, c1: dense[:, :, r0:r1, c0:c1]), key, value
    if queries == 1 or not causal:
        return MaskSpec(queries, keys, causal=causal), key, value
    return MaskSpec(queries, queries), key[:, :, :queries], value[:, :, :queries]


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Describes the mask that transformers' `sdpa_mask` would build; None stands for plain causality or no mask at all."""
    q_offset = int(q_offset)  # a static cache counts this tensor up before the mask is read
    unpadded = attention_mask is None or bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())
    windowed = local_size is not None and kv_length >= local_size
    aligned = q_length in (1, kv_length) or q_offset == 0
    padded_by_cache = attention_mask is not None and attention_mask.shape[-1] < kv_length + kv_offset
    if not windowed and unpadded and allow_is_bidirectional_skip and not padded_by_cache:
        return None
    if not windowed and unpadded and allow_is_causal_skip and aligned and not (q_length == 1 and padded_by_cache):
        return None

    def block(r0: int, r1: int, c0: int, c1: int) -> Tensor:
        dense = sdpa_mask(
            batch_size=batch_size,
            q_length=r1 - r0,
            kv_length=c1 - c0,
            q_offset=q_offset + r0,
            kv_offset=kv_offset + c0,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        assert dense is not None, "neither skip is allowed"
        return dense

    return _DescribedMask.of(MaskSpec(q_length, kv_length, block), batch_size, device)
