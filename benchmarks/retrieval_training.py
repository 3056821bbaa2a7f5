"""Training a Llama and a DiffLlama of the same size on the retrieval language (`dexviz.retrieval`), same data, same steps.

Step t of seed s draws its sequences from (s, t) alone, so that both models see the same ones and a stopped run goes on exactly.
The number of facts grows during training, and two helping losses, which fade, show the way to a first lookup (`losses`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dexviz.retrieval import FACT, MOST_FACTS, QUESTION, WORDS, Retrieval, draw, make_tokenizer

KINDS = {"llama": "Llama", "diffllama": "DiffLlama"}
"""transformers' name of the architecture → name in print."""
CHECKPOINT = "checkpoint.pt"
LOG = "training_log.jsonl"


@dataclass(frozen=True)
class Recipe:
    """What both models of the pair share."""

    hidden: int = 64
    layers: int = 2
    heads: int = 8
    """Softmax heads; DIFF has half as many logical ones."""
    intermediate: int = 128
    theta: float = 100.0
    """Base of the rotary frequencies: low, as texts are short."""
    steps: int = 12000
    tokens: int = 2048
    """Tokens a step, at most."""
    first_facts: int = 8
    most_facts: int = 48
    grow_from: int = 1000
    """Step from which the largest number of facts grows from `first_facts`, and the largest similarity from 0 …"""
    grow_to: int = 5000
    """… and step at which they are `most_facts` and 1."""
    questions: int = 16
    """Questions a sequence, at most as many as facts."""
    rate: float = 3e-3
    warmup: int = 100
    spread: float = 0.08
    """Standard deviation of the initial weights."""
    fade_from: int = 6000
    """Step from which the two helping losses fade …"""
    fade_to: int = 9000
    """… and step after which only answers count."""
    checkpoint_every: int = 500

    def grown(self, step: int) -> float:
        """How far the task has grown, 0 to 1."""
        return min(max((step - self.grow_from) / max(self.grow_to - self.grow_from, 1), 0.0), 1.0)

    def facts(self, draw_from: np.random.Generator, step: int) -> int:
        """Facts of a step's sequences: half of the steps as many as it allows, the others log-uniform from 2 on."""
        top = self.first_facts * (self.most_facts / self.first_facts) ** self.grown(step)
        if draw_from.uniform() < 0.5:
            return round(top)
        return round(math.exp(draw_from.uniform(math.log(2), math.log(top))))

    def help_weight(self, step: int) -> float:
        """Weight of the two helping losses, 1 to 0."""
        return 1 - min(max((step - self.fade_from) / max(self.fade_to - self.fade_from, 1), 0.0), 1.0)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a tenth."""
        return self.rate * min(1.0, step / self.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps)))


def build(kind: str, recipe: Recipe, seed: int) -> PreTrainedModel:
    """An untrained model of the pair, float32."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(WORDS),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=8 * MOST_FACTS,
        tie_word_embeddings=True,
        initializer_range=recipe.spread,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": recipe.theta}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def sequences(recipe: Recipe, seed: int, step: int) -> Retrieval:
    """What both models read in a step; similarity is drawn anew each time."""
    random = np.random.default_rng((seed, step))
    facts = recipe.facts(random, step)
    questions = min(facts, recipe.questions)
    count = max(1, recipe.tokens // (1 + FACT * facts + QUESTION * questions))
    return draw(random, count, facts, questions, float(random.uniform()) * recipe.grown(step))


@dataclass(frozen=True)
class Losses:
    """Of one step; mean cross-entropies, nats."""

    answers: Tensor
    key: Tensor
    """A question's second word after its first: a first lookup, which answers build on."""
    back: Tensor
    """The two words before each word, read off the first layer with the model's own final norm and embeddings."""

    def total(self, help_weight: float) -> Tensor:
        """What the step descends on."""
        return self.answers + help_weight * (self.key + self.back)


def losses(model: PreTrainedModel, sample: Retrieval) -> Losses:
    """The losses of one step's sequences.

    Answers alone leave both kinds of model at chance for many millions of tokens: a lookup needs a layer that carries each word
    on to the next ones before a later layer gains anything from looking for it. `Losses.back` asks for that layer.
    """
    ids_BN, rows_Q = torch.from_numpy(sample.ids_BN), torch.from_numpy(sample.rows)
    body, words = model.base_model, model.get_output_embeddings()
    found = body(ids_BN, use_cache=False, output_hidden_states=True)
    last_BND, first_BND = found.last_hidden_state, body.norm(found.hidden_states[1])
    guesses_BNV = words(first_BND)[:, 2:].log_softmax(-1)
    before = [guesses_BNV.gather(-1, ids_BN[:, 2 - back : -back, None]).mean() for back in (1, 2)]
    return Losses(
        _next(words(last_BND[:, rows_Q]), ids_BN[:, rows_Q + 1]),
        _next(words(last_BND[:, rows_Q - 1]), ids_BN[:, rows_Q]),
        -(before[0] + before[1]) / 2,
    )


def _next(logits_BQV: Tensor, ids_BQ: Tensor) -> Tensor:
    return F.cross_entropy(logits_BQV.flatten(0, 1), ids_BQ.flatten())


def train(
    kind: str, seed: int, recipe: Recipe, folder: Path, on_log: Callable[[dict], None] = lambda line: None
) -> PreTrainedModel:
    """Train one model, from the folder's checkpoint where there is one; leaves model, tokenizer and log in the folder."""
    model = build(kind, recipe, seed)
    descent = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = _resume(folder / CHECKPOINT, model, descent, recipe)
    recent: list[tuple[float, float, float]] = []
    for step in range(lines[-1]["step"] + 1 if lines else 1, recipe.steps + 1):
        for group in descent.param_groups:
            group["lr"] = recipe.learning_rate(step)
        parts = losses(model, sequences(recipe, seed, step))
        parts.total(recipe.help_weight(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        descent.step()
        descent.zero_grad()
        recent.append((float(parts.answers.detach()), float(parts.key.detach()), float(parts.back.detach())))
        if step % recipe.checkpoint_every == 0 or step == recipe.steps:
            answers_loss, key_loss, back_loss = np.mean(recent, axis=0).tolist()
            line = {"step": step, "loss": answers_loss, "key": key_loss, "back": back_loss, "gradient": float(norm)}
            line["accuracy"] = quick_accuracy(model)
            lines.append(line)
            recent.clear()
            _keep(folder / CHECKPOINT, model, descent, recipe, lines)
            on_log(line)
    _save(model, folder, recipe, lines)
    return model


@torch.inference_mode()
def answers(model: PreTrainedModel, sample: Retrieval) -> np.ndarray:
    """Most probable next token after each prompt, int64 [B]."""
    logits_BNV = model(torch.from_numpy(sample.prompts()), use_cache=False, logits_to_keep=1).logits
    return logits_BNV[:, -1].argmax(dim=-1).numpy()


def quick_accuracy(model: PreTrainedModel) -> dict[str, float]:
    """Share of exact answers on 100 prompts each of a few numbers of facts: for the log."""
    found = {}
    for facts in (4, 16, MOST_FACTS):
        sample = draw(np.random.default_rng((1, facts)), 100, facts)
        found[str(facts)] = float((answers(model, sample) == sample.answers_BQ[:, 0]).mean())
    return found


def _keep(path: Path, model: PreTrainedModel, descent: torch.optim.Optimizer, recipe: Recipe, lines: list[dict]) -> None:
    """Write the checkpoint beside its place, then put it there."""
    beside = path.with_suffix(".new")
    state = {"model": model.state_dict(), "descent": descent.state_dict(), "recipe": asdict(recipe), "lines": lines}
    torch.save(state, beside)
    beside.replace(path)


def _resume(path: Path, model: PreTrainedModel, descent: torch.optim.Optimizer, recipe: Recipe) -> list[dict]:
    """Log lines up to the checkpoint, whose state model and optimiser take; empty where none of this recipe is there."""
    if not path.is_file():
        return []
    state = torch.load(path, weights_only=True)
    if state["recipe"] != asdict(recipe):
        return []
    model.load_state_dict(state["model"])
    descent.load_state_dict(state["descent"])
    return list(state["lines"])


def _save(model: PreTrainedModel, folder: Path, recipe: Recipe, lines: list[dict]) -> None:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(str(folder))
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")
