"""Needle prompts as scored by `dexviz.questions`: accuracy and margin, over all prompts, by length and by depth.

Axes: C candidates, P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dexviz.bootstrap import Bootstrap, Comparison
from dexviz.needles import Needle


@dataclass(frozen=True)
class NeedleRow:
    """Results over some of the prompts: all, those of one length, or those of one depth."""

    length: int | None
    """Tokens; None: all lengths."""
    depth: float | None
    """Share of the prose; None: all depths."""
    prompts: int
    accuracy: Comparison
    """Share of prompts whose right answer is likelier than each wrong one."""
    margin: Comparison
    """Log-likelihood of the right answer less that of the likeliest wrong one, mean in nats."""


def summarise(
    needles: Sequence[Needle], base_PC: np.ndarray, variant_PC: np.ndarray | None, bootstrap: Bootstrap
) -> tuple[NeedleRow, ...]:
    """Accuracy and margin over all prompts, then by length, then by depth, with intervals over prompts."""
    lengths = np.array([needle.length for needle in needles])
    depths = np.array([needle.depth for needle in needles])
    views = [base_PC] if variant_PC is None else [base_PC, variant_PC]
    margins = [scores[:, 0] - scores[:, 1:].max(axis=1) for scores in views]

    def row(chosen: np.ndarray, length: int | None = None, depth: float | None = None) -> NeedleRow:
        own = [margin[chosen] for margin in margins]
        right = [(margin > 0).astype(np.float64) for margin in own]
        accuracy, margin = (
            bootstrap.compare(values[0], values[1] if len(values) > 1 else None, unit="prompt") for values in (right, own)
        )
        return NeedleRow(length, depth, int(chosen.sum()), accuracy, margin)

    return (
        row(np.ones(len(needles), dtype=bool)),
        *(row(lengths == length, length=int(length)) for length in np.unique(lengths)),
        *(row(depths == depth, depth=float(depth)) for depth in np.unique(depths)),
    )
