"""Which heads `train` adapts, why, and how that was measured. On disk: `dexviz.plan_file`. Needs no torch.

Axes: L layers, H query heads.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dexviz.errors import AdapterError

if TYPE_CHECKING:
    from dexviz.models import LoadedModel

FORMAT = "dexviz-head-plan"
VERSION = 1
CRITERIA = {
    "entropy": "those of highest mean attention entropy",
    "importance": "those of lowest gradient importance",
    "all": "all of them",
    "list": "those that were named",
}
"""By what heads are chosen, in words."""
AGAIN = "Make it again with `python -m dexviz select-heads`."
_PER_LINE = 5


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """Selected heads of every layer with what was measured to select them."""

    heads: tuple[tuple[int, ...], ...]
    """Selected query heads, one tuple a layer; empty where none is."""
    query_heads: int
    """Query heads H a layer."""
    criterion: str
    """A key of CRITERIA."""
    per_layer: int | None
    """Heads a layer that were asked for; None where the criterion is "all" or "list"."""
    entropy: np.ndarray | None
    """Mean attention entropy in nats, float32 [L, H], NaN in layers without attention; None where it was not measured."""
    importance: np.ndarray | None
    """Mean |∂loss/∂m_h| of a head gate in nats, float32 [L, H]; NaN and None likewise."""
    data: str
    """Corpus of the calibration text."""
    column: str
    """Where JSONL lines and data sets keep the text."""
    seed: int
    """Seed of the order of the text."""
    block: int
    """Tokens a calibration block."""
    blocks: int
    """Calibration blocks."""
    text_sha256: str
    """Checksum of the calibration blocks' token ids."""
    base_model: str
    base_fingerprint: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and transformers, and the type and device that were computed on."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise AdapterError("a plan of heads that is consistent", problem, AGAIN)

    @property
    def layers(self) -> int:
        return len(self.heads)

    @property
    def count(self) -> int:
        """Selected heads in all layers."""
        return sum(map(len, self.heads))

    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of entropy and importance over all heads; None where one is not measured or constant."""
        if self.entropy is None or self.importance is None:
            return None
        known = np.isfinite(self.entropy) & np.isfinite(self.importance)
        pairs = np.stack([self.entropy[known], self.importance[known]])
        if pairs.shape[1] < 2 or not (np.ptp(pairs, axis=1) > 0).all():
            return None
        from scipy.stats import spearmanr

        return float(spearmanr(*pairs).statistic)

    def table(self) -> str:
        """Text to read: one line a layer, each selected head with its entropy and importance."""
        source = f"{self.blocks} blocks of {self.block} tokens of {self.data}, seed {self.seed}"
        lines = [
            f"{self.base_model}: {self.count} of {self.layers * self.query_heads} heads, {CRITERIA[self.criterion]}",
            f"measured on {source}; after each head: entropy in nats, importance in 1e-3 nats",
            "",
            *(line for layer in range(self.layers) for line in self._rows(layer)),
        ]
        correlation = self.rank_correlation()
        if correlation is not None:
            lines += ["", f"rank correlation (Spearman) of entropy and importance over all heads: {correlation:+.3f}"]
        return "\n".join(lines)

    def _rows(self, layer: int) -> Iterator[str]:
        digits = len(str(self.query_heads - 1))
        cells = [
            f"H{h:<{digits}} {_cell(self.entropy, layer, h, 1)} {_cell(self.importance, layer, h, 1e3)}"
            for h in self.heads[layer]
        ]
        for start in range(0, max(1, len(cells)), _PER_LINE):
            label = f"L{layer:<{len(str(self.layers - 1))}}"
            line = "   ".join(cells[start : start + _PER_LINE]) or "no head"
            yield f"{label if start == 0 else ' ' * len(label)}  {line}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form, with NaN as null; the same plan always gives the same text."""
        plain = {name: getattr(self, name) for name in PLAIN}
        return {
            "format": FORMAT,
            "version": VERSION,
            "heads": [list(layer) for layer in self.heads],
            **plain,
            "entropy": _listed(self.entropy),
            "importance": _listed(self.importance),
            "rank_correlation": self.rank_correlation(),
            "versions": dict(self.versions),
        }


PLAIN: dict[str, type] = {
    "query_heads": int,
    "criterion": str,
    "per_layer": int,
    "data": str,
    "column": str,
    "seed": int,
    "block": int,
    "blocks": int,
    "text_sha256": str,
    "base_model": str,
    "base_fingerprint": str,
}
"""Fields of a plan that JSON has as they are."""


def check_plan(plan: HeadPlan, loaded: LoadedModel, *, force: bool = False) -> None:
    """Prove that a plan was made for the model.

    Args:
        force: turn a fingerprint mismatch into a warning; layers and heads must match all the same.

    Raises:
        AdapterError: another model's plan, heads in layers that have no attention, or a DIFF Transformer.
    """
    from dexviz.models import differential

    layout = loaded.layout
    if layout.differential:
        raise differential(loaded)
    if (plan.layers, plan.query_heads) != (layout.layers, layout.heads):
        raise AdapterError(
            f"a plan for {layout.layers} layers of {layout.heads} heads ({loaded.name})",
            f"one for {plan.layers} layers of {plan.query_heads} heads ({plan.base_model})",
            AGAIN,
        )
    if silent := [layer for layer, chosen in enumerate(plan.heads) if chosen and layer not in layout.modules]:
        raise AdapterError(
            f"heads in layers of {loaded.name} that have softmax attention", f"heads in layer {silent[0]}", AGAIN
        )
    if plan.base_fingerprint == loaded.fingerprint:
        return
    error = AdapterError(
        f"a plan made for exactly these weights of {loaded.name}",
        f"one for {plan.base_model}, whose fingerprint differs",
        "Make it again with select-heads, or use --force (force=True) if you know that the weights are close.",
    )
    if not force:
        raise error
    warnings.warn(str(error), stacklevel=2)


def text_digest(blocks: np.ndarray) -> str:
    """SHA-256 of blocks of token ids."""
    return hashlib.sha256(np.ascontiguousarray(blocks, dtype="<i8").tobytes()).hexdigest()


def _problems(plan: HeadPlan) -> Iterator[str]:
    """What contradicts itself in a plan."""
    if plan.criterion not in CRITERIA:
        yield f"criterion {plan.criterion[:40]!r}"
    for name in ("query_heads", "block", "blocks"):
        if getattr(plan, name) < 1:
            yield f"{name} {getattr(plan, name)}"
    if not plan.count:
        yield "no selected head"
    for layer, chosen in enumerate(plan.heads):
        if list(chosen) != sorted(set(chosen)):
            yield f"heads {str(list(chosen))[:60]} of layer {layer}, which are not in order"
        if chosen and not (chosen[0] >= 0 and chosen[-1] < plan.query_heads):
            yield f"heads {str(list(chosen))[:60]} of layer {layer}, which has heads 0 to {plan.query_heads - 1}"
    for name in ("entropy", "importance"):
        table = getattr(plan, name)
        if table is not None and (table.shape != (plan.layers, plan.query_heads) or np.isinf(table).any()):
            yield f"a table of {name} of shape {table.shape}, or with infinity in it"


def _listed(table: np.ndarray | None) -> list[list[float | None]] | None:
    """Shortest decimals that give the float32 values back; None for NaN."""
    if table is None:
        return None
    return [[float(str(x)) if np.isfinite(x) else None for x in row] for row in table.astype(np.float32)]


def _cell(table: np.ndarray | None, layer: int, head: int, unit: float) -> str:
    return "    –" if table is None else f"{unit * table[layer, head]:5.2f}"
