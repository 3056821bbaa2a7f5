"""The loop of DEX training: transformers' Trainer over an adapter whose base is frozen, its log, and its checkpoints.

Checkpoints hold the adapter alone; a killed run goes on from the last one that is whole. Gradients are not clipped, so the
logged norms are those of the optimiser's step.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from dexviz import attention
from dexviz.dex import DexAdapter
from dexviz.errors import TrainingError
from dexviz.heldout import mean_loss
from dexviz.models import ModelPair
from dexviz.train_config import TrainConfig

OnStep = Callable[[dict[str, Any]], None]
"""Called with each line of the training log."""
LOG = "training_log.jsonl"
_ADAPTER_STATE = "adapter_state.pt"
_CHECKPOINTS = "checkpoints"
_SETTINGS = "train_config.json"
"""What a run depends on. It also marks a folder as one of ours."""


def run(pair: ModelPair, adapter: DexAdapter, blocks: np.ndarray, config: TrainConfig, work: Path, log: TrainingLog) -> None:
    """Train the adapter of `pair.variant` on blocks of token ids; leaves it at the end of its schedule, frozen.

    Args:
        work: folder of checkpoints and log; a killed run that depended on the same goes on from there.

    Raises:
        TrainingError: the loss or a weight became NaN or infinite (says at which step), or the disk is full.
    """
    with _writing(work):
        last = _last_checkpoint(work, _identity(pair, adapter, blocks, config))
    arguments = TrainingArguments(
        output_dir=str(work / _CHECKPOINTS),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, config.steps // 10),
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=2,
        seed=config.seed,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        use_cpu=pair.base.model.device.type == "cpu",
    )
    trainer = _AdapterTrainer(model=_Trainee(pair, adapter), args=arguments, train_dataset=_Blocks(blocks), callbacks=[log])
    trainer.pop_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    if log.failed_at is not None:
        raise TrainingError(
            "a finite loss and finite weights",
            f"NaN or infinity at step {log.failed_at}",
            "Choose a lower learning rate; training then starts anew.",
        )
    adapter.set_step(config.steps)
    adapter.eval().requires_grad_(False)


class _Trainee(nn.Module):
    """What Trainer trains: the frozen model with the adapter attached. Only the adapter is among its parameters."""

    def __init__(self, pair: ModelPair, adapter: DexAdapter) -> None:
        super().__init__()
        self.adapter = adapter
        self._frozen = (pair.base.model,)
        attention.attach(pair.base.model, adapter)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Mean next-token loss of the variant on blocks of token ids [B, N]."""
        logits = self._frozen[0](input_ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss}


class _AdapterTrainer(Trainer):
    """Trainer whose checkpoints hold the adapter alone."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with _writing(Path(str(self.args.output_dir)).parent):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(cast(_Trainee, self.model).adapter.state_dict(), folder / _ADAPTER_STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        state = torch.load(Path(resume_from_checkpoint) / _ADAPTER_STATE, weights_only=True)
        cast(_Trainee, model or self.model).adapter.load_state_dict(state)


class _Blocks(torch.utils.data.Dataset):
    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.blocks[index])}


class TrainingLog(TrainerCallback):
    """Moves λ(t) along, and writes a line a step: loss, held-out loss, λ per layer, gradient norms of W_D and λ.

    All of it is of the float32 weights in training; those on disk are rounded once more.
    """

    def __init__(self, path: Path, pair: ModelPair, held_out: np.ndarray, config: TrainConfig, on_step: OnStep) -> None:
        self.path, self.pair, self.held_out, self.config, self.on_step = path, pair, held_out, config, on_step
        self.norms: dict[str, float] = {}
        self.failed_at: int | None = None

    @property
    def adapter(self) -> DexAdapter:
        assert self.pair.variant.adapter is not None
        return self.pair.variant.adapter

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Training counts t from 1."""
        self.adapter.set_step(state.global_step + 1)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note gradient norms while the gradients are there."""
        operators = list(self.adapter.operators.values())
        self.norms = {
            name: math.sqrt(sum(float(g.square().sum()) for op in operators if (g := getattr(op, name).grad) is not None))
            for name in ("w_d", "lambda_learn")
        }

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        """Write the step's line; stop, without a checkpoint, at a loss or a weight that is no number."""
        if not logs or "loss" not in logs:
            return
        loss, held_out = float(logs["loss"]), None
        finite = math.isfinite(loss) and all(bool(p.isfinite().all()) for p in self.adapter.parameters())
        if finite and self._due(state.global_step):
            held_out = mean_loss(self.pair.variant, self.held_out).mean
            finite = math.isfinite(held_out)
        if not finite:
            self.failed_at, control.should_training_stop, control.should_save = state.global_step, True, False
            return
        line = {
            "step": state.global_step,
            "loss": round(loss, 5),
            "held_out": round(held_out, 5) if held_out is not None else None,
            "lambda": [round(value, 5) for value in self.adapter.lambdas()],
            "grad_norm_w_d": self.norms.get("w_d"),
            "grad_norm_lambda": self.norms.get("lambda_learn"),
        }
        with _writing(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.on_step(line)

    def _due(self, step: int) -> bool:
        every = self.config.evaluate_every
        return step >= self.config.steps or (every > 0 and step % every == 0)


@contextmanager
def work_folder(work: Path) -> Iterator[Path]:
    """The folder of a run's checkpoints and log, proven writable before long work; it goes again where it stays empty.

    Raises:
        TrainingError: the folder holds something else, or cannot be written to.
    """
    try:
        if work.exists() and not (work / _SETTINGS).is_file() and (not work.is_dir() or any(work.iterdir())):
            raise TrainingError(
                "a new or empty folder for checkpoints", f"{work}, which exists", "Move it or choose another --out."
            )
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise TrainingError(f"a writable folder for checkpoints at {work}", str(error), "Choose another --out.") from error
    try:
        yield work
    finally:
        with suppress(OSError):
            work.rmdir()


def clear(work: Path) -> None:
    """Remove what a run keeps in its folder, and nothing else; the settings last, by which the folder is known."""
    if (work / _CHECKPOINTS).exists():
        shutil.rmtree(work / _CHECKPOINTS)
    for name in (LOG, _SETTINGS):
        (work / name).unlink(missing_ok=True)


@contextmanager
def _writing(work: Path) -> Iterator[None]:
    """Turns a failure to write into a TrainingError; torch reports a full disk as a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        todo = "Free space and repeat the call: it goes on from the last whole checkpoint."
        raise TrainingError(f"room to write to {work}", reason, todo) from error


def _identity(pair: ModelPair, adapter: DexAdapter, blocks: np.ndarray, config: TrainConfig) -> str:
    """All that a run's weights depend on, as JSON: settings, adapted heads, base, type and text."""
    loaded = pair.base.loaded
    parts = {
        "config": asdict(config),
        "dex": adapter.config.to_json(),
        "base_fingerprint": loaded.fingerprint,
        "dtype": str(loaded.model.dtype),
        "blocks": hashlib.sha256(np.ascontiguousarray(blocks).tobytes()).hexdigest(),
    }
    return json.dumps(parts, sort_keys=True)


def _last_checkpoint(work: Path, identity: str) -> Path | None:
    """The newest whole checkpoint of a killed run of the same identity; the log is cut back to it, other checkpoints go."""
    settings = work / _SETTINGS
    if not settings.is_file() or settings.read_text(encoding="utf-8", errors="replace") != identity:
        clear(work)
        settings.write_text(identity, encoding="utf-8")
    lines = _whole_lines(work / LOG)
    found = list((work / _CHECKPOINTS).glob("checkpoint-*"))
    whole = {int(p.name.split("-")[1]): p for p in found if _is_whole(p)}
    step = max((step for step in whole if step <= len(lines)), default=0)
    (work / LOG).write_text("".join(f"{line}\n" for line in lines[:step]), encoding="utf-8")
    last = whole.get(step)
    for other in found:
        if other != last:
            shutil.rmtree(other)
    return last


def _whole_lines(path: Path) -> list[str]:
    """The log's lines, one a step from step 1, up to the first that a kill has torn."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return list(takewhile(_is_json, lines))


def _is_whole(checkpoint: Path) -> bool:
    """Trainer writes its state last."""
    state = checkpoint / "trainer_state.json"
    return state.is_file() and _is_json(state.read_text(encoding="utf-8", errors="replace"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
