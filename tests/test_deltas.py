"""Changes of projections: which rows of which modules they are, what they leave alone, and what they refuse."""

from __future__ import annotations

import contextvars
import copy
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dexviz import attention, deltas
from dexviz.deltas import DeltaEntry, Deltas
from dexviz.errors import AdapterError, CaptureError
from dexviz.models import make_pair, wrap_model
from tests import families
from tests.delta_cases import ALL, adapter_for, loaded

SEPARATE = {"self_attn.k_proj": ("k", [(0, 16)]), "self_attn.v_proj": ("v", [(0, 16)]), "self_attn.o_proj": ("o", [(0, 48)])}
MHA = {"self_attn.k_proj": ("k", [(0, 32)]), "self_attn.v_proj": ("v", [(0, 32)]), "self_attn.out_proj": ("o", [(0, 32)])}
INTERLEAVED = [(24 * head + 8, 24 * head + 24) for head in range(4)]
"""GPT-NeoX: [H, 3, D], of which the first D of every head are queries."""
BY_HAND = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma2", "olmo2", "gpt_oss", "starcoder2", "mixtral"), SEPARATE),
    **dict.fromkeys(("bitnet", "qwen3_next", "qwen3_5"), SEPARATE),
    "opt": MHA,
    "gptj": {name.replace("self_attn", "attn"): rows for name, rows in MHA.items()},
    "gpt2": {"attn.c_attn": ("kv", [(32, 96)]), "attn.c_proj": ("o", [(0, 32)])},
    "gpt_neox": {"attention.query_key_value": ("kv", INTERLEAVED), "attention.dense": ("o", [(0, 32)])},
    "phi3": {"self_attn.qkv_proj": ("kv", [(48, 80)]), "self_attn.o_proj": ("o", [(0, 48)])},
    "deepseek_v3": {
        "self_attn.kv_a_proj_with_mqa": ("k", [(12, 16)]),  # after the latent, the rotary part that all heads share
        "self_attn.kv_b_proj": ("kv", [(0, 84)]),
        "self_attn.o_proj": ("o", [(0, 48)]),
    },
}
"""Family → projection of a layer → what it makes up and with which output features."""


@pytest.mark.parametrize("name", BY_HAND)
def test_rows_are_the_ones_known_by_hand(name: str) -> None:
    base = loaded(name)
    found = deltas.find(base.model, base.layout)
    for layer in base.layout.modules:
        own = {
            entry.module.split(f".{layer}.", 1)[1]: ("".join(entry.parts), list(entry.rows))
            for entry in found
            if entry.layer == layer
        }
        assert own == BY_HAND[name]


@pytest.mark.parametrize("name", ALL)
def test_every_family_has_all_parts_and_keeps_its_base(name: str) -> None:
    base = loaded(name)
    state = {key: tensor.clone() for key, tensor in base.model.state_dict().items()}
    ids = families.prompt(19, batch=2)
    with torch.no_grad():
        before = base.model(ids).logits
        pair = make_pair(base, adapter=adapter_for(base, dex=False, parts=("q", "k", "v", "o")))
        with pair.base.active():
            assert torch.equal(base.model(ids).logits, before)
        with pair.variant.active():
            assert not torch.equal(base.model(ids).logits, before)
        attention.attach(base.model, None)
        assert torch.equal(base.model(ids).logits, before)
    assert pair.variant.adapter.trained == ("W_Q", "W_K", "W_V", "W_O")
    after = base.model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt_neox"])
@pytest.mark.parametrize("rank", [None, 3])
def test_no_change_is_the_base_bit_for_bit(name: str, dtype: torch.dtype, rank: int | None) -> None:
    base = loaded(name, dtype)
    ids = families.prompt(19, batch=2)
    adapter = adapter_for(base, dex=False, rank=rank)
    for path, parameter in adapter.deltas.named_parameters():
        if not path.startswith("a."):
            parameter.data.zero_()
    with torch.no_grad():
        before = base.model(ids).logits
        make_pair(base, adapter=adapter)
        assert torch.equal(base.model(ids).logits, before)


def test_a_new_change_is_none() -> None:
    base = loaded()
    ranks = {"model.layers.0.self_attn.k_proj": 4}
    changes = deltas.for_model(base.model, base.layout, ranks=ranks)
    assert all(not changes.change(path).any() for path in changes.entries)
    assert changes.count() == 4 * (48 + 16) + 3 * 16 * 48 + 2 * 48 * 48
    assert [path for path, entry in changes.entries.items() if entry.rank] == list(ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_reach_every_change_and_nothing_else(dtype: torch.dtype, rank: int | None) -> None:
    base = loaded("phi3", dtype)
    base.model.requires_grad_(False)
    adapter = adapter_for(base, rank=rank).requires_grad_(True)
    make_pair(base, adapter=adapter)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        loss = base.model(families.prompt(19)).logits.float().square().mean()
    loss.backward()
    for path, parameter in adapter.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.any(), path
    assert all(parameter.grad is None for parameter in base.model.parameters())


def test_gradients_equal_those_of_the_weight_itself() -> None:
    base = loaded("gpt_neox", torch.float64)
    base.model.requires_grad_(False)
    adapter = adapter_for(base, dex=False).double().requires_grad_(True)
    make_pair(base, adapter=adapter)
    ids = families.prompt(11)
    base.model(ids).logits.square().mean().backward()
    path = "gpt_neox.layers.0.attention.query_key_value"
    changed = {entry: adapter.deltas.weight(base.model.get_submodule(entry)).detach() for entry in adapter.deltas.entries}
    attention.attach(base.model, None)
    for entry, weight in changed.items():
        base.model.get_submodule(entry).weight.data.copy_(weight)
    base.model.get_submodule(path).weight.requires_grad_(True)
    base.model(ids).logits.square().mean().backward()
    rows = torch.cat([torch.arange(*span) for span in INTERLEAVED])
    stock = base.model.get_submodule(path).weight.grad[rows]
    torch.testing.assert_close(adapter.deltas.dense[path.replace(".", "/")].grad, stock, atol=1e-10, rtol=1e-6)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    norms = []
    for checkpointed in (False, True):
        base = loaded("phi3")
        base.model.requires_grad_(False)
        adapter = adapter_for(base).requires_grad_(True)
        make_pair(base, adapter=adapter)
        if checkpointed:
            base.model.train()
            base.model.activation_checkpointing_enable()
        base.model(families.prompt(19), use_cache=False).logits.square().mean().backward()
        norms.append([float(parameter.grad.norm()) for parameter in adapter.parameters()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_views_in_two_threads_do_not_disturb_each_other() -> None:
    base = loaded()
    pair = make_pair(base, adapter=adapter_for(base))
    ids = families.prompt(17)
    views = {"base": pair.base, "variant": pair.variant}

    def logits(view: str) -> torch.Tensor:
        with torch.no_grad(), views[view].active():
            return base.model(ids, use_cache=False).logits

    expected = {view: logits(view) for view in views}
    assert not torch.equal(expected["base"], expected["variant"])
    start, wrong = threading.Barrier(2), []

    def run(view: str) -> None:
        start.wait()
        wrong.extend(view for _ in range(20) if not torch.equal(logits(view), expected[view]))

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, view)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_cache_belongs_to_one_view() -> None:
    base = loaded()
    pair = make_pair(base, adapter=adapter_for(base, dex=False))
    with torch.no_grad(), pair.base.active():
        cache = base.model(families.prompt(9), use_cache=True).past_key_values
    with torch.no_grad(), pair.variant.active(), pytest.raises(CaptureError, match="same view"):
        base.model(families.prompt(1), past_key_values=cache)


def test_adapters_take_turns_and_copies_are_whole() -> None:
    base, ids = loaded(), families.prompt(13)
    first, second = adapter_for(base, strength=0.1), adapter_for(base, strength=0.2, parts=("v",), dex=False)
    with torch.no_grad():
        plain = base.model(ids).logits
        seen = []
        for adapter in (first, second, None, first):
            attention.attach(base.model, adapter)
            seen.append(base.model(ids).logits)
        assert torch.equal(seen[2], plain)
        assert torch.equal(seen[0], seen[3])
        assert not torch.equal(seen[0], seen[1])
        twin = copy.deepcopy(base.model)
        attention.attach(base.model, None)
        for parameter in base.model.parameters():
            parameter.zero_()
        assert torch.equal(twin(ids).logits, seen[0]), "a copy keeps its own weights and adapter"
        with attention.active(None):
            assert torch.equal(twin(ids).logits, plain)


def test_an_adapter_works_without_being_attached() -> None:
    base, other, ids = loaded(), loaded(), families.prompt(13)
    adapter = adapter_for(base)
    attention.attach(other.model, adapter)
    with torch.no_grad(), attention.active(adapter):
        assert torch.equal(base.model(ids).logits, other.model(ids).logits)


def test_low_rank_factors_of_a_fused_projection() -> None:
    base = loaded("phi3")
    changes = deltas.for_model(base.model, base.layout, ("k", "v"))
    path = "model.layers.1.self_attn.qkv_proj"
    a, b = torch.randn(2, 48), torch.randn(80, 2)
    with pytest.raises(AdapterError, match="within its parts k, v"):
        changes.set_low_rank(path, a, b)
    b[:48] = 0
    changes.set_low_rank(path, a, b)
    assert changes.entries[path].rank == 2
    torch.testing.assert_close(changes.change(path), (b @ a)[48:])
    changes.set_dense(path, b @ a)
    assert changes.entries[path].rank is None
    torch.testing.assert_close(changes.change(path), (b @ a)[48:])
    for factors in ((a[:, :3], b), (a, b[:3])):
        with pytest.raises(AdapterError, match="a matrix"):
            changes.set_low_rank(path, *factors)
    with pytest.raises(AdapterError, match="a projection out of"):
        changes.set_low_rank("lm_head", a, b)


def test_layers_that_share_keys_are_changed_once() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    extra = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "intermediate_size": [64] * 4}
    narrow = {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    settings = families._llama_like(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=kinds, **{**extra, **narrow})
    config = AutoConfig.for_model("gemma3n_text", **settings)
    base = wrap_model(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    found = [(entry.layer, "".join(entry.parts)) for entry in deltas.find(base.model, base.layout)]
    assert found == [(0, "k"), (0, "v"), (0, "o"), (1, "k"), (1, "v"), (1, "o"), (2, "o"), (3, "o")]


class _Quantised(torch.nn.Linear):
    pass


def test_what_cannot_be_changed_is_refused() -> None:
    base = loaded()
    layers = base.model.model.layers
    with pytest.raises(AdapterError, match="parts out of"):
        deltas.for_model(base.model, base.layout, ("w",))
    with pytest.raises(AdapterError, match="ranks of projections such as"):
        deltas.for_model(base.model, base.layout, ranks={"lm_head": 2})
    layers[1].self_attn.v_proj.weight = layers[0].self_attn.v_proj.weight
    with pytest.raises(AdapterError, match="a weight of its own in"):
        deltas.for_model(base.model, base.layout)
    layers[1].self_attn.v_proj = layers[0].self_attn.v_proj
    with pytest.raises(AdapterError, match="belong to one layer each"):
        deltas.for_model(base.model, base.layout)
    layers[1].self_attn.v_proj = _Quantised(48, 16, bias=False)
    with pytest.raises(AdapterError, match=r"plain Linear or Conv1D in model\.layers\.1\.self_attn\.v_proj"):
        deltas.for_model(base.model, base.layout)
    layers[1].self_attn.v_proj = layers[1].self_attn.k_proj
    with pytest.raises(AdapterError, match=r"output features for W_V alone, got some in layer 1 that are W_K too"):
        deltas.for_model(base.model, base.layout, ("v",))
    layers[1].self_attn.v_proj = torch.nn.Bilinear(48, 48, 16)
    layers[1].self_attn.v_proj.forward = lambda x: x[..., :16]
    with pytest.raises(AdapterError, match=r"a projection in the attention module of layer 1 that makes up W_V, got none"):
        deltas.for_model(base.model, base.layout)


def test_a_diff_model_is_refused() -> None:
    with pytest.raises(AdapterError, match="DIFF"):
        deltas.for_model(loaded("diffllama").model, loaded("diffllama").layout)


def test_changes_of_another_model_are_refused() -> None:
    base = loaded()
    for entry in (
        DeltaEntry("model.layers.9.self_attn.k_proj", 9, ("k",), ((0, 16),), (16, 48)),
        DeltaEntry("model.layers.0.self_attn.k_proj", 0, ("k",), ((0, 16),), (32, 48)),
        DeltaEntry("model.layers.0.mlp", 0, ("k",), ((0, 16),), (32, 48)),
    ):
        with pytest.raises(AdapterError, match=r"(in|projection) model\.layers"):
            Deltas([entry]).check(base.model)
