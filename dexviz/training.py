"""Adapting a pretrained model with DEX on transformers' Trainer: W_D and λ are trained, the base is frozen.

Method: arXiv 2505.16333, App. B.3 and E; see `dexviz.dex` for the λ schedule. Training counts steps from 1, since at t = 0
every gradient is zero. Heads are the half of each layer with the highest mean attention entropy on calibration text.
"""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import set_seed

from dexviz.adapter import check_target, round_as_saved, save_adapter
from dexviz.catalogue import ADAPTER_CONFIG
from dexviz.corpora import documents, pack
from dexviz.dex import DexAdapter, DexConfig, top_heads
from dexviz.errors import TrainingError
from dexviz.heldout import Loss, held_out_blocks, mean_loss
from dexviz.modelcard import model_card
from dexviz.models import LoadedModel, View, differential, make_pair, no_tokenizer
from dexviz.recorder import capture
from dexviz.records import Tokens
from dexviz.train_config import TrainConfig
from dexviz.trainer import LOG, OnStep, TrainingLog, clear, run, work_folder

__all__ = ["TrainConfig", "TrainResult", "mean_entropy", "train"]


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

    @property
    def change(self) -> float:
        """Relative change of the held-out loss, negative where it fell."""
        return self.variant.mean / self.base.mean - 1


def train(
    loaded: LoadedModel, out: str | Path, config: TrainConfig | None = None, *, on_step: OnStep | None = None
) -> TrainResult:
    """Train a DEX adapter and write its folder with log and model card.

    A killed run leaves `<out>.partial` with its checkpoints; the same call goes on from the last one. Other settings, text or
    base weights start anew.

    Raises:
        TrainingError: the corpus is unusable, `<out>.partial` is in use or not writable, the disk is full, or the loss became
            NaN (says at which step).
        AdapterError: `out` is in use or the model cannot carry DEX.
    """
    config, out = config or TrainConfig(), Path(out)
    check_target(out, replaces=ADAPTER_CONFIG)
    if loaded.layout.differential:
        raise differential(loaded)
    with work_folder(out.with_name(out.name + ".partial")) as work:
        return _train(loaded, out, config, work, on_step or _silent)


def _train(loaded: LoadedModel, out: Path, config: TrainConfig, work: Path, on_step: OnStep) -> TrainResult:
    set_seed(config.seed)
    blocks = training_blocks(loaded, config)
    base = View("base", loaded, title=loaded.name)
    adapter = DexAdapter(dex_config(base, blocks, config)).to(loaded.model.device)
    pair = make_pair(loaded, adapter=adapter)
    held_out = held_out_blocks(base)
    before = mean_loss(base, held_out)
    log = TrainingLog(work / LOG, pair, held_out, config, on_step)
    run(pair, adapter, blocks[config.calibration_blocks :], config, work, log)
    round_as_saved(adapter)
    after = mean_loss(pair.variant, held_out)
    if not math.isfinite(after.mean):
        raise TrainingError("a finite held-out loss in half precision", str(after.mean), "Choose a lower learning rate.")
    result = TrainResult(out, before, after, tuple(adapter.lambdas()), config.steps)
    _publish(result, adapter, loaded, config, work)
    return result


def _silent(line: dict[str, Any]) -> None:
    pass


def training_blocks(loaded: LoadedModel, config: TrainConfig) -> np.ndarray:
    """Token ids, int64 [blocks, block]: first those for calibration, then one batch a step.

    Raises:
        TrainingError: the corpus is unusable or leaves no block to train on, or a block is longer than the model's context.
    """
    if loaded.tokenizer is None:
        raise no_tokenizer(loaded)
    if config.block > loaded.max_tokens:
        raise TrainingError(f"blocks of at most {loaded.max_tokens} tokens", str(config.block), "Choose a shorter block.")
    texts = documents(config.data, column=config.column, seed=config.seed)
    wanted = config.steps * config.batch + config.calibration_blocks
    blocks = pack(texts, loaded.tokenizer, config.block, seed=config.seed, limit=wanted)
    if len(blocks) <= config.calibration_blocks:
        raise TrainingError(
            f"more than {config.calibration_blocks} blocks of {config.block} tokens, which calibration takes",
            f"{len(blocks)} in {config.data!r}",
            "Add text, or choose a shorter block or fewer calibration blocks.",
        )
    return blocks


def dex_config(base: View, blocks: np.ndarray, config: TrainConfig) -> DexConfig:
    """What the adapter will be: heads selected by their entropy on the calibration blocks, and the λ schedule."""
    entropy = mean_entropy(base, blocks[: config.calibration_blocks])
    heads = top_heads(torch.from_numpy(entropy), config.heads_per_layer)
    layout = base.layout
    return DexConfig(
        heads=tuple(chosen if layer in layout.modules else () for layer, chosen in enumerate(heads)),
        width=layout.value_width,
        query_heads=layout.heads,
        lambda_init=config.lambda_init,
        steps=config.anneal or max(1, config.steps // 2),
    )


def mean_entropy(view: View, blocks: np.ndarray) -> np.ndarray:
    """Mean attention entropy of every head over blocks of token ids, in nats: float32 [L, H]."""
    maps = []
    for ids in blocks:
        n = len(ids)
        tokens = Tokens(ids, ("",) * n, "", np.zeros((n, 2), dtype=np.int64), np.zeros(n, dtype=bool))
        maps.append(capture(view, tokens).mean("entropy"))
    return np.nan_to_num(np.mean(maps, axis=0), nan=-np.inf)


def _publish(result: TrainResult, adapter: DexAdapter, loaded: LoadedModel, config: TrainConfig, work: Path) -> None:
    """Write the adapter folder with log and card, then let go of the checkpoints."""
    measured = {"base": asdict(result.base), "variant": asdict(result.variant), "relative_change": result.change}
    details = {
        "mode": "adapter",
        "trained": ["W_D", "lambda_learn"],
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
