"""Timing captures against plain forward passes and dense maps."""

from __future__ import annotations

from argparse import Namespace

from dexviz.commands.common import Answer, load, note_progress, pair_source


def bench(arguments: Namespace) -> Answer:
    """Measure time and peak memory of all cases at the lengths that were asked for."""
    from dexviz.benchmark import BenchConfig, bench as run

    config = BenchConfig(arguments.lengths, arguments.rounds, arguments.memory, arguments.seed)
    pair = load(arguments)
    measured = run(pair, config, pair_source(arguments), note_progress)
    return measured.to_json(), measured.table()
