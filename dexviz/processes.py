"""Several processes of one training run, as `torchrun` starts them. A run of one process is the plain case of all of it.

Importing it needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dexviz.heldout import Loss
    from dexviz.models import View


def index() -> int:
    """Which of the processes this is; 0 writes files and speaks."""
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """Join the other processes for the length of a block."""
    import torch.distributed as dist

    if count() == 1 or dist.is_initialized():
        yield
        return
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    PartialState(cpu=device.type == "cpu")
    try:
        yield
    finally:
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)  # it would believe that they are still joined


def wait() -> None:
    """Wait until every process has come here."""
    if count() > 1:
        import torch.distributed as dist

        dist.barrier()


def shared_losses(view: View, blocks: np.ndarray) -> np.ndarray:
    """`block_losses` of int64 [blocks, block], each process reading its share; all of them get the whole, float64 [blocks]."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from dexviz.heldout import block_losses

    if count() == 1:
        return block_losses(view, blocks)
    sums = np.zeros(len(blocks))
    sums[index() :: count()] = block_losses(view, blocks[index() :: count()])
    whole = torch.from_numpy(sums).to(view.model.device)
    dist.all_reduce(whole)
    return whole.cpu().numpy()


def shared_loss(view: View, blocks: np.ndarray) -> Loss:
    """`mean_loss` of int64 [blocks, block], each process reading its share; all of them get the whole."""
    from dexviz.heldout import Loss

    return Loss.of(shared_losses(view, blocks), blocks.shape[1])
