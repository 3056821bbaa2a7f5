"""Which blocks of a corpus calibrate, which validate, and which are trained on.

Calibration and validation blocks are drawn by seed from the first 256 blocks that are read, whatever else is wanted: heads
selected on their own are those that training with the same settings selects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dexviz.corpora import documents, pack
from dexviz.errors import TrainingError
from dexviz.models import LoadedModel, no_tokenizer

_POOL = 256


@dataclass(frozen=True)
class Source:
    """Where the text of a run comes from."""

    data: str
    column: str
    block: int
    """Tokens a block."""
    seed: int


@dataclass(frozen=True)
class Blocks:
    """Token ids of a corpus, each int64 [blocks, block]; no block is in two of them."""

    calibration: np.ndarray
    validation: np.ndarray
    training: np.ndarray


def read_blocks(loaded: LoadedModel, source: Source, *, calibration: int, validation: int = 0, training: int = 0) -> Blocks:
    """The first blocks of a corpus, in an order that the seed decides: so many of each kind, of the last kind perhaps fewer.

    Raises:
        TrainingError: the corpus is unusable or too short, or a block is longer than the model's context.
    """
    if loaded.tokenizer is None:
        raise no_tokenizer(loaded)
    if source.block > loaded.max_tokens:
        raise TrainingError(f"blocks of at most {loaded.max_tokens} tokens", str(source.block), "Choose a shorter block.")
    texts = documents(source.data, column=source.column, seed=source.seed)
    kept = calibration + validation
    wanted = max(_POOL, kept + training)
    blocks = pack(texts, loaded.tokenizer, source.block, seed=None, limit=wanted)
    if len(blocks) < kept + min(1, training):
        purpose = "calibration and validation take" if validation else "calibration takes"
        raise TrainingError(
            f"{'more than' if training else 'at least'} {kept} blocks of {source.block} tokens, which {purpose}",
            f"{len(blocks)} in {source.data!r}",
            "Add text, or choose a shorter block or fewer calibration blocks.",
        )
    order = np.random.default_rng(source.seed)
    pool = order.permutation(blocks[: max(_POOL, kept)])
    rest = order.permutation(np.concatenate([pool[kept:], blocks[max(_POOL, kept) :]]))
    return Blocks(pool[:calibration], pool[calibration:kept], rest[:training])
