"""The loop of training: transformers' Trainer over what is trained of a frozen model, and its checkpoints.

Checkpoints hold what is trained, alone; a stopped run goes on from the last one that is whole. Gradients are not clipped, so
the logged norms are those of the optimiser's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from dexviz import processes
from dexviz.checkpoints import CHECKPOINTS, last_checkpoint, writing
from dexviz.errors import TrainingError
from dexviz.train_config import TrainConfig
from dexviz.trainee import Trainee, optimizer
from dexviz.training_log import Stopping, TrainingLog

_STATE = "adapter_state.pt"


def run(
    trainee: Trainee,
    blocks: np.ndarray,
    config: TrainConfig,
    work: Path,
    log: TrainingLog,
    identity: dict[str, Any],
    resume: bool,
) -> int:
    """Train on blocks of token ids, int64 [blocks, block]; leaves the trainee finished, and returns the step of its weights.

    Args:
        work: folder of checkpoints and log; a stopped run of the same `identity` goes on from there.
        resume: refuse to start anew where the stopped run was of something else.

    Raises:
        TrainingError: the loss or a weight became NaN or infinite (says at which step), or the disk is full.
    """
    if processes.index() == 0:
        with writing(work):
            last_checkpoint(work, identity, resume=resume)
    processes.wait()
    last = max((work / CHECKPOINTS).glob("checkpoint-*"), default=None, key=lambda path: int(path.name.split("-")[1]))
    trainer = _AdapterTrainer(
        model=trainee,
        args=_arguments(trainee, config, work),
        train_dataset=_Blocks(blocks),
        callbacks=[log],
        optimizers=(optimizer(trainee, config), None),
    )
    trainer.pop_callback(PrinterCallback)
    step = _stopped(last, trainer, config)
    if step is None:
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
        step = trainer.state.global_step
    if log.failed_at is not None:
        raise TrainingError(
            "a finite loss and finite weights",
            f"NaN or infinity at step {log.failed_at}",
            "Choose a lower learning rate; training then starts anew.",
        )
    best = log.stopping
    if best.weights and best.step != step:
        trainee.load_state_dict(best.weights)
        step = best.step
    trainee.set_step(step)
    trainee.finish()
    return step


def _stopped(last: Path | None, trainer: _AdapterTrainer, config: TrainConfig) -> int | None:
    """The step of a checkpoint at which training had stopped early already, which is loaded; None where it is to go on."""
    if last is None or not config.patience:
        return None
    trainer._load_from_checkpoint(str(last))
    return int(last.name.split("-")[1]) if trainer.log_callback().stopping.waited >= config.patience else None


def _arguments(trainee: Trainee, config: TrainConfig, work: Path) -> TrainingArguments:
    device = trainee.view.model.device
    arguments = TrainingArguments(
        output_dir=str(work / CHECKPOINTS),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, config.steps // 10),
        weight_decay=0.0,
        max_grad_norm=0.0,
        bf16=_is_bf16(config.precision, device),
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=2,
        seed=config.seed,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        use_cpu=device.type == "cpu",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process drives one GPU; more of them need torchrun
    return arguments


def _is_bf16(precision: str, device: torch.device) -> bool:
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


@contextmanager
def enough_memory(config: TrainConfig) -> Iterator[None]:
    """Turns a lack of memory into a TrainingError; on the CPU torch reports it as a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in text:
            raise
        got = f"too little for {config.batch} blocks of {config.block} tokens: {text[:120]}"
        todo = "Choose a smaller --batch (with --accumulate) or --block."
        raise TrainingError("room in memory for a batch", got, todo) from error


class _AdapterTrainer(Trainer):
    """Trainer whose checkpoints hold what is trained, alone."""

    def log_callback(self) -> TrainingLog:
        return next(found for found in self.callback_handler.callbacks if isinstance(found, TrainingLog))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with writing(Path(str(self.args.output_dir)).parent):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        trainee = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        torch.save({"trainee": trainee.state_dict(), "stopping": vars(self.log_callback().stopping)}, folder / _STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        state = torch.load(Path(resume_from_checkpoint) / _STATE, weights_only=True)
        trainee = self.accelerator.unwrap_model(model or self.model, keep_torch_compile=False)
        trainee.load_state_dict(state["trainee"])
        self.log_callback().stopping = Stopping(**state["stopping"])


class _Blocks(torch.utils.data.Dataset):
    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.blocks[index])}
