"""Held-out loss: mean next-token loss over non-overlapping blocks of a text that nothing was trained on.

The protocol for the default model: the whole 2026 address, blocks of 256 tokens, float32, nats per predicted token. A model
with a shorter context reads blocks of its length. The protocol leaves the tokens of the last, short block out. Of any other
text the tail of each document is a piece of its own, unless it is one token, which predicts nothing; `Pieces` counts what is
not read. No special tokens are added.

Axes: B pieces of a batch, N tokens of a piece, R rows of logits at a time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dexviz.corpora import documents, held_out_text, pack
from dexviz.errors import EvaluationError
from dexviz.models import View, no_tokenizer

BLOCK = 256
MAX_BLOCK = 1024
"""Longest block: bounds the logits that are held at a time."""
PROTOCOL = "State of the Union address of 2026"
_BATCH_TOKENS = 1024
_ROWS = 128
"""Rows of logits that are normalised at a time."""

Progress = Callable[[int, int], None]
"""Called with the pieces done and their number; what it raises stops the measurement."""


@dataclass(frozen=True)
class Loss:
    """Mean loss in nats a predicted token, over `tokens` predictions in `blocks` blocks."""

    mean: float
    tokens: int
    blocks: int

    @classmethod
    def of(cls, sums: np.ndarray, block: int) -> Loss:
        """From the summed losses of blocks of `block` tokens, each of which predicts all but its first."""
        tokens = len(sums) * (block - 1)
        return cls(float(sums.sum() / tokens), tokens, len(sums))


@dataclass(frozen=True, eq=False)
class Pieces:
    """A text cut into pieces that are read on their own. No piece crosses the border of a document."""

    source: str
    block: int
    """Length of a whole piece in tokens."""
    ids: tuple[np.ndarray, ...]
    """Token ids of each piece, int64 [2 ≤ N ≤ block]."""
    document: np.ndarray
    """Number of the document that each piece belongs to, int64 [pieces], from 0 without gaps."""
    skipped: int
    """Documents of fewer than two tokens, which are left out."""
    unread: int
    """Tokens of the other documents that are in no piece."""

    @property
    def documents(self) -> int:
        return int(self.document[-1]) + 1

    @property
    def unit(self) -> str:
        """What a bootstrap draws: documents, or blocks where there is one document only."""
        return "document" if self.documents > 1 else "block"

    def by_unit(self, totals: np.ndarray) -> np.ndarray:
        """Sums over each piece, [pieces], as sums over each unit, [units]."""
        return np.bincount(self.document, weights=totals) if self.unit == "document" else totals


@dataclass(frozen=True, eq=False)
class Totals:
    """Sums over each piece, float64 [pieces]; None where there is no variant, or no common vocabulary for the KL."""

    tokens: np.ndarray
    """Predicted tokens."""
    base: np.ndarray
    """Loss of the base in nats."""
    variant: np.ndarray | None
    kl: np.ndarray | None
    """KL(base‖variant) of the next-token distributions in nats."""
    kl_max: float | None
    """Largest KL of a single token."""


def held_out_blocks(view: View, block: int = BLOCK) -> np.ndarray:
    """Token ids of the held-out text in non-overlapping blocks, in order: int64 [blocks, block].

    A block is no longer than the model's context.
    """
    if view.loaded.tokenizer is None:
        raise no_tokenizer(view.loaded)
    length = min(block, view.loaded.max_tokens)
    return pack([held_out_text()], view.loaded.tokenizer, length, seed=None, separate=False)


def mean_loss(view: View, blocks: np.ndarray) -> Loss:
    """Mean next-token loss of a view over blocks of token ids, int64 [blocks, block].

    Each block is read on its own, so its first token is not predicted.
    """
    return Loss.of(block_losses(view, blocks), blocks.shape[1])


@torch.inference_mode()
def block_losses(view: View, blocks: np.ndarray) -> np.ndarray:
    """Sum of the next-token losses of each block of token ids, int64 [blocks, block], in nats: float64 [blocks]."""
    sums = []
    batch = max(1, _BATCH_TOKENS // blocks.shape[1])
    with view.active():
        for start in range(0, len(blocks), batch):
            ids = torch.from_numpy(blocks[start : start + batch]).to(view.model.device)
            logits = view.model(ids, use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            sums.append(losses.reshape(len(ids), -1).double().sum(dim=1).cpu().numpy())
    return np.concatenate(sums) if sums else np.zeros(0)


def held_out_pieces(
    view: View,
    block: int = BLOCK,
    *,
    data: str | None = None,
    column: str = "text",
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
) -> Pieces:
    """The text to measure on: the protocol's, or the documents of `data`, a source of `corpora.documents`.

    Args:
        block: tokens of a piece, cut to the model's context.
        limit: read this many documents, chosen by `seed` where the source is a folder or a data set.

    Raises:
        EvaluationError: the block is too short or too long, or no document has two tokens.
        TrainingError: the source cannot be read, or the address does not fill one block.
        ModelError: the model has no tokenizer.
    """
    if not 2 <= block <= MAX_BLOCK:
        raise EvaluationError(f"blocks of 2 to {MAX_BLOCK:,} tokens", f"{block:,}", "Choose another block length.")
    tokenizer, block = view.loaded.tokenizer, min(block, view.loaded.max_tokens)
    if tokenizer is None:
        raise no_tokenizer(view.loaded)
    if data is None:
        blocks = held_out_blocks(view, block)
        unread = len(_ids(tokenizer, held_out_text())) - blocks.size
        return Pieces(PROTOCOL, block, tuple(blocks), np.zeros(len(blocks), dtype=np.int64), 0, unread)
    pieces: list[np.ndarray] = []
    owner: list[int] = []
    skipped = unread = read = 0
    for text in documents(data, column=column, split=split, seed=seed, held_out_too=True):
        if limit is not None and read + skipped >= limit:
            break
        ids = _ids(tokenizer, text)
        cut = [part for start in range(0, len(ids), block) if len(part := ids[start : start + block]) > 1]
        if not cut:
            skipped += 1
            continue
        pieces += cut
        owner += [read] * len(cut)
        unread += len(ids) - sum(map(len, cut))
        read += 1
    if not pieces:
        raise EvaluationError("a document of at least two tokens", f"none in {data!r}", "Choose another text.")
    return Pieces(data, block, tuple(pieces), np.asarray(owner), skipped, unread)


@torch.inference_mode()
def measure(base: View, variant: View | None, pieces: Pieces, progress: Progress | None = None) -> Totals:
    """Losses of both views and their KL in one pass: each batch is read by both, and its logits are then dropped.

    Distributions are float32 whatever the models' dtype; sums are float64.
    """
    count = len(pieces.ids)
    sums_3P = np.zeros((3, count))
    kl_max, comparable = 0.0, True
    done = 0
    for chosen in _batches(pieces.ids):
        batch = [pieces.ids[i] for i in chosen]
        logits_BNV = [_logits(view, batch) for view in (base, variant) if view is not None]
        comparable = comparable and len({logits.shape[-1] for logits in logits_BNV}) == 1
        for row, i in enumerate(chosen):
            values_3N = _piece_values([logits[row] for logits in logits_BNV], pieces.ids[i], comparable)
            sums_3P[:, i] = values_3N.sum(axis=1)
            kl_max = max(kl_max, float(values_3N[2].max()))
        done += len(chosen)
        if progress is not None:
            progress(done, count)
    lengths = np.array([len(ids) - 1 for ids in pieces.ids], dtype=np.float64)
    with_kl = variant is not None and comparable
    return Totals(
        lengths,
        sums_3P[0],
        sums_3P[1] if variant is not None else None,
        sums_3P[2] if with_kl else None,
        kl_max if with_kl else None,
    )


def _ids(tokenizer: Callable[..., dict[str, list[int]]], text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"], dtype=np.int64)


def _batches(ids: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Numbers of pieces of similar length that together, padded, have at most `_BATCH_TOKENS` tokens."""
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: -len(ids[i])):
        if batch and (len(batch) + 1) * len(ids[batch[0]]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def _logits(view: View, batch: Sequence[np.ndarray]) -> Tensor:
    """Logits [B, N, V] of pieces that are padded at the end, where a causal model's predictions do not see it."""
    ids_BN = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
    for row, ids in enumerate(batch):
        ids_BN[row, : len(ids)] = torch.from_numpy(ids)
    with view.active():
        return view.model(ids_BN.to(view.model.device), use_cache=False).logits


def _piece_values(logits_NV: Sequence[Tensor], ids: np.ndarray, comparable: bool) -> np.ndarray:
    """Loss of base, loss of variant and KL of each predicted token: float64 [3, N − 1]; zeros where there is no variant."""
    values = np.zeros((3, len(ids) - 1))
    for start in range(0, len(ids) - 1, _ROWS):
        rows = slice(start, min(start + _ROWS, len(ids) - 1))
        log_RV = [F.log_softmax(logits[rows].float(), dim=-1) for logits in logits_NV]
        for model, log in enumerate(log_RV):
            target = torch.from_numpy(ids[1:][rows]).to(log.device)
            values[model, rows] = -log.gather(1, target[:, None])[:, 0].double().cpu().numpy()
        if len(log_RV) == 2 and comparable:
            log_p, log_q = log_RV[0], log_RV[1].to(log_RV[0].device)
            kl_R = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1).clamp(min=0)
            values[2, rows] = kl_R.double().cpu().numpy()
    return values
