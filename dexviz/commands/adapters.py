"""Making DEX adapters, judging them, and folding them into plain checkpoints."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dexviz import catalogue
from dexviz.checkpoints import StoppedRun, stopped_run
from dexviz.commands.common import Answer, load, new_folder, note, note_progress, quiet_libraries
from dexviz.commands.step_progress import StepProgress
from dexviz.errors import AdapterError
from dexviz.train_config import PRESETS, TrainConfig


def train(arguments: Namespace) -> Answer:
    """Train a DEX adapter, or one of its controls, and write its folder."""
    from dexviz.models import load_model
    from dexviz.training import train as run

    quiet_libraries()
    out = new_folder(arguments.out, replaces=catalogue.ADAPTER_CONFIG)
    stopped = _to_resume(arguments)
    config = train_config(arguments, stopped)
    name = arguments.model or (stopped.base_model if stopped else catalogue.DEFAULT_MODEL)
    dtype = arguments.dtype or (stopped.dtype if stopped else None)
    loaded = load_model(name, device=arguments.device, dtype=dtype, progress=note_progress)
    progress = StepProgress(config)
    try:
        result = run(loaded, out, config, resume=arguments.resume, on_step=progress)
    finally:
        progress.close()
    losses = {
        "base": asdict(result.base),
        "variant": asdict(result.variant),
        "relative_change": result.change,
        "relative_change_95": result.interval,
    }
    answer = {
        "model": loaded.name,
        "method": config.method,
        "trained": config.trained,
        "parameters": result.parameters,
        "out": str(result.folder),
        "steps": result.steps,
        "held_out": losses,
        "lambda": result.lambdas,
    }
    summary = f"held-out loss {result.base.mean:.4f} → {result.variant.mean:.4f} nats a token ({100 * result.change:+.2f} %)"
    early = f"; stopped early, weights of step {result.steps}" if result.steps < config.steps else ""
    return answer, f"{summary}{early}\nadapter at {result.folder}"


def _to_resume(arguments: Namespace) -> StoppedRun | None:
    if not arguments.resume:
        return None
    stopped = stopped_run(Path(arguments.out))
    if stopped is None:
        note(f"nothing to resume beside {arguments.out}: training starts anew")
    return stopped


def train_config(arguments: Namespace, stopped: StoppedRun | None = None) -> TrainConfig:
    """The defaults, changed by the preset or else by the stopped run's settings, then by the options given."""
    given = {field.name: value for field in fields(TrainConfig) if (value := getattr(arguments, field.name, None)) is not None}
    start: dict[str, Any] = dict(PRESETS[arguments.preset]) if arguments.preset else {}
    if stopped is not None and not start:
        start = asdict(stopped.config)
    return TrainConfig(**{**start, **given})


def select_heads(arguments: Namespace) -> Answer:
    """Measure every head and write the plan that `train --heads` reads."""
    from dexviz.head_selection import SelectionConfig, select_heads as run
    from dexviz.models import load_model
    from dexviz.plan_file import check_plan_target, write_plan

    check_plan_target(arguments.out)
    config = SelectionConfig(**{field.name: getattr(arguments, field.name) for field in fields(SelectionConfig)})
    quiet_libraries()
    loaded = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype, progress=note_progress)
    plan = run(loaded, config, progress=note_progress)
    path = write_plan(plan, arguments.out)
    return {**plan.to_json(), "out": str(path)}, f"{plan.table()}\nplan at {path}"


def evaluate(arguments: Namespace) -> Answer:
    """Measure a pair: held-out loss, needles, divergence from the base, speed."""
    from dexviz.evaluation import EvalConfig, evaluate as run

    config = EvalConfig(**{field.name: getattr(arguments, field.name) for field in fields(EvalConfig)})
    measured = run(load(arguments), config, progress=note_progress)
    return measured.to_json(), measured.table()


def merge(arguments: Namespace) -> Answer:
    """Write a plain checkpoint with the adapter folded in."""
    from dexviz.merging import merge as write

    if arguments.adapter is None:
        raise AdapterError("an adapter to merge", "none", 'Name one, for example --adapter "default".')
    out = new_folder(arguments.out, replaces=None)
    pair = load(arguments)
    path = str(write(pair.variant, out))
    return {"model": pair.base.title, "adapter": arguments.adapter, "out": path}, f"merged checkpoint at {path}"
