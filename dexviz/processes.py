"""Several processes of one training run, as `torchrun` starts them. A run of one process is the plain case of all of it.

Importing it needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    PartialState(cpu=device.type == "cpu")
    try:
        yield
    finally:
        dist.destroy_process_group()


def wait() -> None:
    """Wait until every process has come here."""
    if count() > 1:
        import torch.distributed as dist

        dist.barrier()


def shared_loss(view: View, blocks_BN: torch.Tensor) -> Loss:
    """`mean_loss` of int64 [blocks, block], each process reading its share; all of them get the whole."""
    import torch
    import torch.distributed as dist

    from dexviz.heldout import Loss, mean_loss

    if count() == 1:
        return mean_loss(view, blocks_BN.numpy())
    share = blocks_BN[index() :: count()]
    own = mean_loss(view, share.numpy()) if len(share) else Loss(0.0, 0, 0)
    sums = torch.tensor([own.mean * own.tokens, own.tokens, own.blocks], dtype=torch.float64, device=view.model.device)
    dist.all_reduce(sums)
    total, tokens, blocks = sums.tolist()
    return Loss(total / tokens, int(tokens), int(blocks))
