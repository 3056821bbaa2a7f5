"""Adapting a pretrained model with DEX on transformers' Trainer, and the controls that a gain has to be held against.

Method: arXiv 2505.16333, App. B.3 and E; see `dexviz.dex` for the λ schedule. Training counts steps from 1, since at t = 0
every gradient is zero. Heads are those of a plan, or the half of each layer with the highest mean attention entropy on
calibration text. The base's weights never change.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import set_seed

from dexviz import deltas, lora, processes
from dexviz.adapter import check_target, round_as_saved, save_adapter
from dexviz.blocks import Blocks, Source, read_blocks
from dexviz.bootstrap import Bootstrap
from dexviz.catalogue import ADAPTER_CONFIG
from dexviz.checkpoints import LOG, clear, partial, work_folder
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import TrainingError
from dexviz.head_plan import check_plan, text_digest
from dexviz.head_scores import mean_entropy
from dexviz.head_selection import best_heads
from dexviz.heldout import Loss, held_out_blocks
from dexviz.modelcard import model_card
from dexviz.models import LoadedModel, View, differential, make_pair
from dexviz.plan_file import read_plan
from dexviz.train_config import TrainConfig
from dexviz.trainee import Trainee
from dexviz.trainer import enough_memory, run
from dexviz.training_log import OnStep, TrainingLog

__all__ = ["TrainConfig", "TrainResult", "train"]


@dataclass(frozen=True)
class TrainResult:
    """What a training run came to."""

    folder: Path
    base: Loss
    """Held-out loss of the base."""
    variant: Loss
    """Held-out loss with the adapter, its weights rounded as they are on disk."""
    lambdas: tuple[float, ...]
    steps: int
    """Step whose weights were kept; the last, unless training stopped early."""
    parameters: int
    """Trained parameters."""
    interval: tuple[float, float] | None = None
    """95 % bootstrap interval of `change` over the held-out blocks; None where there is one block only."""
    block_losses: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)
    """Sum of the variant's losses of each held-out block, nats, float64 [blocks]."""

    @property
    def change(self) -> float:
        """Relative change of the held-out loss, negative where it fell."""
        return self.variant.mean / self.base.mean - 1


def train(
    loaded: LoadedModel,
    out: str | Path,
    config: TrainConfig | None = None,
    *,
    resume: bool = False,
    base_losses: np.ndarray | None = None,
    on_step: OnStep | None = None,
) -> TrainResult:
    """Train an adapter and write its folder with log and model card.

    A killed run leaves `<out>.partial` with its checkpoints; the same call goes on from the last one. Other settings, text or
    base weights start anew. Under `torchrun` every process calls this; the first one writes.

    Args:
        resume: refuse to start anew where the stopped run was of something else.
        base_losses: `block_losses` of this base on the held-out blocks, where they have been measured before.

    Raises:
        TrainingError: the corpus is unusable, `<out>.partial` is in use or not writable, the disk or memory is full, or the
            loss became NaN (says at which step).
        AdapterError: `out` is in use, the plan is of another model, or the model cannot carry the method.
    """
    config, out = config or TrainConfig(), Path(out)
    check_target(out, replaces=ADAPTER_CONFIG)
    if loaded.layout.differential:
        raise differential(loaded)
    base = View("base", loaded, title=loaded.name)
    with enough_memory(config), processes.together(loaded.model.device):
        folder = work_folder(partial(out)) if processes.index() == 0 else nullcontext(partial(out))
        with folder as work:
            before = base_losses if base_losses is not None else processes.shared_losses(base, held_out_blocks(base))
            return _train(base, before, out, config, work, resume, on_step or _silent)


def _train(
    base: View, before: np.ndarray, out: Path, config: TrainConfig, work: Path, resume: bool, on_step: OnStep
) -> TrainResult:
    loaded = base.loaded
    set_seed(config.seed)
    blocks = training_blocks(loaded, config)
    adapter = new_adapter(base, blocks, config).to(loaded.model.device)
    held_out = held_out_blocks(base)
    with _trainee(loaded, adapter, config) as trainee:
        log = TrainingLog(work / LOG, trainee, blocks.validation, held_out, config, on_step)
        identity = _identity(loaded, adapter, blocks, config)
        steps = run(trainee, blocks.training, config, work, log, identity, resume)
    round_as_saved(adapter)
    after = processes.shared_losses(make_pair(loaded, adapter=adapter).variant, held_out)
    if not np.isfinite(after).all():
        raise TrainingError("a finite held-out loss in half precision", "NaN or infinity", "Choose a lower learning rate.")
    parameters = sum(p.numel() for p in adapter.parameters())
    result = TrainResult(
        folder=out,
        base=Loss.of(before, held_out.shape[1]),
        variant=Loss.of(after, held_out.shape[1]),
        lambdas=tuple(adapter.lambdas()),
        steps=steps,
        parameters=parameters,
        block_losses=after,
        interval=change_interval(before, after),
    )
    if processes.index() == 0:
        _publish(result, adapter, loaded, config, work)
    processes.wait()
    return result


def change_interval(before: np.ndarray, after: np.ndarray) -> tuple[float, float] | None:
    """95 % bootstrap interval of the relative change of a loss, from its sums over the same blocks, float64 [blocks]."""
    found = Bootstrap().ratio(after - before, before, unit="block")
    return None if found.low is None or found.high is None else (found.low, found.high)


def _silent(line: dict[str, Any]) -> None:
    pass


def training_blocks(loaded: LoadedModel, config: TrainConfig) -> Blocks:
    """Blocks of the corpus for calibration, for validation, and to train on: one batch a process and step, where it has them.

    Raises:
        TrainingError: the corpus is unusable or leaves no block to train on, or a block is longer than the model's context.
    """
    source = Source(config.data, config.column, config.block, config.seed)
    wanted = config.steps * config.batch * config.accumulate * processes.count()
    return read_blocks(
        loaded, source, calibration=config.calibration_blocks, validation=config.validation_blocks, training=wanted
    )


def new_adapter(base: View, blocks: Blocks, config: TrainConfig) -> DexAdapter:
    """What will be trained, at its start: the same as the base."""
    loaded = base.loaded
    if config.method == "lora":
        return lora.control(loaded)
    changes = deltas.for_model(loaded.model, loaded.layout) if config.full else None
    return DexAdapter(dex_config(base, blocks, config), changes)


def dex_config(base: View, blocks: Blocks, config: TrainConfig) -> DexConfig:
    """The heads that are adapted, and the λ schedule."""
    layout = base.layout
    none: tuple[tuple[int, ...], ...] = ((),) * layout.layers
    return DexConfig(
        heads=_heads(base, blocks, config) if config.adapts_heads else none,
        width=layout.value_width,
        query_heads=layout.heads,
        lambda_init=config.lambda_init,
        steps=config.annealing_steps,
        plus=config.method == "dex-plus",
    )


def _heads(base: View, blocks: Blocks, config: TrainConfig) -> tuple[tuple[int, ...], ...]:
    """Those of the plan, or those of highest entropy on the calibration blocks; none in a layer without attention."""
    if config.heads is not None:
        plan = read_plan(config.heads)
        check_plan(plan, base.loaded)
        return plan.heads
    return best_heads(base.layout, "entropy", mean_entropy(base, blocks.calibration), config.heads_per_layer)


@contextmanager
def _trainee(loaded: LoadedModel, adapter: DexAdapter, config: TrainConfig) -> Iterator[Trainee]:
    if config.method != "lora":
        pair = make_pair(loaded, adapter=adapter)
        yield Trainee(pair.variant, adapter)
        return
    with lora.injected(loaded) as layers:
        yield lora.LoraTrainee(View("variant", loaded, title="LoRA"), adapter, layers)


def _identity(loaded: LoadedModel, adapter: DexAdapter, blocks: Blocks, config: TrainConfig) -> dict[str, Any]:
    """All that a run's weights depend on: settings, adapted heads, base, type, processes and text."""
    return {
        "config": asdict(config),
        "dex": adapter.config.to_json() | {"heads": [list(heads) for heads in adapter.config.heads]},
        "base_fingerprint": loaded.fingerprint,
        "base_model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "processes": processes.count(),
        "text": {name: text_digest(getattr(blocks, name)) for name in ("training", "validation")},
    }


def _publish(result: TrainResult, adapter: DexAdapter, loaded: LoadedModel, config: TrainConfig, work: Path) -> None:
    """Write the adapter folder with log and card, then let go of the checkpoints."""
    measured: dict[str, Any] = {"base": asdict(result.base), "variant": asdict(result.variant)}
    measured |= {"relative_change": result.change, "relative_change_95": result.interval}
    details = {
        "trained": list(config.trained),
        "parameters": result.parameters,
        "steps": result.steps,
        "processes": processes.count(),
        "config": asdict(config),
        "held_out": measured,
        "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
    }

    def extra(folder: Path) -> None:
        shutil.copyfile(work / LOG, folder / LOG)
        (folder / "README.md").write_text(model_card(result, adapter.config, loaded, config), encoding="utf-8")

    save_adapter(adapter, result.folder, loaded, details=details, extra=extra)
    with suppress(OSError):
        clear(work)
