"""The model card of what was trained: what it is, how it was made, what was measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dexviz.catalogue import KNOWN_MODELS
from dexviz.dex import DexConfig
from dexviz.models import LoadedModel
from dexviz.train_config import METHODS

if TYPE_CHECKING:
    from dexviz.train_config import TrainConfig
    from dexviz.training import TrainResult

COMPARISON = "<!-- comparison with controls -->"
"""Where a table of the adapter among its controls belongs, once it has been measured."""


def model_card(result: TrainResult, dex: DexConfig, loaded: LoadedModel, config: TrainConfig) -> str:
    """Markdown text of the card."""
    perplexity = f"{_perplexity(result.base.mean)} → {_perplexity(result.variant.mean)}"
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    settings = "\n".join(f"| {name} | {value} |" for name, value in _settings(result, dex, config).items())
    return f"""# {_title(config)} for {loaded.name}

{_what(dex, loaded, config)}
Trained: {", ".join(config.trained)}; {result.parameters:,} parameters. The base is unchanged.

| measured | base | with this adapter | change |
|---|---|---|---|
| held-out loss, nats a token | {result.base.mean:.4f} | {result.variant.mean:.4f} | {_change(result)} |

Held-out text: the State of the Union address of 2026, whole, in {result.base.blocks} non-overlapping blocks
({result.base.tokens:,} predicted tokens), {dtype}. {_novelty(loaded.name)}
Perplexity {perplexity}. Brackets: 95 % bootstrap interval over the blocks.
A lower loss on speeches says that the adapter has learnt the speeches' style; controls decide how much of that is due to DEX.

{COMPARISON}

| setting | value |
|---|---|
{settings}

Use: `dexviz.load_pair("{loaded.name}", adapter="<this folder>")`. The settings to make it again are in `adapter_config.json`.
Intended for research on attention heads. Limits: small effects, one corpus, one seed. Licence: Apache-2.0.
"""


def _change(result: TrainResult) -> str:
    """In percent, with its interval where there is one."""
    text = f"{100 * result.change:+.2f} %"
    if result.interval is None:
        return text
    low, high = result.interval
    return f"{text} [{100 * low:+.2f}, {100 * high:+.2f}]"


def _title(config: TrainConfig) -> str:
    return "DEX adapter" if config.method == "dex" else f"Control “{config.method}”"


def _what(dex: DexConfig, loaded: LoadedModel, config: TrainConfig) -> str:
    if not config.adapts_heads:
        return f"A control of DEX (arXiv 2505.16333) on `{loaded.name}`: {METHODS[config.method]}."
    heads = [len(layer) for layer in dex.heads]
    number = " to ".join(str(n) for n in sorted({min(heads), max(heads)}))
    chosen = "those of a plan" if config.heads else "those with the highest attention entropy"
    kind = (
        "A differential extension (DEX, arXiv 2505.16333)" if config.method == "dex" else "A control of DEX (arXiv 2505.16333)"
    )
    return (
        f"{kind} of `{loaded.name}`: O' = {METHODS[config.method].split(',')[0]} on {sum(heads)} of\n"
        f"{len(heads) * dex.query_heads} heads ({number} a layer, {chosen})."
    )


def _settings(result: TrainResult, dex: DexConfig, config: TrainConfig) -> dict[str, object]:
    blocks = config.batch * config.accumulate
    seen = config.steps * blocks * config.block
    rows: dict[str, object] = {
        "corpus": config.data,
        "steps × blocks × tokens": f"{config.steps} × {blocks} × {config.block} = {seen:,} tokens",
        "step of the weights": result.steps,
        "arithmetic": config.precision,
    }
    if config.adapts_heads:
        start = "0.8 − 0.6 · exp(−0.3 · layer)" if dex.lambda_init is None else dex.lambda_init
        low, high = min(result.lambdas), max(result.lambdas)
        rows |= {
            "annealing length T": f"{dex.steps} steps",
            "λ_init": start,
            "λ after training": f"{low:.3f} to {high:.3f}",
        }
    if config.method != "attention-only":
        rows["learning rate"] = f"{config.rate:g}, cosine"
    if config.full:
        rows["learning rate of W_K, W_V, W_O"] = f"{config.weight_learning_rate:g}, cosine"
    return rows | {"seed": config.seed}


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
