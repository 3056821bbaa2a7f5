"""In-context learning: how much accuracy depends on the order in which the same examples are shown.

For each order of a task's examples, the examples are read once, and every test item follows them as a question of its own: the
label with the highest log-likelihood is the model's answer. Base and variant see the same orders and items.

    mean = mean_o a_o,   spread = max_o a_o − min_o a_o,   deviation = √(mean_o (a_o − mean)²),   a_o = accuracy in order o

Intervals draw test items again, keep the orders, and weigh the labels of a task alike, as its test items do: an order in which
the model always gives one label keeps its accuracy. Spread and deviation are part noise over few items, which drawing again
adds to: their intervals tend to lie high, alike in both views, so that the paired change does not.

Axes: T tasks, I test items, O orders, K examples, X resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dexviz.bootstrap import Bootstrap, Comparison, Interval
from dexviz.claims_records import InContextRow
from dexviz.incontext_tasks import TASKS, Task
from dexviz.models import View, reader
from dexviz.parts import encode, encode_answers, start_ids
from dexviz.questions import OnStep, Progress, log_likelihoods_after, stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Trial:
    """A task made ready for one tokenizer: contexts in several orders, test items and labels as ids."""

    task: Task
    contexts: tuple[np.ndarray, ...]
    """The examples in each order, int64 [N] each; the same ids a number of times, in another order of examples."""
    stems: tuple[np.ndarray, ...]
    """Test items up to their label."""
    labels: tuple[np.ndarray, ...]
    right_I: np.ndarray
    """Which label each test item has, int64."""


def make_trial(tokenizer: PreTrainedTokenizerBase, task: Task, orders: int, seed: int) -> Trial:
    """A task's prompts; `seed` fixes the orders, which differ from each other as far as there are enough.

    Raises:
        PromptError: the tokenizer cannot tell the labels apart.
    """
    draw = np.random.default_rng(seed)
    examples = [(text, label) for label, texts in task.examples for text in texts]
    shown = [encode(tokenizer, task.shown(text, label)) for text, label in examples]
    start = start_ids(tokenizer)
    items = [(text, i) for i, (_, texts) in enumerate(task.tests) for text in texts]
    return Trial(
        task,
        tuple(np.concatenate([start, *(shown[k] for k in order)]) for order in _orders(draw, len(shown), orders)),
        tuple(encode(tokenizer, task.asked(text)) for text, _ in items),
        encode_answers(tokenizer, task.labels),
        np.array([i for _, i in items]),
    )


def _orders(draw: np.random.Generator, examples: int, orders: int) -> list[tuple[int, ...]]:
    """Different orders of the examples."""
    found: dict[tuple[int, ...], None] = {}
    while len(found) < orders:
        found[tuple(draw.permutation(examples).tolist())] = None
    return list(found)


def measure(view: View, trials: Sequence[Trial], on_step: OnStep | None = None) -> list[np.ndarray]:
    """Which test items are answered rightly: per task, bool [I, O]. Steps are orders read, of all tasks."""
    results, done, total = [], 0, sum(len(trial.contexts) for trial in trials)
    for trial in trials:
        columns = []
        for context in trial.contexts:
            scores = log_likelihoods_after(view, context, trial.stems, [trial.labels] * len(trial.stems))
            columns.append(_right(np.stack(scores), trial.right_I))
            done += 1
            if on_step is not None:
                on_step(done, total)
        results.append(np.stack(columns, axis=1))
    return results


def _right(scores_IC: np.ndarray, right_I: np.ndarray) -> np.ndarray:
    """Whether the right label is likelier than each other, bool [I]; ties count as wrong."""
    rows = np.arange(len(right_I))
    others = scores_IC.copy()
    others[rows, right_I] = -np.inf
    return scores_IC[rows, right_I] > others.max(axis=1)


def in_context(
    base: View,
    variant: View | None,
    *,
    orders: int = 8,
    seed: int = 0,
    bootstrap: Bootstrap | None = None,
    tasks: Sequence[Task] = TASKS,
    progress: Progress | None = None,
) -> tuple[InContextRow, ...]:
    """All tasks together, then each.

    Raises:
        PromptError: the models' context is too short, or their tokenizer cannot tell labels apart.
        ModelError: there is no tokenizer.
    """
    bootstrap = bootstrap or Bootstrap(seed=seed)
    right = []
    for view in (view for view in (base, variant) if view is not None):
        trials = [make_trial(reader(view, base), task, orders, seed) for task in tasks]
        right.append(measure(view, trials, stage(progress, f"in-context learning, {view.name}")))
    other: Sequence[np.ndarray | None] = right[1] if variant is not None else [None] * len(trials)
    rows = [
        _row(trial.task.name, [trial], [own], [their], bootstrap)
        for trial, own, their in zip(trials, right[0], other, strict=True)
    ]
    return _row(None, trials, right[0], other, bootstrap), *rows


def _row(
    task: str | None,
    trials: Sequence[Trial],
    base: Sequence[np.ndarray],
    variant: Sequence[np.ndarray | None],
    bootstrap: Bootstrap,
) -> InContextRow:
    """One row of the results; `base` and `variant` say of each task which items were answered rightly, bool [I, O]."""
    views = [base, [right for right in variant if right is not None]]
    ends = [right for right in views if right]
    items = sum(len(right_IO) for right_IO in base)
    by_label = [[_by_label(trial, right_IO) for trial, right_IO in zip(trials, right, strict=True)] for right in ends]

    def statistics(drawn_XI: np.ndarray) -> np.ndarray:
        """Mean, spread and deviation of each view, and their change: [X, 1 or 3, 3]."""
        found = [_over_orders(drawn_XI, right).transpose(1, 0) for right in by_label]
        return np.stack([*found, found[1] - found[0]] if len(found) > 1 else found, axis=1)

    measured = bootstrap.of(statistics, items)
    accuracy, spread, deviation = (_comparison([part[:, i] for part in measured], items, bootstrap) for i in range(3))
    in_order = [np.mean([right_IO.mean(axis=0) for right_IO in right], axis=0) for right in ends]
    return InContextRow(
        task,
        items,
        float(np.mean([1 / len(trial.labels) for trial in trials])),
        accuracy,
        spread,
        deviation,
        tuple(in_order[0].tolist()),
        tuple(in_order[1].tolist()) if len(in_order) > 1 else None,
    )


def _comparison(ends: Sequence[np.ndarray], items: int, bootstrap: Bootstrap) -> Comparison:
    """From means, lower and upper ends, [1 or 3] each."""
    intervals = (
        Interval(float(mean), float(low), float(high), bootstrap.level, items, "test item")
        for mean, low, high in zip(*ends, strict=True)
    )
    return Comparison(*intervals)


def _by_label(trial: Trial, right_IO: np.ndarray) -> list[np.ndarray]:
    """The test items of each label, which stand together."""
    return np.split(right_IO, np.flatnonzero(np.diff(trial.right_I)) + 1)


def _over_orders(drawn_XI: np.ndarray, right: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Mean, spread and deviation over orders, mean over tasks: [3, X]. I runs over all items, `right` is by task and label."""
    ends = np.cumsum([len(right_IO) for task in right for right_IO in task])
    parts = iter(np.split(drawn_XI, ends[:-1], axis=1))
    a_TXO = np.stack([np.mean([_share(next(parts), right_IO) for right_IO in task], axis=0) for task in right])
    return np.stack(
        [a_TXO.mean(axis=(0, 2)), (a_TXO.max(axis=2) - a_TXO.min(axis=2)).mean(axis=0), a_TXO.std(axis=2).mean(axis=0)]
    )


def _share(drawn_XI: np.ndarray, right_IO: np.ndarray) -> np.ndarray:
    """Share of right answers in each resample, [X, O]; where none of the items was drawn, that of all."""
    drawn_XI = np.where(drawn_XI.any(axis=1, keepdims=True), drawn_XI, 1.0)
    return drawn_XI @ right_IO / drawn_XI.sum(axis=1, keepdims=True)
