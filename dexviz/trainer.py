"""The loop of DEX training: transformers' Trainer over an adapter whose base is frozen, its log, and its checkpoints.

Checkpoints hold the adapter alone; a killed run goes on from the last one that is whole.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
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


def run(pair: ModelPair, adapter: DexAdapter, blocks: np.ndarray, config: TrainConfig, work: Path, log: TrainingLog) -> None:
    """Train the adapter of `pair.variant` on blocks of token ids; leaves it at the end of its schedule, frozen.

    Args:
        work: folder of checkpoints and log; a killed run of the same configuration goes on from there.

    Raises:
        TrainingError: the loss became NaN or infinite; says at which step.
    """
    work.mkdir(parents=True, exist_ok=True)
    last = _last_checkpoint(work, config)
    arguments = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, config.steps // 10),
        weight_decay=0.0,
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
            "a finite loss",
            f"NaN or infinity at step {log.failed_at}",
            f"Lower the learning rate; {work} keeps the last good checkpoint.",
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
    """Moves λ(t) along, and writes a line a step: loss, held-out loss, λ per layer, gradient norms of W_D and λ."""

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
        """Write the step's line; stop at a loss that is no number."""
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            self.failed_at, control.should_training_stop = state.global_step, True
            return
        last = state.global_step >= self.config.steps
        every = self.config.evaluate_every
        due = last or (every > 0 and state.global_step % every == 0)
        line = {
            "step": state.global_step,
            "loss": round(loss, 5),
            "held_out": round(mean_loss(self.pair.variant, self.held_out).mean, 5) if due else None,
            "lambda": [round(value, 5) for value in self.adapter.lambdas()],
            "grad_norm_w_d": self.norms.get("w_d"),
            "grad_norm_lambda": self.norms.get("lambda_learn"),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.on_step(line)


def _last_checkpoint(work: Path, config: TrainConfig) -> Path | None:
    """The newest checkpoint of a killed run of the same configuration; the log is cut back to it."""
    settings = work / "train_config.json"
    wanted = json.dumps(asdict(config), sort_keys=True)
    if not settings.is_file() or settings.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        settings.write_text(wanted, encoding="utf-8")
        return None
    complete = [p for p in (work / "checkpoints").glob("checkpoint-*") if (p / "trainer_state.json").is_file()]
    if not complete:
        (work / LOG).unlink(missing_ok=True)
        return None
    last = max(complete, key=lambda p: int(p.name.split("-")[1]))
    step = int(last.name.split("-")[1])
    lines = [line for line in (work / LOG).read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
    (work / LOG).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return last
