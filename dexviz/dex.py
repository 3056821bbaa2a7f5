"""DEX, Differential Extension  (arXiv 2505.16333, Eq. 3-5, Fig. 9, App. B.3 and E).

    O'_h = O_h − λ_l(t) · 1[h ∈ H_l] · O_h W_D,l
    λ_l(t) = (1 − α)(t/T) λ_init,l + α λ_learn,l,   α = min(1, t/T)
    λ_init,l = 0.8 − 0.6 · exp(−0.3 · l)            λ_learn starts at 0

Symbols: l layer, h query head, H_l the layer's selected heads, W_D one E × E matrix a layer shared by its selected heads,
t training step, T annealing length. At t = 0 the variant equals the base bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dexviz.delta_weights import Deltas
from dexviz.errors import AdapterError
from dexviz.kernels.dex import dex_output


@dataclass(frozen=True)
class DexConfig:
    """What a DEX adapter is, apart from its weights."""

    heads: tuple[tuple[int, ...], ...]
    """Query heads that are adapted, one tuple a layer; empty where a layer has none."""
    width: int
    """Value width E of a head."""
    query_heads: int
    """Query heads H a layer."""
    lambda_init: float | None = None
    """λ_init of every layer; None for the depth schedule 0.8 − 0.6 · exp(−0.3 · l)."""
    steps: int = 0
    """Annealing length T in steps; 0 means that λ = λ_learn from the start."""
    plus: bool = False
    """True adds λ O W_D instead of subtracting it (method "dex-plus", a control): λ as subtracted is then negative."""

    def __post_init__(self) -> None:
        heads = tuple(tuple(sorted({int(h) for h in layer})) for layer in self.heads)
        object.__setattr__(self, "heads", heads)
        for layer, chosen in enumerate(heads):
            if chosen and not (chosen[0] >= 0 and chosen[-1] < self.query_heads):
                raise AdapterError(
                    f"heads within 0..{self.query_heads - 1}",
                    f"{list(chosen)} in layer {layer}",
                    "Choose heads that the model has.",
                )
        if self.width < 1 or self.steps < 0:
            raise AdapterError(
                "a positive width and steps ≥ 0",
                f"width {self.width}, steps {self.steps}",
                "Correct the DEX configuration.",
            )

    def initial_lambda(self, layer: int) -> float:
        """λ_init of a layer."""
        return 0.8 - 0.6 * math.exp(-0.3 * layer) if self.lambda_init is None else self.lambda_init

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; `plus` only where it is set, so that plain DEX reads as it always did."""
        return {name: value for name, value in asdict(self).items() if name != "plus" or value}

    @classmethod
    def from_json(cls, data: Any) -> DexConfig:
        """Inverse of `to_json`.

        Raises:
            AdapterError: a field is missing, unknown, of the wrong type or out of range.
        """
        try:
            heads = tuple(tuple(layer) for layer in data["heads"])
            whole = {name: data.get(name, 0) for name in ("width", "query_heads", "steps")}
            wrong = [f"{name} {value!r}" for name, value in whole.items() if type(value) is not int]
            wrong += [f"head {head!r}" for layer in heads for head in layer if type(head) is not int]
            strength = data.get("lambda_init")
            if strength is not None and not (type(strength) in (int, float) and math.isfinite(strength)):
                wrong.append(f"lambda_init {strength!r}")
            if type(data.get("plus", False)) is not bool:
                wrong.append(f"plus {data['plus']!r}")
            if wrong:
                raise TypeError(", ".join(wrong[:3]))
            return cls(**{**data, "heads": heads})
        except (KeyError, TypeError, OverflowError) as error:
            reason = f"none of its field {error}" if isinstance(error, KeyError) else str(error)
            raise AdapterError("a DEX configuration", reason, "Use an adapter that dexviz wrote.") from error


@dataclass
class Annealing:
    """Where training stands on the λ schedule: step t of T. T = 0 stands for a finished schedule."""

    step: int
    steps: int

    @property
    def alpha(self) -> float:
        return 1.0 if self.steps == 0 else min(1.0, self.step / self.steps)


class DexOperator(nn.Module):
    """DEX in one layer: W_D, λ, and the heads they act on."""

    def __init__(self, config: DexConfig, layer: int, annealing: Annealing) -> None:
        super().__init__()
        self.layer, self.annealing = layer, annealing
        self.lambda_init, self.plus = config.initial_lambda(layer), config.plus
        self.w_d = nn.Parameter(torch.empty(config.width, config.width))
        self.lambda_learn = nn.Parameter(torch.zeros(()))
        self.heads: Tensor
        self.register_buffer("heads", torch.tensor(config.heads[layer], dtype=torch.long), persistent=False)
        nn.init.kaiming_uniform_(self.w_d, a=math.sqrt(5))

    def lam(self) -> Tensor:
        """λ as O' = O − λ O W_D takes it, a scalar in float32: λ_l(t), or −λ_l(t) for "dex-plus"."""
        alpha = self.annealing.alpha
        lam: Tensor = self.lambda_learn
        if alpha < 1.0:
            lam = (1 - alpha) * alpha * self.lambda_init + alpha * lam
        return -lam if self.plus else lam

    def forward(self, o_BHNE: Tensor) -> Tensor:
        """O' from O, [B, H, N, E]."""
        return dex_output(o_BHNE, self.w_d, self.lam(), self.heads)


class DexAdapter(nn.Module):
    """What is trained of one model: the DEX operators of its layers, changes of its projections, or both.

    Weights stay in float32 and are cast where they are used.

    Raises:
        AdapterError: neither a selected head nor a changed projection.
    """

    def __init__(self, config: DexConfig, deltas: Deltas | None = None) -> None:
        super().__init__()
        self.config = config
        self.annealing = Annealing(step=0, steps=config.steps)
        layers = [i for i, heads in enumerate(config.heads) if heads]
        if not layers and deltas is None:
            raise AdapterError(
                "at least one selected head, or changed projections", "neither", "Select heads, or train projections."
            )
        self.operators = nn.ModuleDict({str(i): DexOperator(config, i, self.annealing) for i in layers})
        self.deltas = deltas

    @property
    def method(self) -> str:
        """ "dex", "dex-plus", "attention-only" (projections alone), or "lora" (the same, all of low rank)."""
        if len(self.operators):
            return "dex-plus" if self.config.plus else "dex"
        assert self.deltas is not None, "an adapter has heads or changed projections"
        return "lora" if self.deltas.low_rank else "attention-only"

    @property
    def trained(self) -> tuple[str, ...]:
        """What the adapter holds: "W_D" and "lambda_learn", and "W_K", "W_V", "W_O" where they are changed."""
        dex = ("W_D", "lambda_learn") if len(self.operators) else ()
        return (*dex, *(f"W_{part.upper()}" for part in (self.deltas.parts if self.deltas is not None else ())))

    def operator(self, layer: int) -> DexOperator | None:
        """The layer's operator, or None where no head of it is selected."""
        return cast("DexOperator | None", self.operators._modules.get(str(layer)))

    def lambdas(self) -> list[float]:
        """λ_l(t) of every layer, negative for "dex-plus"; 0 where a layer has no operator."""
        operators = [self.operator(layer) for layer in range(len(self.config.heads))]
        return [float(op.lam().detach()) if op is not None else 0.0 for op in operators]

    def spectra(self) -> tuple[tuple[float, ...], ...]:
        """Singular values of each layer's W_D, largest first; empty for a layer without DEX."""
        operators = [self.operator(layer) for layer in range(len(self.config.heads))]
        return tuple(
            tuple(torch.linalg.svdvals(op.w_d.detach().double().cpu()).tolist()) if op is not None else () for op in operators
        )

    def set_step(self, step: int) -> None:
        """Move the λ schedule to step t of T."""
        self.annealing.step = step


def top_heads(score_LH: Float[Tensor, "L H"], per_layer: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The `per_layer` heads of each layer with the highest score; default max(1, H // 2). Ties go to the lower head.

    Args:
        score_LH: [L, H], for example the mean attention entropy on calibration text in nats.
    """
    count = max(1, score_LH.shape[1] // 2) if per_layer is None else per_layer
    if not 1 <= count <= score_LH.shape[1]:
        raise AdapterError(f"1 to {score_LH.shape[1]} heads a layer", str(count), "Change the number of selected heads.")
    order = torch.argsort(score_LH, dim=1, descending=True, stable=True)[:, :count]
    return tuple(tuple(sorted(row.tolist())) for row in order)


def gains(
    v_SME: Float[Tensor, "S M E"], w_EE: Float[Tensor, "E E"], lam: float, metric_SEE: Float[Tensor, "S E E"] | None = None
) -> tuple[Float[Tensor, "S M"], Float[Tensor, "S M"]]:
    """Least-squares gain ρ of each adapted value on the value itself, and what it leaves unexplained, ε.

    ρ_j = 1 − λ ⟨v_j W, v_j⟩ / ‖v_j‖²,    ε_j = ‖v_j (I − λW) − ρ_j v_j‖ / ‖v_j (I − λW)‖

    Args:
        v_SME: values of S heads over M tokens.
        w_EE: W_D.
        metric_SEE: inner product ⟨a, b⟩ = a G bᵀ per head; W_O,h W_O,hᵀ takes both vectors through the output
            projection, into residual space. None: the plain inner product, value space.

    Returns:
        (ρ, ε), each [S, M]; a value of length zero has ρ = 1 and ε = 0.
    """

    def inner(a_SME: Tensor, b_SME: Tensor) -> Tensor:
        return ((a_SME if metric_SEE is None else a_SME @ metric_SEE.to(a_SME.dtype)) * b_SME).sum(dim=-1)

    moved_SME = v_SME @ w_EE.to(v_SME.dtype)
    square = inner(v_SME, v_SME)
    alive = square > 0
    rho = torch.where(alive, 1 - lam * inner(moved_SME, v_SME) / square.where(alive, 1.0), 1.0)
    adapted = v_SME - lam * moved_SME
    left = adapted - rho[..., None] * v_SME
    norm = inner(adapted, adapted).clamp(min=0).sqrt()
    residue = inner(left, left).clamp(min=0).sqrt() / norm.where(norm > 0, 1.0)
    return rho, torch.where(norm > 0, residue, 0.0)


def select(heads: Sequence[Sequence[int]], layers: int, query_heads: int) -> Tensor:
    """Selected heads as a bool [L, H] table."""
    table = torch.zeros(layers, query_heads, dtype=torch.bool)
    for layer, chosen in enumerate(heads):
        table[layer, list(chosen)] = True
    return table
