"""A battery of needle prompts on both views: SNR by length and depth of the needle, per head and averaged, with intervals.

Prose: facts in held-out text (`dexviz.needles`). A model of the retrieval language gets prompts of that language instead
(`dexviz.retrieval`). Axes: P prompts, L layers, S score heads, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np

from dexviz import provenance, retrieval
from dexviz.bootstrap import Bootstrap, Comparison, Interval
from dexviz.errors import Cancelled, PromptError
from dexviz.models import ModelPair, View, no_tokenizer
from dexviz.needle_noise import heads_noise
from dexviz.needles import NeedleMaker
from dexviz.noise_records import (
    MEASURES,
    BatteryPrompt,
    BatteryReport,
    BatteryRequest,
    BatteryRow,
    HeadComparison,
    HeadIntervals,
    HeadNoise,
    MarkedTokens,
    Span,
)
from dexviz.questions import log_likelihoods
from dexviz.records import Tokens, ViewName

LENGTHS = (256, 512)
RETRIEVAL_FACTS = (4, 16, 32, 48)
"""Facts of retrieval prompts, unless lengths are given: what the shipped pair was trained on."""
_SIMILARITY = 0.5
OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how many of how many steps."""


@dataclass(frozen=True, eq=False)
class _Made:
    """A prompt of the battery with its answers, the right one first; a `dexviz.questions.Question`."""

    ids: np.ndarray
    candidates: tuple[np.ndarray, ...]
    needle: Span
    question: Span
    length: int
    depth: float
    seed: tuple[int, ...]
    kind: str

    def read(self) -> MarkedTokens:
        n = len(self.ids)
        tokens = Tokens(self.ids, tuple(map(str, self.ids)), "", np.zeros((n, 2), dtype=np.int64), np.zeros(n, dtype=bool))
        return MarkedTokens(tokens, (self.needle,), self.question, (n - 1,))


def noise_battery(
    pair: ModelPair,
    request: BatteryRequest | None = None,
    *,
    bootstrap: Bootstrap | None = None,
    progress: OnProgress | None = None,
    cancel: Event | None = None,
) -> BatteryReport:
    """Noise, SNR and answers on a grid of needle prompts, base and variant.

    Args:
        request: lengths, depths, prompts a cell, seed, score and space.
        bootstrap: how intervals are drawn.
        progress: called after each prompt of each view.
        cancel: set it from another thread to stop within a layer.

    Raises:
        PromptError: lengths that hold no needle prompt, or are longer than a model reads.
        ModelError: no tokenizer, or two different ones, which cannot share prompts of equal length.
        Cancelled: `cancel` was set.
    """
    request, cancel = request or BatteryRequest(), cancel or Event()
    pair.check_tokenizers()
    made = prompts_of(pair, request)
    second = provenance.second_view(pair)
    views = [pair.base] if second is None else [pair.base, second]
    steps, done = len(made) * len(views), 0
    heads: dict[str, list[HeadNoise]] = {view.name: [] for view in views}
    answers: dict[str, list[np.ndarray]] = {view.name: [] for view in views}
    for prompt in made:
        for view in views:
            if cancel.is_set():
                raise Cancelled
            heads[view.name].append(heads_noise(view, prompt.read(), request.score, request.space, cancel))
            answers[view.name].append(log_likelihoods(view, prompt))
            done += 1
            if progress is not None:
                progress(f"{view.name}: {len(prompt.ids):,} tokens", done, steps)
    measured = [_View.of(heads[view.name], answers[view.name]) for view in views]
    same_heads = pair.variant.adapter is not None
    bootstrap = bootstrap or Bootstrap(seed=request.seed)
    return BatteryReport(
        request=request,
        language="retrieval" if speaks_retrieval(pair.base) else "prose",
        prompts=tuple(_prompt(prompt, i, measured) for i, prompt in enumerate(made)),
        heads=_by_head(measured, same_heads, bootstrap),
        rows=_rows(made, measured, bootstrap),
        provenance=provenance.of_pair(pair),
    )


def speaks_retrieval(view: View) -> bool:
    """Whether the model's vocabulary is that of the retrieval language."""
    tokenizer = view.loaded.tokenizer
    return tokenizer is not None and set(tokenizer.get_vocab()) == set(retrieval.WORDS)


def prompts_of(pair: ModelPair, request: BatteryRequest) -> list[_Made]:
    """The battery's prompts, by length, then depth."""
    tokenizer = pair.base.loaded.tokenizer
    if tokenizer is None:
        raise no_tokenizer(pair.base.loaded)
    limit = min(pair.base.loaded.max_tokens, pair.variant.loaded.max_tokens)
    if speaks_retrieval(pair.base):
        return _retrieval_prompts(request, limit)
    maker = NeedleMaker(tokenizer, limit)
    made = []
    for length in maker.lengths(request.lengths or LENGTHS):
        for depth in request.depths:
            for i in range(request.per_cell):
                seed = (request.seed, length, round(1000 * depth), i)
                needle = maker.make(length, depth, seed)
                made.append(
                    _Made(needle.ids, needle.candidates, needle.needle, needle.question, length, depth, seed, needle.kind)
                )
    return made


def _retrieval_prompts(request: BatteryRequest, limit: int) -> list[_Made]:
    """Facts with one at the wanted depth, and a question about it.

    The needle is the fact and the token after it, the first that can know of the whole fact; the shipped models look there.
    """
    overhead = retrieval.QUESTION
    most = min(retrieval.MOST_FACTS, (limit - overhead) // retrieval.FACT)
    wanted = (
        RETRIEVAL_FACTS if request.lengths is None else [(length - overhead) // retrieval.FACT for length in request.lengths]
    )
    if min(wanted) < 2:
        least = retrieval.FACT * 2 + overhead
        raise PromptError(
            f"prompts of at least {least} tokens, which hold two facts", str(request.lengths), "Choose longer ones."
        )
    made = []
    for facts in sorted({min(count, most) for count in wanted}):
        for depth in request.depths:
            for i in range(request.per_cell):
                seed = (request.seed, facts, round(1000 * depth), i)
                made.append(_retrieval_prompt(facts, depth, seed))
    return made


def _retrieval_prompt(facts: int, depth: float, seed: tuple[int, ...]) -> _Made:
    sample = retrieval.draw(np.random.default_rng(seed), 1, facts, similarity=_SIMILARITY)
    ids, width = sample.prompts()[0].copy(), retrieval.FACT
    order = list(range(facts))
    asked, place = order.pop(int(sample.asked_BQ[0, 0])), round(depth * (facts - 1))
    order.insert(place, asked)
    ids[1 : 1 + width * facts] = ids[1 : 1 + width * facts].reshape(facts, width)[order].ravel()
    values = sample.candidates_BF[0]
    candidates = tuple(values[[i]] for i in [asked, *(i for i in range(facts) if i != asked)])
    start = 1 + width * place
    return _Made(ids, candidates, (start, start + width + 1), (1 + width * facts, len(ids)), len(ids), depth, seed, "fact")


@dataclass(frozen=True, eq=False)
class _View:
    """What one view gave on all prompts."""

    by_name: Mapping[str, np.ndarray]
    """Measure → [P, L, S]."""
    answer_P: np.ndarray
    right_P: np.ndarray

    @classmethod
    def of(cls, heads: Sequence[HeadNoise], answers: Sequence[np.ndarray]) -> _View:
        by_name = {name: np.stack([getattr(found, name) for found in heads]) for name in MEASURES}
        right = [scores[0] > scores[1:].max() for scores in answers]
        return cls(by_name, np.array([scores[0] for scores in answers]), np.array(right, dtype=bool))

    def statistic(self, name: str, chosen: np.ndarray, *, over_heads: bool) -> Callable[[np.ndarray], np.ndarray]:
        """From how often each chosen prompt is drawn to the measure, per head [R, L, S] or averaged [R]."""

        def weighted(part: str, weights_RP: np.ndarray) -> np.ndarray:
            values_PLS = self.by_name[part][chosen]
            if over_heads:
                return weights_RP @ np.nanmean(values_PLS, axis=(1, 2)) / weights_RP.sum(axis=1)
            return np.tensordot(weights_RP, values_PLS, axes=1) / weights_RP.sum(axis=1)[:, None, None]

        if name != "snr":
            return lambda weights_RP: weighted(name, weights_RP)
        return lambda weights_RP: weighted("signal", weights_RP) / weighted("noise", weights_RP)


def _compared(
    views: Sequence[_View], name: str, chosen: np.ndarray, bootstrap: Bootstrap, *, over_heads: bool, paired: bool
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(value, low, high) of the base, of the variant, and of variant − base where heads or averages can be compared."""
    statistics = [view.statistic(name, chosen, over_heads=over_heads) for view in views]
    if len(statistics) > 1 and paired:
        base, variant = statistics
        statistics = [base, variant, lambda weights_RP: variant(weights_RP) - base(weights_RP)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return [bootstrap.of(statistic, int(chosen.sum())) for statistic in statistics]


def _by_head(views: Sequence[_View], same_heads: bool, bootstrap: Bootstrap) -> dict[str, HeadComparison]:
    every = np.ones(len(views[0].answer_P), dtype=bool)
    return {
        name: HeadComparison(
            *(HeadIntervals(*parts) for parts in _compared(views, name, every, bootstrap, over_heads=False, paired=same_heads))
        )
        for name in MEASURES
    }


def _rows(made: Sequence[_Made], views: Sequence[_View], bootstrap: Bootstrap) -> tuple[BatteryRow, ...]:
    lengths, depths = np.array([prompt.length for prompt in made]), np.array([prompt.depth for prompt in made])
    cells = [(None, None), *((int(n), None) for n in np.unique(lengths)), *((None, float(d)) for d in np.unique(depths))]
    cells += [(int(n), float(d)) for n in np.unique(lengths) for d in np.unique(depths)]
    rows = []
    for length, depth in cells:
        chosen = np.ones(len(made), dtype=bool)
        chosen &= lengths == length if length is not None else True
        chosen &= depths == depth if depth is not None else True
        rows.append(BatteryRow(length, depth, int(chosen.sum()), _averages(views, chosen, bootstrap)))
    return tuple(rows)


def _averages(views: Sequence[_View], chosen: np.ndarray, bootstrap: Bootstrap) -> dict[str, Comparison]:
    """Means over heads and prompts, and the answers."""
    prompts = int(chosen.sum())

    def interval(parts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Interval:
        value, low, high = map(float, parts)
        alone = prompts == 1
        return Interval(value, None if alone else low, None if alone else high, bootstrap.level, prompts, "prompt")

    found = {
        name: Comparison(*map(interval, _compared(views, name, chosen, bootstrap, over_heads=True, paired=True)))
        for name in MEASURES
    }
    for name, values in (
        ("answer", [view.answer_P[chosen] for view in views]),
        ("accuracy", [view.right_P[chosen].astype(np.float64) for view in views]),
    ):
        found[name] = bootstrap.compare(values[0], values[1] if len(values) > 1 else None, unit="prompt")
    return found


def _prompt(prompt: _Made, index: int, measured: Sequence[_View]) -> BatteryPrompt:
    by_view: list[tuple[ViewName, _View]] = [("base", measured[0]), *(("variant", found) for found in measured[1:])]
    return BatteryPrompt(
        length=prompt.length,
        depth=prompt.depth,
        tokens=len(prompt.ids),
        seed=prompt.seed,
        kind=prompt.kind,
        position=prompt.needle[0] / prompt.question[0],
        right={view: bool(found.right_P[index]) for view, found in by_view},
        answer_log_probability={view: float(found.answer_P[index]) for view, found in by_view},
    )
