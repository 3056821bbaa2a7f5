"""The model card of a trained adapter: what it is, how it was made, what was measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dexviz.catalogue import KNOWN_MODELS
from dexviz.dex import DexConfig
from dexviz.models import LoadedModel

if TYPE_CHECKING:
    from dexviz.train_config import TrainConfig
    from dexviz.training import TrainResult


def model_card(result: TrainResult, dex: DexConfig, loaded: LoadedModel, config: TrainConfig) -> str:
    """Markdown text of the card."""
    low, high = min(result.lambdas), max(result.lambdas)
    seen = config.steps * config.batch * config.block
    heads = [len(layer) for layer in dex.heads]
    perplexity = f"{_perplexity(result.base.mean)} → {_perplexity(result.variant.mean)}"
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return f"""# DEX adapter for {loaded.name}

A differential extension (DEX, arXiv 2505.16333) of `{loaded.name}`: O' = O − λ · O W_D on {sum(heads)} of
{len(heads) * dex.query_heads} heads ({min(heads)} to {max(heads)} a layer, those with the highest attention entropy). Trained
by dexviz in `adapter` mode: W_D and λ alone, the base is unchanged.

| measured | base | with this adapter | change |
|---|---|---|---|
| held-out loss, nats a token | {result.base.mean:.4f} | {result.variant.mean:.4f} | {100 * result.change:+.2f} % |

Held-out text: the State of the Union address of 2026, whole, in {result.base.blocks} non-overlapping blocks
({result.base.tokens:,} predicted tokens), {dtype}. {_novelty(loaded.name)}
Perplexity {perplexity}.
A lower loss on speeches says that the adapter has learnt the speeches' style; controls decide how much of that is due to DEX.

| setting | value |
|---|---|
| corpus | {config.data} |
| steps × blocks × tokens | {config.steps} × {config.batch} × {config.block} = {seen:,} tokens |
| annealing length T | {dex.steps} steps |
| λ_init | {"0.8 − 0.6 · exp(−0.3 · layer)" if dex.lambda_init is None else dex.lambda_init} |
| λ after training | {low:.3f} to {high:.3f} |
| learning rate | {config.learning_rate:g}, cosine |
| seed | {config.seed} |

Use: `dexviz.load_pair("{loaded.name}", adapter="<this folder>")`. The settings to make it again are in `adapter_config.json`.
Intended for research on attention heads. Limits: small effects, one corpus, one seed. Licence: Apache-2.0.
"""


def _novelty(base: str) -> str:
    """Who may have seen the held-out text; of unknown base models nobody here can tell."""
    if base in KNOWN_MODELS:
        return "It is later than the base model and was not trained on."
    return "The adapter was not trained on it; whether the base model was is not known."


def _perplexity(loss: float) -> str:
    try:
        return f"{math.exp(loss):.2f}"
    except OverflowError:
        return "∞"
