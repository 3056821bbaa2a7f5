"""docs/retrieval.md, from the runs of `benchmarks.retrieval_pair`: what the papers claim, what this pair shows.

Intervals are 95 % percentile bootstraps over prompts, paired, of the mean over seeds; beside them stands what each seed shows.
A claim holds here if the difference lies on the claimed side in every seed, beyond chance in each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.retrieval_measure import ANSWERED, CAPTURED, CROWDED, FACTS, SELECTION, SIMILARITIES
from benchmarks.retrieval_training import KINDS, Recipe
from dexviz.bootstrap import Bootstrap, Comparison, Interval

SEEDS = (0, 1, 2)
Run = Mapping[str, Any]
Values = Callable[[Run], np.ndarray]
"""One number a prompt, [T], of one run."""


@dataclass(frozen=True)
class Compared:
    """A number of the Llama and of the DiffLlama over the same prompts, and the difference that each seed shows."""

    all_seeds: Comparison
    seeds: tuple[Interval, ...]
    """DIFF − Llama of each seed."""

    @property
    def by_seed(self) -> tuple[float, ...]:
        return tuple(seed.mean for seed in self.seeds)

    def verdict(self, claimed: int) -> str:
        """Whether DIFF − Llama has the claimed sign, +1 or −1, in every seed, and beyond chance in each."""
        assert self.all_seeds.change is not None
        signs, overall = [_beyond_chance(seed) for seed in self.seeds], _beyond_chance(self.all_seeds.change)
        if all(sign == claimed for sign in signs):
            return "holds"
        if all(sign == -claimed for sign in signs):
            return "the opposite is seen"
        if not overall and not any(signs):
            return "no difference seen"
        if overall == claimed and -claimed not in signs:
            return f"in the mean; {signs.count(claimed)} of {len(signs)} seeds beyond chance"
        return "not decided"


def _beyond_chance(change: Interval) -> int:
    """Sign of a difference whose interval leaves out zero; 0 for any other."""
    assert change.low is not None
    assert change.high is not None
    return int(np.sign(change.mean)) if change.low > 0 or change.high < 0 else 0


def write_page(runs: Path, page: Path) -> None:
    """Write the page from the seeds of which both models are measured; nothing where there is none."""
    found = {seed: pair for seed in SEEDS if (pair := _pair(runs, seed)) is not None}
    if not found:
        raise SystemExit(f"no seed of which both models are measured in {runs}; run python -m benchmarks.retrieval_pair")
    page.write_text("\n".join(_page(found)) + "\n", encoding="utf-8")


def _pair(runs: Path, seed: int) -> tuple[Run, Run] | None:
    paths = [runs / f"{kind}-{seed}" / "measured.json" for kind in KINDS]
    if not all(path.is_file() for path in paths):
        return None
    base, variant = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    return base, variant


def compare(found: Mapping[int, tuple[Run, Run]], values: Values, variant: Values | None = None) -> Compared:
    """Both models on the same prompts; `variant` where DIFF's number is found elsewhere."""
    base_ST = np.array([values(pair[0]) for pair in found.values()])
    variant_ST = np.array([(variant or values)(pair[1]) for pair in found.values()])
    seeds = tuple(Bootstrap().ratio(change_T, unit="prompt") for change_T in variant_ST - base_ST)
    return Compared(Bootstrap().compare(base_ST.mean(axis=0), variant_ST.mean(axis=0), unit="prompt"), seeds)


def right(facts: int) -> Values:
    return lambda run: np.array(run["right"][str(facts)], dtype=np.float64)


def right_at(similarity: float) -> Values:
    return lambda run: np.array(run["right_by_similarity"][str(similarity)], dtype=np.float64)


def over_heads(name: str, facts: int, kind: str = "attention") -> Values:
    """Mean over all layers and heads, or layers where a number has no heads."""
    return lambda run: np.array(run[kind][str(facts)][name]).reshape(CAPTURED, -1).mean(axis=1)


def best_head(name: str, facts: int, kind: str = "attention") -> Values:
    """The head whose share of |S| on the answer is largest on other prompts."""

    def values(run: Run) -> np.ndarray:
        chosen = np.array(run[kind][SELECTION]["answer"]).mean(axis=0)
        layer, head = np.unravel_index(chosen.argmax(), chosen.shape)
        return np.array(run[kind][str(facts)][name])[:, layer, head]

    return values


def outlier(name: str, reduce: Callable[..., np.ndarray] = np.max) -> Values:
    return lambda run: reduce(np.array(run["outliers"][name]), axis=1)


def _page(found: Mapping[int, tuple[Run, Run]]) -> list[str]:
    recipe, pairs = Recipe(), list(found.values())
    sizes = [pair[i]["parameters"] for i in (0, 1) for pair in pairs[:1]]
    minutes = [np.mean([pair[i]["seconds"] for pair in pairs]) / 60 for i in (0, 1)]
    lines = [
        "# A Llama and a DiffLlama, trained from scratch on the same retrieval language",
        "",
        "Written by `python -m benchmarks.retrieval_pair`; the language is described in `dexviz/retrieval.py`, training in",
        "`benchmarks/retrieval_training.py`. The pair of seed 0 lies in `pairs/retrieval`.",
        "",
        f"Llama {sizes[0]:,} parameters, DiffLlama {sizes[1]:,} ({100 * (sizes[1] / sizes[0] - 1):+.3f} %); {recipe.layers} "
        f"layers, {recipe.heads} softmax heads ({recipe.heads // 2} logical ones), width {recipe.hidden}; {recipe.steps:,} "
        f"steps of at most {recipe.tokens:,} tokens; {minutes[0]:.0f} and {minutes[1]:.0f} minutes on one thread. Seeds: "
        f"{', '.join(map(str, found))}. Trained on 2 to {recipe.most_facts} facts; more are outside what they have seen.",
        "",
        f"Accuracy: {ANSWERED} prompts a cell; attention: {CAPTURED}. Intervals: 95 %, bootstrap over prompts, paired, of the",
        "mean over seeds. They say nothing about other seeds: the last column shows DIFF − Llama in each seed.",
        "",
    ]
    return lines + _runs(found) + _claims(found) + _accuracy(found) + _attention(found) + _outliers(found)


def _runs(found: Mapping[int, tuple[Run, Run]]) -> list[str]:
    """What each run came to; a mean over seeds hides that runs find a way to look up, or do not."""
    columns = [f"right of {FACTS[0]} facts", f"of {CROWDED}, none similar", "half similar", "all similar", "minutes"]
    lines = ["## What each run learnt", "", "| seed | model | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for seed, pair in found.items():
        for name, run in zip(KINDS.values(), pair, strict=True):
            shares = [run["right"][str(FACTS[0])], *(run["right_by_similarity"][str(s)] for s in SIMILARITIES)]
            cells = [f"{100 * float(np.mean(share)):.0f} %" for share in shares]
            lines.append(f"| {seed} | {name} | {' | '.join(cells)} | {run['seconds'] / 60:.0f} |")
    return [
        *lines,
        "",
        "A run that answers where no distractor is similar, and not where they are, has learnt to look up one word of the key,",
        "not both. Runs differ more by whether they get beyond that than by anything else, so three seeds say little about how",
        "often either kind of model does.",
        "",
    ]


def _claims(found: Mapping[int, tuple[Run, Run]]) -> list[str]:
    negative = compare(found, over_heads("negative", CROWDED))
    rows = [
        (f"higher accuracy among many distractors ({CROWDED} facts)", compare(found, right(CROWDED)), 1),
        ("higher accuracy where all distractors are similar", compare(found, right_at(1.0)), 1),
        ("more attention on the answer, mean over heads", compare(found, over_heads("answer", CROWDED)), 1),
        ("more attention on the answer, best head", compare(found, best_head("answer", CROWDED)), 1),
        ("higher SNR, best head", compare(found, best_head("snr", CROWDED)), 1),
        ("scores below zero (negative share of the mass; none in a Llama by construction)", negative, 1),
        ("heads of a layer less alike: cosine of maps", compare(found, over_heads("cosine", CROWDED)), -1),
        ("heads of a layer less alike: CKA of outputs", compare(found, over_heads("cka", CROWDED)), -1),
        ("smaller largest attention logit", compare(found, outlier("logit")), -1),
        ("smaller largest activation over the median", compare(found, outlier("over_median")), -1),
        ("less kurtosis of activations", compare(found, outlier("kurtosis")), -1),
    ]
    lines = ["## What the papers claim, and what is seen here", "", *_header("claim for DIFF", "verdict")]
    lines += [_line(name, compared, compared.verdict(sign)) for name, compared, sign in rows]
    return [*lines, ""]


def _accuracy(found: Mapping[int, tuple[Run, Run]]) -> list[str]:
    lines = ["## Accuracy by number of facts", "", *_header("facts, half of the distractors similar")]
    lines += [_line(str(facts), compare(found, right(facts))) for facts in FACTS]
    lines += ["", f"## Accuracy by similarity, {CROWDED} facts", "", *_header("share of similar distractors")]
    return [*lines, *(_line(f"{similarity:g}", compare(found, right_at(similarity))) for similarity in SIMILARITIES), ""]


def _attention(found: Mapping[int, tuple[Run, Run]]) -> list[str]:
    lines = ["## Share of |S| on the answer and the token after it, last row", "", *_header("facts")]
    for facts in FACTS:
        lines.append(_line(f"{facts}, mean over heads", compare(found, over_heads("answer", facts))))
        lines.append(_line(f"{facts}, best head", compare(found, best_head("answer", facts))))
    softmax = [(facts, best_head("answer", facts), best_head("answer", facts, "softmax")) for facts in FACTS]
    lines += [
        "",
        "The same with DIFF's softmax maps A₁ and A₂ in place of S: what the two maps do before they are subtracted.",
        "",
        *_header("facts"),
        *(_line(f"{facts}, best softmax head", compare(found, base, variant)) for facts, base, variant in softmax),
    ]
    lambdas = {seed: ", ".join(f"{value:.3f}" for value in pair[1]["lambda"]) for seed, pair in found.items()}
    return [*lines, "", "λ by layer: " + "; ".join(f"seed {seed}: {text}" for seed, text in lambdas.items()) + ".", ""]


def _outliers(found: Mapping[int, tuple[Run, Run]]) -> list[str]:
    rows: Sequence[tuple[str, Values]] = [
        ("largest attention logit", outlier("logit")),
        ("largest activation", outlier("largest")),
        ("largest activation over the median, worst layer", outlier("over_median")),
        ("kurtosis, worst layer", outlier("kurtosis")),
        ("kurtosis, mean of layers", outlier("kurtosis", np.mean)),
    ]
    lines = [f"## Outliers, prompts of {CROWDED} facts", "", "Activations are hidden states after each layer.", ""]
    return [*lines, *_header("number"), *(_line(name, compare(found, values)) for name, values in rows)]


def _header(first: str, *more: str) -> list[str]:
    names = [first, "Llama", "DIFF", "DIFF − Llama", *more, "by seed"]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _line(name: str, compared: Compared, *more: str) -> str:
    comparison = compared.all_seeds
    cells = [_interval(part) for part in (comparison.base, comparison.variant, comparison.change) if part is not None]
    seeds = ", ".join(f"{value:+.3g}" for value in compared.by_seed)
    return "| " + " | ".join([name, *cells, *more, seeds]) + " |"


def _interval(found: Interval) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:.3g}"
    return f"{found.mean:.3g} ({found.low:.3g} to {found.high:.3g})"
