"""What tells heads apart before one is adapted: mean attention entropy, and gradient importance  (README, "Redundancy").

    entropy_h    = mean over queries i and blocks of  −Σ_j A_ij log A_ij
    importance_h = mean over blocks of  |∂loss / ∂m_h|,   O'_h ← m_h · O'_h,   m_h = 1

loss is a block's mean next-token loss. By the chain rule ∂loss/∂m_h = Σ_ie (∂loss/∂O')_ie O'_ie, so that one backward pass
serves all heads and no gate exists. Michel et al., arXiv 1905.10650, Eq. 2; with blocks as the examples.

Axes: L layers, H query heads, B blocks, N tokens, E value width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dexviz.attention import AttentionCall
from dexviz.errors import BudgetError, TrainingError
from dexviz.models import View, differential
from dexviz.recorder import capture
from dexviz.records import Tokens

OnBlocks = Callable[[int, int], None]
"""Called with (blocks done, blocks in all)."""
_BATCH_TOKENS = 1024


def mean_entropy(view: View, blocks: Int[np.ndarray, "B N"], progress: OnBlocks | None = None) -> Float[np.ndarray, "L H"]:
    """Mean attention entropy of every head over blocks of token ids, in nats: float32 [L, H].

    Blocks are read one by one and summed up as they come. A layer without softmax attention is NaN. In a DIFF Transformer these
    are its logical heads, as `capture` has them.

    Raises:
        TrainingError: no blocks, or blocks that the model cannot read.
        BudgetError: the pass does not fit into the device's memory.
    """
    _check_blocks(view, blocks, least=1)
    total: Any = 0.0
    n = blocks.shape[1]
    with _eval_mode(view.model):
        for done, ids in enumerate(blocks, start=1):
            tokens = Tokens(ids, ("",) * n, "", np.zeros((n, 2), dtype=np.int64), np.zeros(n, dtype=bool))
            total = total + capture(view, tokens).mean("entropy").astype(np.float64)
            _report(progress, done, len(blocks))
    return (total / len(blocks)).astype(np.float32)


def gradient_importance(
    view: View, blocks: Int[np.ndarray, "B N"], progress: OnBlocks | None = None
) -> Float[np.ndarray, "L H"]:
    """Mean |∂loss/∂m_h| of a gate m_h = 1 on the output O' of every head, in nats: float32 [L, H].

    Weights, their gradients and `requires_grad` stay as they are; the numbers do not depend on how blocks are batched, and are
    summed in float32 whatever the model's type. A layer without softmax attention is NaN.

    Raises:
        AdapterError: a DIFF Transformer, which DEX cannot adapt.
        TrainingError: no blocks, blocks that the model cannot read, or a gradient that is not finite.
        BudgetError: the backward pass does not fit into the device's memory.
    """
    if view.layout.differential:
        raise differential(view.loaded)
    _check_blocks(view, blocks, least=2)
    batch = max(1, _BATCH_TOKENS // blocks.shape[1])
    total = np.zeros((view.layout.layers, view.layout.heads))
    with _eval_mode(view.model):
        for start in range(0, len(blocks), batch):
            some = blocks[start : start + batch]
            total += _gate_gradients(view, some)
            _report(progress, start + len(some), len(blocks))
    silent = [layer for layer in range(view.layout.layers) if layer not in view.layout.modules]
    if not np.isfinite(total).all():
        kind = str(view.model.dtype).removeprefix("torch.")
        raise TrainingError("finite gradients of the loss", f"NaN or infinity in {kind}", "Measure in float32 (--dtype).")
    total[silent] = np.nan
    return (total / len(blocks)).astype(np.float32)


def _gate_gradients(view: View, blocks: np.ndarray) -> np.ndarray:
    """Σ over blocks of |∂loss/∂m_h|, float64 [L, H]; 0 in layers that have no attention."""
    adapted: dict[int, Tensor] = {}

    def record(call: AttentionCall) -> None:
        adapted[call.layer] = call.adapted_BHNE

    try:
        with torch.inference_mode(False), torch.enable_grad(), _graph_from_embeddings(view.model), view.active(record):
            ids_BN = torch.from_numpy(blocks).to(view.model.device)
            logits_BNV = view.model(ids_BN, use_cache=False).logits[:, :-1]
            logits_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
            loss = F.cross_entropy(logits_BNV.flatten(0, 1), ids_BN[:, 1:].flatten(), reduction="sum")
            gradients = torch.autograd.grad(loss, list(adapted.values()))
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"room for a backward pass over {blocks.size:,} tokens on {view.model.device}",
            str(error),
            "Choose a shorter block.",
        ) from error
    total = np.zeros((view.layout.layers, view.layout.heads))
    for (layer, o_BHNE), g_BHNE in zip(adapted.items(), gradients, strict=True):
        kind = torch.promote_types(o_BHNE.dtype, torch.float32)
        gate_BH = (g_BHNE.to(kind) * o_BHNE.detach().to(kind)).sum(dim=(2, 3)) / (blocks.shape[1] - 1)
        total[layer] = gate_BH.abs().sum(dim=0).double().cpu().numpy()
    return total


@contextmanager
def _graph_from_embeddings(model: nn.Module) -> Iterator[None]:
    """Make forward passes of this thread differentiable though every weight is frozen: the graph starts at the embeddings."""
    own = get_ident()

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_() if get_ident() == own else output

    embeddings: Any = model
    handle = embeddings.get_input_embeddings().register_forward_hook(start)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout while measuring; every module is afterwards in the mode in which it was."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_blocks(view: View, blocks: np.ndarray, least: int) -> None:
    limit = view.loaded.max_tokens
    if blocks.ndim != 2 or not len(blocks) or not least <= blocks.shape[1] <= limit:
        raise TrainingError(f"blocks of {least} to {limit:,} tokens", f"shape {blocks.shape}", "Choose another block length.")
    vocabulary = int(view.model.config.get_text_config().vocab_size)
    if not (blocks.min() >= 0 and blocks.max() < vocabulary):
        raise TrainingError(f"token ids within 0..{vocabulary - 1}", "others", "Tokenise with this model's tokenizer.")


def _report(progress: OnBlocks | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
