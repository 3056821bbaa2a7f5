"""DEX itself: the λ schedule, the operator and its gradients, head selection, and the identities that always hold."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import pytest
import torch

from dexviz import context
from dexviz.dex import DexAdapter, DexConfig, gains, top_heads
from dexviz.errors import AdapterError, CaptureError
from dexviz.kernels.dex import dex_output
from dexviz.models import make_pair, wrap_model
from tests import families, reference

GQA_AND_NOT = ("llama", "gpt2", "gemma2", "gpt_oss")


def adapter_for(name: str, *, steps: int = 10, step: int = 0, learned: float = 0.2, seed: int = 1) -> DexAdapter:
    """A DEX adapter that fits a tiny family, with half of its heads selected."""
    family = families.FAMILIES[name]
    heads = tuple(tuple(range(layer % 2, family.heads, 2)) for layer in range(family.layers))
    torch.manual_seed(seed)
    adapter = DexAdapter(DexConfig(heads=heads, width=family.value_width, query_heads=family.heads, steps=steps))
    for operator in adapter.operators.values():
        operator.lambda_learn.data.fill_(learned)
    adapter.set_step(step)
    return adapter


@pytest.mark.parametrize("learned", [0.0, 0.35])
def test_schedule_is_the_papers(learned: float) -> None:
    adapter = DexAdapter(DexConfig(heads=((0,), (), (1,)), width=4, query_heads=2, steps=7))
    for operator in adapter.operators.values():
        operator.lambda_learn.data.fill_(learned)
    for step in (0, 1, 3, 7, 9):
        adapter.set_step(step)
        expected = [reference.lambda_at(step, 7, layer, learned) if layer != 1 else 0.0 for layer in range(3)]
        np.testing.assert_allclose(adapter.lambdas(), expected, rtol=1e-6)


def test_fixed_lambda_init() -> None:
    adapter = DexAdapter(DexConfig(heads=((0,),), width=4, query_heads=2, lambda_init=0.6, steps=2))
    adapter.set_step(1)
    assert adapter.lambdas() == pytest.approx([0.5 * 0.5 * 0.6])


@pytest.mark.parametrize("shape", [(1, 3, 1, 2), (2, 5, 7, 3), (1, 9, 63, 8)])
def test_operator_equals_the_formula_and_its_gradients(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    o = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(shape[-1], shape[-1], dtype=torch.float64, requires_grad=True)
    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    heads = torch.tensor([0, shape[1] - 1])
    selected = np.isin(np.arange(shape[1]), heads.numpy())
    expected = [reference.dex_outputs(each, w.detach().numpy(), 0.3, selected) for each in o.detach().numpy()]
    np.testing.assert_allclose(dex_output(o, w, lam, heads).detach(), expected, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *args: dex_output(*args, heads), (o, w, lam))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_strength_is_the_input_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    o = torch.randn(2, 6, 33, 8, dtype=dtype)
    assert torch.equal(dex_output(o, torch.randn(8, 8), torch.zeros(()), torch.tensor([1, 4])), o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GQA_AND_NOT)
def test_step_zero_equals_the_base_and_later_steps_do_not(name: str, dtype: torch.dtype) -> None:
    loaded = wrap_model(families.build(name).to(dtype))
    adapter = adapter_for(name)
    pair = make_pair(loaded, adapter=adapter)
    ids = families.prompt(19)
    with torch.no_grad():
        with pair.base.active():
            base = loaded.model(ids).logits
        with pair.variant.active():
            assert torch.equal(loaded.model(ids).logits, base)
        adapter.set_step(4)
        assert not torch.equal(loaded.model(ids).logits, base), "outside a request the variant is on"
        with pair.base.active():
            assert torch.equal(loaded.model(ids).logits, base)


@pytest.mark.parametrize("name", GQA_AND_NOT)
def test_gradients_reach_the_adapter_from_step_one(name: str) -> None:
    loaded = wrap_model(families.build(name))
    loaded.model.requires_grad_(False)
    adapter = adapter_for(name, learned=0.0)
    make_pair(loaded, adapter=adapter)
    norms = {}
    for step in (0, 1):
        adapter.set_step(step)
        adapter.zero_grad()
        loaded.model(families.prompt(11)).logits.logsumexp(-1).sum().backward()
        norms[step] = [float(p.grad.norm()) for p in adapter.parameters()]
    assert max(norms[0]) == 0, "every gradient is zero at t = 0"
    assert min(norms[1]) > 0


def test_adapter_weights_stay_out_of_the_bases_state() -> None:
    loaded = wrap_model(families.build("llama"))
    before = set(loaded.model.state_dict())
    make_pair(loaded, adapter=adapter_for("llama"))
    assert set(loaded.model.state_dict()) == before
    assert not [name for name, _ in loaded.model.named_parameters() if "w_d" in name]


def test_a_cache_belongs_to_one_view() -> None:
    loaded = wrap_model(families.build("llama"))
    pair = make_pair(loaded, adapter=adapter_for("llama", step=10))
    ids = families.prompt(9)
    with torch.no_grad(), pair.base.active():
        cache = loaded.model(ids, use_cache=True).cache
        loaded.model(ids[:, :1], cache=cache)
    with torch.no_grad(), pair.variant.active(), pytest.raises(CaptureError, match="cache that was filled in the same view"):
        loaded.model(ids[:, :1], cache=cache)


def test_checkpointing_outside_the_default_view_is_refused() -> None:
    loaded = wrap_model(families.build("llama"))
    pair = make_pair(loaded, adapter=adapter_for("llama", step=10))
    loaded.model.activation_checkpointing_enable()
    loaded.model.train()
    loaded.model(families.prompt(9)).logits.sum().backward()
    with pair.base.active(), pytest.raises(CaptureError, match="gradient checkpointing"):
        loaded.model(families.prompt(9))


def test_a_thread_starts_in_the_default_view_and_a_copied_context_keeps_the_view() -> None:
    loaded = wrap_model(families.build("llama"))
    pair = make_pair(loaded, adapter=adapter_for("llama", step=10))
    ids, results = families.prompt(9), {}

    def run(name: str) -> None:
        with torch.no_grad():
            results[name] = loaded.model(ids).logits

    with pair.base.active():
        run("base")
        copied = threading.Thread(target=contextvars.copy_context().run, args=(run, "copied"))
        fresh = threading.Thread(target=run, args=("fresh",))
        for thread in (copied, fresh):
            thread.start()
            thread.join()
    run("variant")
    assert torch.equal(results["copied"], results["base"])
    assert torch.equal(results["fresh"], results["variant"])
    assert not torch.equal(results["base"], results["variant"])
    assert context._PASS.get() is None


@pytest.mark.parametrize("lam", [0.0, 0.3, 2.5])
def test_gains_equal_the_reference_in_both_spaces(lam: float) -> None:
    random = np.random.default_rng(0)
    v_GNE, w_EE, w_o_HEM = random.normal(size=(2, 7, 4)), random.normal(size=(4, 4)), random.normal(size=(4, 4, 9))
    v_GNE[1, 3] = 0
    selected = np.ones(4, dtype=bool)
    v = torch.from_numpy(np.repeat(v_GNE, 2, axis=0))
    for space, metric in ((None, None), (w_o_HEM, torch.from_numpy(w_o_HEM @ w_o_HEM.transpose(0, 2, 1)))):
        rho, residue = gains(v, torch.from_numpy(w_EE), lam, metric)
        expected_rho, expected_residue = reference.dex_gains(v_GNE, w_EE, lam, selected, space)
        np.testing.assert_allclose(rho, expected_rho, atol=1e-10)
        np.testing.assert_allclose(residue, expected_residue, atol=1e-6)


def test_top_heads_takes_the_highest_and_breaks_ties_downwards() -> None:
    score = torch.tensor([[0.1, 0.9, 0.9, 0.5], [1.0, 1.0, 1.0, 1.0]])
    assert top_heads(score) == ((1, 2), (0, 1))
    assert top_heads(score, 3) == ((1, 2, 3), (0, 1, 2))
    assert top_heads(torch.rand(2, 1)) == ((0,), (0,))
    with pytest.raises(AdapterError, match="1 to 4 heads"):
        top_heads(score, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": ((0, 4),)}, "heads within 0..3"),
        ({"heads": ((-1,),)}, "heads within 0..3"),
        ({"heads": ((0,),), "width": 0}, "positive width"),
        ({"heads": ((0,),), "steps": -1}, "steps ≥ 0"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        DexConfig(**{"width": 4, "query_heads": 4, **fields})


def test_an_adapter_of_nothing_is_refused() -> None:
    with pytest.raises(AdapterError, match="at least one selected head"):
        DexAdapter(DexConfig(heads=((), ()), width=4, query_heads=4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": [["a"]]}, "head 'a'"),
        ({"heads": [[0.5]]}, "head 0.5"),
        ({"heads": [0]}, "not iterable"),
        ({"heads": None}, "not iterable"),
        ({"width": 8.0}, "width 8.0"),
        ({"width": "x"}, "width 'x'"),
        ({"query_heads": None}, "query_heads None"),
        ({"steps": True}, "steps True"),
        ({"lambda_init": "0.8"}, "lambda_init '0.8'"),
        ({"lambda_init": float("nan")}, "lambda_init nan"),
        ({"lambda_init": 10**400}, "too large"),
        ({"plus": 1}, "plus 1"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=str,
)
def test_damaged_configurations_are_one_clear_error(fields: dict, message: str) -> None:
    whole = DexConfig(heads=((0,),), width=4, query_heads=4, lambda_init=0.8).to_json()
    assert DexConfig.from_json(whole).to_json() == whole
    with pytest.raises(AdapterError, match=message):
        DexConfig.from_json({**whole, **fields})


@pytest.mark.parametrize("data", [{}, [], "x", 5, {"heads": [[0]], "width": 4}], ids=str)
def test_what_is_no_configuration_is_one_clear_error(data: object) -> None:
    with pytest.raises(AdapterError, match="Expected a DEX configuration"):
        DexConfig.from_json(data)


def test_spectra_are_singular_values_by_layer() -> None:
    adapter = DexAdapter(DexConfig(heads=((0, 1), (), (2,)), width=6, query_heads=4))
    with torch.no_grad():
        for operator in adapter.operators.values():
            operator.w_d.copy_(torch.randn(6, 6))
    spectra = adapter.spectra()
    assert [len(values) for values in spectra] == [6, 0, 6]
    for layer in (0, 2):
        gram = adapter.operator(layer).w_d.detach().double().numpy()
        expected = np.sqrt(np.linalg.eigvalsh(gram @ gram.T))[::-1]
        np.testing.assert_allclose(spectra[layer], expected, rtol=1e-5, atol=1e-7)
