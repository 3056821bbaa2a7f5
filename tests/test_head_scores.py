"""Entropy and gradient importance of heads against stock eager models in float64, and that measuring changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from dexviz import head_scores
from dexviz.dex import DexAdapter, DexConfig
from dexviz.errors import AdapterError, TrainingError
from dexviz.head_scores import gradient_importance, mean_entropy
from dexviz.models import View, make_pair, wrap_model
from tests import families

BLOCKS = families.prompt(20, batch=3).numpy()
"""Longer than the windows of the families that have one."""
FED_WITH_O = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "gpt_neox": "gpt_neox.layers.{}.attention.dense",
    "opt": "model.decoder.layers.{}.self_attn.out_proj",
    "bitnet": "model.layers.{}.self_attn.attn_sub_norm",
}
"""The stock module whose input is O, or O times a gate; elsewhere the output projection of a Llama."""
GATED = ("llama", "gpt2", "gpt_neox", "opt", "starcoder2", "gemma2", "gpt_oss", "deepseek_v3", "bitnet", "qwen3_next")
DENSE = {"deepseek_v3": {"first_k_dense_replace": 2}, "qwen3_next": {"mlp_only_layers": [0, 1]}}
ACCURACY = {"gpt2": (0.02, 1e-5), "opt": (1e-4, 3e-3), "gpt_oss": (1e-3, 1e-2)}
"""Step of the gate and relative tolerance. Stock models other than GPT-2 have norms or softmax in float32 in any case: wide
steps. ReLU (OPT) and routers (gpt-oss) have kinks: narrow ones."""
USUAL = (0.02, 3e-3)
MEASURES = {"entropy": mean_entropy, "importance": gradient_importance}


def base(model: PreTrainedModel) -> View:
    return View("base", wrap_model(model))


def precise(name: str) -> PreTrainedModel:
    """The family's model in float64, without the experts that know no such type; gpt-oss cannot be had without."""
    model = families.build(name, **DENSE.get(name, {}))
    return model if name == "gpt_oss" else model.double()


def consumer(stock: PreTrainedModel, name: str, layer: int) -> nn.Module:
    return stock.get_submodule(FED_WITH_O.get(name, "model.layers.{}.self_attn.o_proj").format(layer))


@contextmanager
def changed_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def gate(stock: PreTrainedModel, name: str, layer: int, head: int, value: float) -> Iterator[None]:
    """The stock model with one head's output multiplied by `value`."""
    family = families.FAMILIES[name]

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.unflatten(-1, (family.heads, -1))[..., head, :] *= value
        return x

    with changed_input(consumer(stock, name, layer), change):
        yield


@torch.no_grad()
def losses(stock: PreTrainedModel, blocks: np.ndarray) -> np.ndarray:
    """Mean next-token loss of each block, float64."""
    ids = torch.from_numpy(blocks)
    logits = stock(ids, use_cache=False).logits[:, :-1].double()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(dim=1).numpy()


def expected_importance(stock: PreTrainedModel, name: str, blocks: np.ndarray, step: float = USUAL[0]) -> np.ndarray:
    """Differences of a gate in the stock model, [L, H]; with four points, whose error is of the order of step⁴."""
    family = families.FAMILIES[name]
    expected = np.zeros((family.layers, family.heads))
    for layer, head in np.ndindex(*expected.shape):
        slope = np.zeros(len(blocks))
        for weight, steps in ((8, 1), (-8, -1), (-1, 2), (1, -2)):
            with gate(stock, name, layer, head, 1 + steps * step):
                slope += weight * losses(stock, blocks) / (12 * step)
        expected[layer, head] = np.abs(slope).mean()
    return expected


@pytest.mark.parametrize("name", GATED)
def test_importance_is_the_derivative_by_a_gate(name: str) -> None:
    measured = gradient_importance(base(precise(name)), BLOCKS)
    step, tolerance = ACCURACY.get(name, USUAL)
    expected = expected_importance(precise(name), name, BLOCKS, step)
    assert measured.dtype == np.float32
    assert expected.min() > 1e-5, "a head without importance tests nothing"
    np.testing.assert_allclose(measured, expected, rtol=tolerance, atol=1e-5)


def test_scaling_the_rows_of_the_output_projection_is_that_gate() -> None:
    stock = families.build("gpt2").double()
    weight, width = stock.transformer.h[1].attn.c_proj.weight.data, 8
    rows = weight[2 * width : 3 * width]
    with gate(stock, "gpt2", 1, 2, 1.5):
        gated = losses(stock, BLOCKS)
    rows *= 1.5
    np.testing.assert_allclose(losses(stock, BLOCKS), gated, rtol=1e-12)


def test_importance_of_a_variant_is_that_of_its_adapted_heads() -> None:
    family = families.FAMILIES["llama"]
    adapter = DexAdapter(DexConfig(heads=((0, 3), (1, 2, 5)), width=family.width, query_heads=family.heads))
    for operator in adapter.operators.values():
        operator.lambda_learn.data.fill_(0.7)
    loaded = wrap_model(families.build("llama").double())
    measured = gradient_importance(make_pair(loaded, adapter=adapter).variant, BLOCKS)
    stock = families.build("llama").double()

    def adapt(layer: int) -> Callable[[Tensor], Tensor]:
        operator = adapter.operators[str(layer)]

        def change(x: Tensor) -> Tensor:
            o = x.unflatten(-1, (family.heads, -1)).clone()
            for head in operator.heads.tolist():
                o[..., head, :] -= 0.7 * o[..., head, :] @ operator.w_d.double()
            return o.flatten(-2)

        return change

    with changed_input(consumer(stock, "llama", 0), adapt(0)), changed_input(consumer(stock, "llama", 1), adapt(1)):
        expected = expected_importance(stock, "llama", BLOCKS)
    np.testing.assert_allclose(measured, expected, rtol=3e-3, atol=1e-5)
    assert np.abs(gradient_importance(make_pair(loaded).base, BLOCKS) - measured).max() > 1e-3
    assert all(p.grad is None for p in adapter.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "bitnet"])
def test_entropy_is_that_of_the_stock_attention_maps(name: str) -> None:
    measured = mean_entropy(base(families.build(name)), BLOCKS)
    with torch.no_grad():
        maps = precise(name)(torch.from_numpy(BLOCKS), output_attentions=True).attentions
    shares = [a.double() / a.double().sum(-1, keepdim=True) for a in maps]
    expected = np.stack([-torch.special.xlogy(a, a).sum(-1).mean(dim=(0, 2)).numpy() for a in shares])
    np.testing.assert_allclose(measured, expected, atol=1e-5)


def test_how_blocks_are_batched_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    view, blocks = base(families.build("gpt2")), families.prompt(20, batch=7).numpy()
    results = []
    for tokens in (1, 40, 10_000):
        monkeypatch.setattr(head_scores, "_BATCH_TOKENS", tokens)
        results.append(gradient_importance(view, blocks))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-4)
    one_by_one = np.mean([gradient_importance(view, blocks[i : i + 1]) for i in range(7)], axis=0)
    np.testing.assert_allclose(results[0], one_by_one, rtol=1e-5)
    alone = np.mean([mean_entropy(view, blocks[i : i + 1]) for i in range(7)], axis=0)
    np.testing.assert_allclose(mean_entropy(view, blocks), alone, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)), 0)
        return result


@pytest.mark.parametrize("measure", MEASURES)
def test_no_whole_map_of_a_layer_is_held(measure: str) -> None:
    n, family = 900, families.FAMILIES["gpt2"]
    view = base(families.build("gpt2", n_positions=1024))
    with Largest() as largest:
        MEASURES[measure](view, families.prompt(n, batch=2).numpy())
    assert 0 < largest.elements < 0.5 * family.heads * n * n


def test_bfloat16_is_close_to_float32() -> None:
    whole = gradient_importance(base(families.build("llama")), BLOCKS)
    half = gradient_importance(base(families.build("llama").bfloat16()), BLOCKS)
    assert half.dtype == np.float32
    assert np.linalg.norm(half - whole) < 0.1 * np.linalg.norm(whole)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_stays_as_it_was(measure: str, fails: bool) -> None:
    model = families.build("llama")
    view = base(model)
    model.train()
    model.model.layers[1].eval()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    state = [facts(model)]
    if fails:

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            MEASURES[measure](view, BLOCKS, stop)
    else:
        MEASURES[measure](view, BLOCKS)
    assert [facts(model)] == state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def facts(model: nn.Module) -> list[object]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    return [hooks, [p.requires_grad for p in model.parameters()]]


def test_dropout_is_off_and_inference_mode_no_hindrance() -> None:
    model = families.build("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    view = base(model)
    expected = gradient_importance(view, BLOCKS)
    model.train()
    with torch.inference_mode():
        measured = gradient_importance(view, BLOCKS)
    np.testing.assert_array_equal(measured, expected)


def test_a_failing_forward_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    view = base(model)
    before = facts(model)
    monkeypatch.setattr(model.lm_head, "forward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradient_importance(view, BLOCKS)
    assert facts(model) == before


def test_other_threads_see_nothing_of_it() -> None:
    model = families.build("llama").requires_grad_(False)
    base(model)
    seen: list[bool] = []

    def run() -> None:
        seen.append(model(torch.from_numpy(BLOCKS)).logits.requires_grad)

    with head_scores._graph_from_embeddings(model):
        thread = Thread(target=run)
        thread.start()
        thread.join()
        run()
    assert seen == [False, True]


def test_layers_without_attention_are_blank() -> None:
    kinds = ["linear_attention", "full_attention"]
    view = base(families.build("qwen3_next", layer_types=kinds))
    for measure in MEASURES.values():
        measured = measure(view, BLOCKS)
        assert np.isnan(measured[0]).all()
        assert np.isfinite(measured[1]).all()


def test_progress_counts_blocks() -> None:
    view, seen = base(families.build("llama")), []
    mean_entropy(view, BLOCKS, lambda done, total: seen.append((done, total)))
    gradient_importance(view, BLOCKS, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3), (3, 3)]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (BLOCKS[:0], "blocks of"),
        (BLOCKS[0], "blocks of"),
        (families.prompt(513).numpy(), "blocks of . to 512 tokens, got shape"),
        (BLOCKS + families.VOCAB, "token ids within 0..127"),
        (BLOCKS - families.VOCAB, "token ids within 0..127"),
    ],
)
def test_blocks_that_cannot_be_read_are_refused(measure: str, blocks: np.ndarray, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        MEASURES[measure](base(families.build("llama")), blocks)


def test_a_gradient_that_is_no_number_is_refused() -> None:
    model = families.build("llama")
    view = base(model)
    model.lm_head.weight.data[:] = float("inf")
    with pytest.raises(TrainingError, match=r"finite gradients of the loss, got NaN or infinity in float32"):
        gradient_importance(view, BLOCKS)


def test_differential_attention_is_refused() -> None:
    with pytest.raises(AdapterError, match="without differential attention"):
        gradient_importance(base(families.build("diffllama")), BLOCKS)
