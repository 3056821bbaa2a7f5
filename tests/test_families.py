"""The seam on many families: what it captures is what that family's own eager attention computes.

Every test builds the same weights twice: `stock` runs transformers' eager attention, `seam` runs through dexviz.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dexviz import attention
from dexviz.diff import HALVES, layer_lambda
from dexviz.errors import ModelError
from dexviz.kernels.output import BLOCK_ROWS
from dexviz.selfcheck import check
from tests.families import FAMILIES, NO_MERGE, REFUSED, WINDOW, build, prompt

TOKENS = 3 * WINDOW + 2
"""Longer than any window, and no multiple of one."""
every_family = pytest.mark.parametrize("name", FAMILIES)


@cache
def stock(name: str) -> PreTrainedModel:
    return build(name)


@cache
def seam(name: str) -> PreTrainedModel:
    model = build(name)
    attention.adopt(model)
    return model


@torch.no_grad()
def recorded(run: Callable[[], Any]) -> tuple[Any, list[tuple[int, Tensor]]]:
    """What `run` returns, and (layer, map) of each layer and forward pass (DIFF calls twice with the same map).

    Maps are taken inside the call: later steps overwrite the keys of a static cache.
    """
    maps: list[tuple[int, Tensor]] = []
    with attention.active(None, lambda call: maps.append((call.layer, call.probabilities()))):
        result = run()
    doubled = len(maps) > 1 and maps[0][0] == maps[1][0]
    return result, maps[::2] if doubled else maps


@torch.no_grad()
def eager_maps(name: str, ids: Tensor, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    result = stock(name)(ids, output_attentions=True, use_cache=False, **kwargs)
    return result.logits, result.attentions


def assert_maps(mine: Tensor, eager: Tensor) -> None:
    """Equal to 1e-5; keys that one of them leaves out (the unused end of a static cache) have no weight in the other."""
    keys = min(mine.shape[-1], eager.shape[-1])
    torch.testing.assert_close(mine[..., :keys], eager[..., :keys], atol=1e-5, rtol=0)
    assert not mine[..., keys:].any()
    assert not eager[..., keys:].any()


@every_family
def test_maps_equal_eager_attentions(name):
    ids = prompt(TOKENS, batch=2)
    logits, maps = eager_maps(name, ids)
    result, mine = recorded(lambda: seam(name)(ids, use_cache=False))
    assert [layer for layer, _ in mine] == list(range(FAMILIES[name].layers))
    for (_, a_BHNN), eager in zip(mine, maps, strict=True):
        torch.testing.assert_close(a_BHNN, eager, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.logits, logits, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.sdpa])
def test_logits_equal_stock_sdpa(name):
    ids = prompt(TOKENS, batch=2)
    with torch.no_grad():
        expected = build(name, attn="sdpa")(ids).logits
    torch.testing.assert_close(recorded(lambda: seam(name)(ids))[0].logits, expected, atol=3e-5, rtol=1e-4)


@every_family
def test_head_counts_and_widths(name):
    family, layout = FAMILIES[name], check(build(name))
    assert (layout.layers, layout.heads, layout.kv_heads) == (family.layers, family.heads, family.kv_heads)
    assert layout.key_width == family.width
    assert layout.value_width == family.value_width
    assert (layout.differential == HALVES) == ("diff" in family.traits)
    assert set(layout.projections) == (set() if name in NO_MERGE or layout.differential else set(layout.modules))
    assert layout.checks["logits"] < 1e-4
    assert layout.checks["row_sum"] < 1e-5
    assert layout.checks["above_diagonal"] == 0


@every_family
def test_facts_about_windows_and_sinks(name):
    family = FAMILIES[name]
    for layer, eager in enumerate(eager_maps(name, prompt(TOKENS))[1]):
        far = eager[0, :, -1, : TOKENS - WINDOW]
        assert bool((far == 0).all()) == (layer in family.windowed)
        assert bool((eager[0].sum(dim=-1) < 1 - 1e-4).any()) == family.sinks


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_hidden_as_in_eager(name, side):
    ids, mask = prompt(TOKENS, batch=3), torch.ones(3, TOKENS, dtype=torch.long)
    for row, padding in enumerate((0, 4, 9)):
        mask[row, slice(0, padding) if side == "left" else slice(TOKENS - padding, TOKENS)] = 0
    logits, maps = eager_maps(name, ids, attention_mask=mask)
    result, mine = recorded(lambda: seam(name)(ids, attention_mask=mask, use_cache=False))
    real = mask.bool()
    for (_, a_BHNN), eager in zip(mine, maps, strict=True):
        torch.testing.assert_close(a_BHNN.transpose(1, 2)[real], eager.transpose(1, 2)[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(result.logits[real], logits[real], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_prompts_of_several_row_blocks(name):
    """Longer than one block of query rows, the second prompt with left padding."""
    ids, mask = prompt(BLOCK_ROWS + 18, batch=2), torch.ones(2, BLOCK_ROWS + 18, dtype=torch.long)
    mask[1, :40] = 0
    logits, maps = eager_maps(name, ids, attention_mask=mask)
    result, mine = recorded(lambda: seam(name)(ids, attention_mask=mask, use_cache=False))
    real = mask.bool()
    for (_, a_BHNN), eager in zip(mine, maps, strict=True):
        torch.testing.assert_close(a_BHNN.transpose(1, 2)[real], eager.transpose(1, 2)[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(result.logits[real], logits[real], atol=3e-5, rtol=1e-4)


@every_family
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generation_is_recorded_call_by_call(name, kind):
    ids, new = prompt(TOKENS), 5
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "cache_implementation": kind}
    stocks = stock(name).generate(ids, **settings, output_attentions=True, return_dict_in_generate=True)
    tokens, mine = recorded(lambda: seam(name).generate(ids, **settings))
    assert tokens.tolist() == stocks.sequences.tolist()
    expected = [(layer, eager) for step in stocks.attentions for layer, eager in enumerate(step)]
    assert [layer for layer, _ in mine] == [layer for layer, _ in expected]
    for (_, a_BHRM), (_, eager) in zip(mine, expected, strict=True):
        assert_maps(a_BHRM, eager)


@every_family
def test_chunked_prefill_continues_where_the_cache_ends(name):
    ids, cut = prompt(TOKENS), WINDOW + 3

    def in_chunks(model: PreTrainedModel, **kwargs: Any) -> list[Any]:
        past = DynamicCache(config=model.config)
        return [model(part, cache=past, **kwargs) for part in (ids[:, :cut], ids[:, cut:])]

    with torch.no_grad():
        chunks = in_chunks(stock(name), output_attentions=True)
    for (_, a_BHRM), eager in zip(
        recorded(lambda: in_chunks(seam(name)))[1], [a for chunk in chunks for a in chunk.attentions], strict=True
    ):
        assert_maps(a_BHRM, eager)


@every_family
def test_a_worker_thread_sees_the_context_it_is_given(name):
    ids, seen = prompt(5), []
    with attention.active(None, seen.append):
        context = copy_context()
        for run in (seam(name), lambda ids: context.run(seam(name), ids)):
            before = len(seen)
            worker = threading.Thread(target=run, args=(ids,))
            worker.start()
            worker.join()
            assert (len(seen) > before) == (run is not seam(name))


@every_family
def test_gradients_under_checkpointing_equal_the_stock_gradients(name):
    """On a batch with left padding, whose rows see nothing: their undefined softmax must not leak into any gradient."""
    ids, mask, seen = prompt(TOKENS, batch=2), torch.ones(2, TOKENS, dtype=torch.long), []
    mask[1, :9] = 0
    labels = ids.masked_fill(mask.cumsum(dim=1) < 2, -100)
    plain, checkpointed = (without_dropout(build(name)).train() for _ in range(2))
    attention.adopt(checkpointed)
    checkpointed.activation_checkpointing_enable()
    with attention.active(None, seen.append):
        checkpointed(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    assert {call.layer for call in seen} == set(range(FAMILIES[name].layers))
    plain(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    gradients = {key: p.grad for key, p in checkpointed.named_parameters()}
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, atol=2e-6, rtol=1e-3, msg=lambda m, key=key: f"{key}: {m}")


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Training mode draws no random numbers any more."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(module, torch.nn.Dropout))):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_families_outside_the_interface_are_refused(name):
    with pytest.raises(ModelError, match=rf"{name}.*Choose a family") as error:
        check(build(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_layers_without_softmax_attention_have_no_maps(name):
    kinds = ["linear_attention", "full_attention"]
    model, ids = build(name, layer_types=kinds), prompt(TOKENS)
    attention.adopt(model)
    ((layer, a_BHNN),) = recorded(lambda: model(ids, use_cache=False))[1]
    assert layer == 1
    with torch.no_grad():
        eager = [a for a in build(name, layer_types=kinds)(ids, output_attentions=True).attentions if a is not None]
    torch.testing.assert_close(a_BHNN, eager[-1], atol=1e-5, rtol=0)
    assert check(model).modules.keys() == {1}


def test_a_layer_that_never_calls_the_interface_is_noticed():
    model = build("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(
        ModelError, match=r"Expected an attention call in every layer that has attention, got none in layers \[1\]"
    ):
        check(model)


def test_numbers_that_are_no_numbers_fail_the_check():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="sum to 1, got a deviation of nan"):
        check(model)


def test_the_probe_fits_into_a_short_context():
    layout = check(build("gpt2", n_positions=8))
    assert layout.modules.keys() == {0, 1}


def test_a_model_that_cannot_run_is_refused_in_one_line():
    model = build("gpt2", n_positions=8)
    model.config.n_positions = 512
    with pytest.raises(ModelError, match="Expected gpt2 to run on 13 tokens, got IndexError: ") as error:
        check(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lambda_of_diff_is_the_models_own(dtype):
    """What the norm after A₁ − λ A₂ is fed with, bit for bit."""
    model, fed, outputs = build("diffllama").to(dtype), [], []
    attention.adopt(model)
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.groupnorm.register_forward_pre_hook(lambda _, args: fed.append(args[0]))
    with torch.no_grad(), attention.active(None, lambda call: outputs.append(call.o_BHNE.transpose(1, 2))):
        model(prompt(TOKENS), use_cache=False)
    for module, combined, first, second in zip(modules, fed, outputs[::2], outputs[1::2], strict=True):
        plus, minus = torch.cat([first, second], dim=-1).chunk(2, dim=2)
        lam = torch.tensor(layer_lambda(module))
        assert lam == lam.to(dtype)
        assert torch.equal(combined, plus - lam.to(dtype) * minus)
