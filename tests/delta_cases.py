"""Random changes of projections, and a stock model into which they are merged by hand: float64 numpy, no code of dexviz."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from dexviz import deltas
from dexviz.dex import DexAdapter, DexConfig
from dexviz.models import LoadedModel, wrap_model
from tests import families, reference

PARTS = ("k", "v", "o")
ALL = tuple(name for name in families.FAMILIES if name != "diffllama")


def loaded(name: str = "llama", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return wrap_model(stock_model(name).to(dtype), name=name)


def stock_model(name: str) -> PreTrainedModel:
    """The family's tiny model, its experts computed one by one, as they can be in float64."""
    model = families.build(name)
    model.set_experts_implementation("eager")
    return model


def adapter_for(
    base: LoadedModel,
    *,
    dex: bool = True,
    plus: bool = False,
    rank: int | None = None,
    parts: tuple[str, ...] = PARTS,
    strength: float = 0.1,
    lam: float = 0.3,
) -> DexAdapter:
    """An adapter of `base` with changes of size `strength` and, with `dex`, every second head adapted."""
    layout = base.layout
    heads = tuple(tuple(range(layer % 2, layout.heads, 2)) if dex else () for layer in range(layout.layers))
    paths = [entry.module for entry in deltas.find(base.model, layout, parts)]
    ranks = dict.fromkeys(paths, rank) if rank is not None else None
    changes = deltas.for_model(base.model, layout, parts, ranks)
    config = DexConfig(heads=heads, width=layout.value_width, query_heads=layout.heads, plus=plus)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        adapter = DexAdapter(config, changes)
        for parameter in changes.parameters():
            parameter.data.normal_(std=strength if rank is None else strength**0.5)
        for operator in adapter.operators.values():
            operator.lambda_learn.data.fill_(lam)
    return adapter.requires_grad_(False)


def merged_by_hand(name: str, adapter: DexAdapter, base: LoadedModel) -> PreTrainedModel:
    """The stock model in float64, its weights replaced by W + ΔW and, for selected heads, (I − λ W_D)(W_O + ΔW_O)."""
    stock = stock_model(name).double()
    stock.load_state_dict(base.model.state_dict())
    names = {id(module): path for path, module in base.model.named_modules()}
    assert adapter.deltas is not None
    for entry in adapter.deltas.entries.values():
        module = stock.get_submodule(entry.module)
        weight = outputs_first(module)
        key = entry.module.replace(".", "/")
        state = {path: value.double().numpy() for path, value in adapter.deltas.state_dict().items()}
        change = state[f"dense.{key}"] if entry.rank is None else state[f"b.{key}"] @ state[f"a.{key}"]
        weight[np.concatenate([np.arange(*span) for span in entry.rows])] += change
        put(module, weight)
    sign = -1.0 if adapter.config.plus else 1.0
    for layer, heads in enumerate(adapter.config.heads):
        if not heads:
            continue
        operator = adapter.operator(layer)
        module = stock.get_submodule(names[id(base.layout.projections[layer])])
        w_o = outputs_first(module).T
        w_o_HEM = w_o.reshape(base.layout.heads, base.layout.value_width, -1)
        selected = np.isin(np.arange(base.layout.heads), heads)
        strength = sign * float(operator.lambda_learn)
        new = reference.merged_output_projection(w_o_HEM, operator.w_d.double().numpy(), strength, selected)
        put(module, new.reshape(w_o.shape).T)
    return stock


def outputs_first(module: torch.nn.Module) -> np.ndarray:
    """A copy of a projection's weight as [out, in], float64."""
    weight = module.weight.detach().double().numpy()
    return (weight if isinstance(module, torch.nn.Linear) else weight.T).copy()


def put(module: torch.nn.Module, weight: np.ndarray) -> None:
    """Inverse of `outputs_first`."""
    new = torch.from_numpy(np.ascontiguousarray(weight if isinstance(module, torch.nn.Linear) else weight.T))
    module.weight.data.copy_(new)
