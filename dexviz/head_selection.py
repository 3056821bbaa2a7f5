"""Choosing the heads that DEX adapts: measured on calibration text, chosen by a criterion, kept as a plan.

The same model, text, settings and seed give the same plan, byte for byte. Selection: arXiv 2505.16333, App. B.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from jaxtyping import Float

from dexviz.blocks import Source, read_blocks
from dexviz.corpora import SOTU
from dexviz.dex import top_heads
from dexviz.errors import AdapterError, TrainingError
from dexviz.head_plan import CRITERIA, HeadPlan, text_digest
from dexviz.head_scores import gradient_importance, mean_entropy
from dexviz.models import LoadedModel, View, differential
from dexviz.selfcheck import Layout

MEASURES = {"entropy": mean_entropy, "importance": gradient_importance}
OnProgress = Callable[[str, int, int], None]
"""Called with (what is measured, blocks done, blocks in all)."""
_HEAD = re.compile(r"L(\d{1,6})[·.]?H(\d{1,6})", re.IGNORECASE)


@dataclass(frozen=True)
class SelectionConfig:
    """How heads are selected."""

    data: str = SOTU
    """Corpus: "sotu", a text file or folder, a .jsonl file, or a data set id."""
    column: str = "text"
    """Where JSONL lines and data sets keep the text."""
    block: int = 256
    """Tokens a calibration block."""
    blocks: int = 8
    """Calibration blocks, as `calibration_blocks` of `train`."""
    seed: int = 0
    """Order of the text: 0 ≤ seed < 2³²."""
    criterion: str = "entropy"
    """"entropy": highest mean attention entropy; "importance": lowest gradient importance; "all"; or a list, "L0H1,L3H2"."""
    per_layer: int | None = None
    """Heads of each layer; None for max(1, H // 2). Only with "entropy" and "importance"."""
    measure: tuple[str, ...] = ("entropy", "importance")
    """What the plan reports; what the criterion needs is measured in any case."""

    def __post_init__(self) -> None:
        if self.block < 2 or self.blocks < 1:
            raise TrainingError("block ≥ 2 and blocks ≥ 1", f"block {self.block}, blocks {self.blocks}", "Change them.")
        if not 0 <= self.seed < 2**32:
            raise TrainingError("0 ≤ seed < 2³²", str(self.seed), "Choose another seed.")
        if unknown := set(self.measure) - set(MEASURES):
            raise TrainingError(f"measures out of {', '.join(MEASURES)}", ", ".join(sorted(unknown)), "Change `measure`.")
        if self.criterion not in MEASURES:
            if self.per_layer is not None:
                got = f"{self.per_layer} heads a layer with criterion {self.criterion!r}"
                raise AdapterError('a number of heads only with "entropy" or "importance"', got, "Leave one of them out.")
            self.named()

    @property
    def kind(self) -> str:
        """The criterion as a plan has it: a key of CRITERIA."""
        return self.criterion if self.criterion in CRITERIA and self.criterion != "list" else "list"

    def named(self) -> tuple[tuple[int, int], ...]:
        """The (layer, head) pairs of an explicit list; empty with any other criterion.

        Raises:
            AdapterError: neither a known criterion nor a list of heads.
        """
        if self.kind != "list":
            return ()
        found = [_HEAD.fullmatch(part.strip()) for part in self.criterion.split(",")]
        pairs = tuple((int(match[1]), int(match[2])) for match in found if match)
        if len(pairs) < len(found) or len(set(pairs)) < len(pairs):
            raise AdapterError(
                'the criterion "entropy", "importance" or "all", or different heads like "L0H1,L3H2"',
                repr(self.criterion[:80]),
                "Correct it.",
            )
        return pairs


def select_heads(loaded: LoadedModel, config: SelectionConfig | None = None, progress: OnProgress | None = None) -> HeadPlan:
    """Measure the heads of a model on calibration text and choose those that DEX is to adapt. The model stays as it is.

    The text is that on which `train` with the same data, block and seed selects its heads.

    Raises:
        AdapterError: a DIFF Transformer, or heads that the model does not have.
        TrainingError: the corpus is unusable or too short, a block is longer than the model's context, or a measurement is not
            finite.
        ModelError: the model has no tokenizer.
    """
    config = config or SelectionConfig()
    if loaded.layout.differential:
        raise differential(loaded)
    _check_heads(loaded, config)
    source = Source(config.data, config.column, config.block, config.seed)
    blocks = read_blocks(loaded, source, calibration=config.blocks).calibration
    base = View("base", loaded, title=loaded.name)
    wanted = [name for name in MEASURES if name in (*config.measure, config.criterion)]
    measured = {name: MEASURES[name](base, blocks, _named_progress(name, progress)) for name in wanted}
    return HeadPlan(
        heads=_chosen(loaded.layout, config, measured),
        query_heads=loaded.layout.heads,
        criterion=config.kind,
        per_layer=_per_layer(loaded.layout, config),
        entropy=measured.get("entropy"),
        importance=measured.get("importance"),
        data=config.data,
        column=config.column,
        seed=config.seed,
        block=config.block,
        blocks=len(blocks),
        text_sha256=text_digest(blocks),
        base_model=loaded.name,
        base_fingerprint=loaded.fingerprint,
        versions={
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": loaded.model.device.type,
        },
    )


def best_heads(
    layout: Layout, criterion: str, score_LH: Float[np.ndarray, "L H"], per_layer: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The `per_layer` heads of each layer with the highest entropy or the lowest importance; none where it has no attention.

    Args:
        criterion: "entropy" or "importance".
        score_LH: that measure, float32 [L, H].
        per_layer: None for max(1, H // 2).

    Raises:
        AdapterError: the layers have not that many heads.
    """
    score = torch.from_numpy(np.nan_to_num(score_LH))
    heads = top_heads(score if criterion == "entropy" else -score, per_layer)
    return tuple(chosen if layer in layout.modules else () for layer, chosen in enumerate(heads))


def _chosen(layout: Layout, config: SelectionConfig, measured: dict[str, np.ndarray]) -> tuple[tuple[int, ...], ...]:
    if config.kind in MEASURES:
        return best_heads(layout, config.kind, measured[config.kind], config.per_layer)
    if config.kind == "all":
        every = tuple(range(layout.heads))
        return tuple(every if layer in layout.modules else () for layer in range(layout.layers))
    named = config.named()
    return tuple(tuple(sorted(h for la, h in named if la == layer)) for layer in range(layout.layers))


def _per_layer(layout: Layout, config: SelectionConfig) -> int | None:
    if config.kind not in MEASURES:
        return None
    return max(1, layout.heads // 2) if config.per_layer is None else config.per_layer


def _check_heads(loaded: LoadedModel, config: SelectionConfig) -> None:
    """Refuse heads that the model does not have before anything is measured."""
    layout = loaded.layout
    count = _per_layer(layout, config)
    if count is not None and not 1 <= count <= layout.heads:
        raise AdapterError(f"1 to {layout.heads} heads a layer", str(count), "Change the number of selected heads.")
    for layer, head in config.named():
        if layer not in layout.modules or head >= layout.heads:
            raise AdapterError(
                f"heads L0 to L{layout.layers - 1}, H0 to H{layout.heads - 1}, in layers that have softmax attention",
                f"L{layer}H{head}",
                f"Choose heads that {loaded.name} has.",
            )


def _named_progress(name: str, progress: OnProgress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
