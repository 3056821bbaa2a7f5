"""The default model worked out without dexviz: stock eager transformers with hooks, then plain float64 numpy.

Q, K and V come from the outputs of the stock projections, turned by a rotary embedding written here; DEX is a hook on the
input of the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests import reference as ref


@dataclass(frozen=True)
class Dex:
    """DEX in plain numbers, a list entry a layer: W_D [E, E], λ, and which heads are selected, bool [H]."""

    w_d: Sequence[np.ndarray]
    lam: Sequence[float]
    selected: Sequence[np.ndarray]


@dataclass(frozen=True)
class StockLayer:
    """One layer as the stock model computed it, float64, and what DEX makes of it. Axes: see `tests.reference`."""

    q_HND: np.ndarray
    k_GND: np.ndarray
    v_GNE: np.ndarray
    w_o_HEM: np.ndarray
    eager_HNN: np.ndarray
    """The stock model's own attention map."""
    w_d: np.ndarray
    lam: float
    selected: np.ndarray

    @property
    def a_HNN(self) -> np.ndarray:
        tokens, width = self.q_HND.shape[1:]
        return ref.attention(self.q_HND, self.k_GND, width**-0.5, ref.causal_mask(tokens))

    @property
    def o_HNE(self) -> np.ndarray:
        return ref.outputs(self.a_HNN, self.v_GNE)

    @property
    def adapted_HNE(self) -> np.ndarray:
        return ref.dex_outputs(self.o_HNE, self.w_d, self.lam, self.selected)

    def gains(self, space: str) -> tuple[np.ndarray, np.ndarray]:
        """ρ and ε, [H, N]."""
        return ref.dex_gains(self.v_GNE, self.w_d, self.lam, self.selected, self.w_o_HEM if space == "residual" else None)

    def scores(self, score: str, space: str) -> np.ndarray:
        """S [H, N, N]."""
        if score == "attention":
            return self.a_HNN
        if score == "signed":
            return ref.signed(self.a_HNN, self.gains(space)[0])
        return ref.contribution(self.a_HNN, ref.dex_values(self.v_GNE, self.w_d, self.lam, self.selected))


def run_stock(model: PreTrainedModel, ids: torch.Tensor, dex: Dex | None = None) -> tuple[np.ndarray, list[StockLayer]]:
    """Logits of the last token, and every layer. `model` runs eager attention; it has Llama's architecture."""
    layers = model.model.layers
    fed: list[dict[str, np.ndarray]] = [{} for _ in layers]
    with ExitStack() as hooks, torch.no_grad():
        for index, layer in enumerate(layers):
            for name in ("q_proj", "k_proj", "v_proj"):
                handle = getattr(layer.self_attn, name).register_forward_hook(_note(fed[index], name))
                hooks.callback(handle.remove)
            if dex is not None:
                handle = layer.self_attn.o_proj.register_forward_pre_hook(_dex_hook(dex, index))
                hooks.callback(handle.remove)
        result = model(ids, output_attentions=True, use_cache=False)
    heads = model.config.num_attention_heads
    off = Dex([np.zeros((1, 1))] * len(layers), [0.0] * len(layers), [np.zeros(heads, bool)] * len(layers))
    worked_out = [
        _layer(model, layer.self_attn.o_proj.weight, fed[i], result.attentions[i], dex or off, i)
        for i, layer in enumerate(layers)
    ]
    return result.logits[0, -1].double().numpy(), worked_out


def _note(where: dict[str, np.ndarray], name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        where[name] = output[0].double().numpy()

    return hook


def _dex_hook(dex: Dex, layer: int) -> Callable[..., tuple[torch.Tensor]]:
    w_d = torch.from_numpy(dex.w_d[layer]).float()

    def hook(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        o_BNHE = args[0].unflatten(-1, (len(dex.selected[layer]), -1)).clone()
        for head in np.flatnonzero(dex.selected[layer]):
            o_BNHE[:, :, head] -= dex.lam[layer] * o_BNHE[:, :, head] @ w_d
        return (o_BNHE.flatten(2),)

    return hook


def _layer(
    model: PreTrainedModel, w_o: torch.Tensor, fed: Mapping[str, np.ndarray], eager: torch.Tensor, dex: Dex, index: int
) -> StockLayer:
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    q, k, v = (np.stack(np.split(fed[name], fed[name].shape[1] // width, axis=1)) for name in ("q_proj", "k_proj", "v_proj"))
    theta = config.rope_parameters["rope_theta"]
    w_o_HEM = w_o.detach().double().numpy().T.reshape(len(q), width, -1)
    q, k = (_rotary(x, theta) for x in (q, k))
    return StockLayer(q, k, v, w_o_HEM, eager[0].double().numpy(), dex.w_d[index], dex.lam[index], dex.selected[index])


def _rotary(x_HND: np.ndarray, theta: float) -> np.ndarray:
    """Rotate the pair (x_d, x_{d + D/2}) of the token at position p by p · θ^(−2d / D)."""
    half = x_HND.shape[2] // 2
    angle = np.arange(x_HND.shape[1])[:, None] * theta ** (-np.arange(half) / half)[None, :]
    first, second = x_HND[..., :half], x_HND[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
