"""Evaluating a base and its variant: held-out loss, KL from the base, needle task, speed, with what is needed to repeat them.

Losses are nats a predicted token, perplexity is their exponential, KL is KL(base‖variant) of next-token distributions. Every
difference is variant − base on the same units, with a paired bootstrap interval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dexviz.bootstrap import Bootstrap, Comparison, Interval
from dexviz.errors import EvaluationError
from dexviz.heldout import BLOCK, MAX_BLOCK, Pieces, held_out_pieces, measure
from dexviz.models import ModelPair, View, no_tokenizer
from dexviz.needle_scores import NeedleRow, summarise
from dexviz.needles import DEPTHS, DISTRACTORS, LENGTHS, Needle, NeedleMaker
from dexviz.provenance import of_pair, second_view
from dexviz.questions import Progress, score, stage
from dexviz.speed import ROUNDS, TOKENS, Speed, measure_speed


@dataclass(frozen=True)
class EvalConfig:
    """What is measured, and on what."""

    data: str | None = None
    """A text of `corpora.documents`; None for the held-out protocol: the whole 2026 address."""
    column: str = "text"
    """Where JSONL lines and data sets keep the text."""
    split: str = "train"
    """Which part of a data set of the hub."""
    documents: int | None = None
    """Read at most this many documents of `data`; None for all."""
    block: int = BLOCK
    """Tokens of a block, 2 to 1,024; the protocol's is 256."""
    needles: int = 4
    """Needle prompts for each length and depth; 0 leaves the task out."""
    lengths: tuple[int, ...] = LENGTHS
    """Tokens of the needle prompts, cut to the models' context."""
    depths: tuple[float, ...] = DEPTHS
    """Where the needle is hidden: 0 = at the start of the prose, 1 = at its end."""
    speed: bool = True
    """Whether forward passes are timed."""
    rounds: int = ROUNDS
    """Rounds of timing, at least 1."""
    resamples: int = 2000
    """Bootstrap resamples."""
    level: float = 0.95
    """Coverage of the intervals."""
    seed: int = 0
    """Fixes needle prompts, resamples, and the documents that a limit keeps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "depths", tuple(self.depths))
        for sound, expected, got in (
            (2 <= self.block <= MAX_BLOCK, f"blocks of 2 to {MAX_BLOCK:,} tokens", self.block),
            (self.documents is None or self.documents >= 1, "at least one document", self.documents),
            (self.needles >= 0, "a number of needle prompts", self.needles),
            (not self.needles or (self.lengths and min(self.lengths) >= 1), "needle lengths in tokens", self.lengths),
            (not self.needles or self.depths, "at least one needle depth", self.depths),
            (all(0 <= depth <= 1 for depth in self.depths), "needle depths between 0 and 1", self.depths),
            (self.rounds >= 1, "at least one round of timing", self.rounds),
            (self.seed >= 0, "a seed of 0 or more", self.seed),
        ):
            if not sound:
                raise EvaluationError(expected, str(got), "Correct the settings of the evaluation.")
        self.bootstrap()

    def bootstrap(self) -> Bootstrap:
        """How intervals are drawn."""
        return Bootstrap(self.resamples, self.level, self.seed)


@dataclass(frozen=True)
class HeldOutResult:
    """Losses on a text, with what was read of it."""

    source: str
    block: int
    unit: str
    """What the bootstrap draws: "document", or "block" where the text is one document."""
    documents: int
    blocks: int
    """Pieces read, short last pieces of documents included."""
    tokens: int
    """Predicted tokens."""
    skipped_documents: int
    """Documents of fewer than two tokens."""
    unread_tokens: int
    """Tokens of the other documents that no block holds."""
    loss: Comparison
    """Nats a predicted token."""
    perplexity: Comparison
    """exp(loss); its change is the ratio variant / base − 1, in percent."""
    loss_percent: Interval | None
    """Change of the loss in percent of the base's."""
    kl: Interval | None
    """Mean KL(base‖variant), nats a predicted token; None without a variant or without a common vocabulary."""
    kl_max: float | None
    """Largest KL of one token, nats."""


@dataclass(frozen=True)
class NeedleResult:
    """The needle task on the same prompts in both views."""

    prompts: int
    candidates: int
    """Answers to choose from; chance is one in as many."""
    rows: tuple[NeedleRow, ...]
    """All prompts, then by length, then by depth."""


@dataclass(frozen=True)
class Evaluation:
    """Everything measured about a pair. `to_json` is plain data; `table` is for people."""

    config: EvalConfig
    held_out: HeldOutResult
    needles: NeedleResult | None
    speed: Speed | None
    parameters: dict[str, int | None] = field(default_factory=dict)
    """"base", "adapter", "variant": numbers of weights; None where there is none."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Models, fingerprints, dtype, device, versions, date, and the seconds that the evaluation took."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; every number is finite, what was not measured is null."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    def table(self) -> str:
        """The results as lines of text."""
        from dexviz.evaluation_table import table

        return table(self)


def evaluate(pair: ModelPair, config: EvalConfig | None = None, progress: Progress | None = None) -> Evaluation:
    """Measure a base and its variant; without a variant, the base alone.

    Raises:
        EvaluationError: the text has no document of two tokens, or losses are not finite.
        PromptError: the models' context is too short for a needle prompt.
        TrainingError: the text cannot be read.
        ModelError: there is no tokenizer, or base and variant have different ones.
    """
    config = config or EvalConfig()
    start = time.perf_counter()
    pair.check_tokenizers()
    variant = second_view(pair)
    context = min(pair.base.loaded.max_tokens, pair.variant.loaded.max_tokens)
    pieces = held_out_pieces(
        pair.base,
        min(config.block, context),
        data=config.data,
        column=config.column,
        split=config.split,
        limit=config.documents,
        seed=config.seed,
    )
    prompts = _needles(pair.base, context, config)
    held_out = _held_out(pair.base, variant, pieces, config.bootstrap(), stage(progress, "held-out loss"))
    needles = _score(pair.base, variant, prompts, config.bootstrap(), progress) if prompts else None
    speed = None
    if config.speed:
        step = stage(progress, "speed")
        speed = measure_speed(pair, tokens=min(TOKENS, context), rounds=config.rounds, seed=config.seed, progress=step)
    provenance = {**of_pair(pair), "seconds": round(time.perf_counter() - start, 3)}
    return Evaluation(config, held_out, needles, speed, _parameters(pair), provenance)


def _held_out(
    base: View, variant: View | None, pieces: Pieces, bootstrap: Bootstrap, progress: Callable[[int, int], None] | None
) -> HeldOutResult:
    totals = measure(base, variant, pieces, progress)
    tokens, losses = pieces.by_unit(totals.tokens), pieces.by_unit(totals.base)
    other = None if totals.variant is None else pieces.by_unit(totals.variant)
    loss = bootstrap.compare(losses, other, tokens, unit=pieces.unit)
    return HeldOutResult(
        source=pieces.source,
        block=pieces.block,
        unit=pieces.unit,
        documents=pieces.documents,
        blocks=len(pieces.ids),
        tokens=int(totals.tokens.sum()),
        skipped_documents=pieces.skipped,
        unread_tokens=pieces.unread,
        loss=loss,
        perplexity=Comparison(
            loss.base.map(np.exp),
            None if loss.variant is None else loss.variant.map(np.exp),
            None if loss.change is None else loss.change.map(lambda nats: 100 * np.expm1(nats)),
        ),
        loss_percent=None if other is None else bootstrap.ratio(100 * (other - losses), losses, unit=pieces.unit),
        kl=None if totals.kl is None else bootstrap.ratio(pieces.by_unit(totals.kl), tokens, unit=pieces.unit),
        kl_max=totals.kl_max,
    )


def _needles(base: View, context: int, config: EvalConfig) -> list[Needle]:
    if base.loaded.tokenizer is None:
        raise no_tokenizer(base.loaded)
    if not config.needles:
        return []
    maker = NeedleMaker(base.loaded.tokenizer, context)
    return maker.grid(config.lengths, config.depths, config.needles, config.seed)


def _score(
    base: View, variant: View | None, needles: list[Needle], bootstrap: Bootstrap, progress: Progress | None
) -> NeedleResult:
    base_PC = score(base, needles, stage(progress, "needles, base"))
    variant_PC = None if variant is None else score(variant, needles, stage(progress, "needles, variant"))
    return NeedleResult(len(needles), DISTRACTORS + 1, summarise(needles, base_PC, variant_PC, bootstrap))


def _parameters(pair: ModelPair) -> dict[str, int | None]:
    base, adapter = sum(p.numel() for p in pair.base.model.parameters()), pair.variant.adapter
    added = None if adapter is None else sum(p.numel() for p in adapter.parameters())
    variant = second_view(pair)
    total = None if variant is None else sum(p.numel() for p in variant.model.parameters()) + (added or 0)
    return {"base": base, "adapter": added, "variant": total}
