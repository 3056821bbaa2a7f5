"""The fused DEX kernel against its twin and the reference, forward and backward."""

from __future__ import annotations

import pytest
import torch

from dexviz.kernels import dex as eager_dex
from dexviz.kernels.triton import dex
from tests import reference as ref
from tests.triton_cases import DEVICE, close, poison

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


def operands(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, tokens, width), (width, width), ())
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 5), (2, 16), (63, 64), (100, 70)])
def test_output_equals_dense_reference(tokens, width, dtype):
    o, w, lam = operands(tokens, width, dtype)
    mine = dex.dex_output(o, w, lam, torch.tensor([0, 2], device=DEVICE))
    for one, given in zip(mine, o, strict=True):
        expected = ref.dex_outputs(given.double().cpu().numpy(), w.double().cpu().numpy(), float(lam), [True, False, True])
        close(one, expected, TOLERANCES[dtype])


@pytest.mark.parametrize(("tokens", "width"), [(1, 5), (2, 16), (100, 70)])
def test_gradients_equal_those_of_its_twin(tokens, width):
    given = [x.requires_grad_() for x in operands(tokens, width)]
    heads = torch.tensor([0, 2], device=DEVICE)
    mine = dex.dex_output(*given, heads)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = eager_dex._eager(*exact, heads)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours = torch.autograd.grad(mine, given, direction)
    theirs = torch.autograd.grad(expected, exact, direction.double())
    for name, one, other in zip(["o", "w", "λ"], ours, theirs, strict=True):
        close(one, other.cpu(), 1e-4, name)


def test_gradients_of_gradients_exist():
    given = [x.requires_grad_() for x in operands(3, 4)]
    heads = torch.tensor([1], device=DEVICE)
    (first,) = torch.autograd.grad(dex.dex_output(*given, heads).square().sum(), given[1], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given[1])
    exact = [x.detach().requires_grad_() for x in given]
    (first,) = torch.autograd.grad(eager_dex._eager(*exact, heads).square().sum(), exact[1], create_graph=True)
    close(second, torch.autograd.grad(first.square().sum(), exact[1])[0].cpu(), 1e-4)


def test_strength_zero_is_the_identity_bit_for_bit():
    o = torch.randn(1, 2, 7, 5, device=DEVICE).bfloat16()
    heads = torch.tensor([1], device=DEVICE)
    assert torch.equal(dex.dex_output(o, torch.randn(5, 5, device=DEVICE), torch.zeros((), device=DEVICE), heads), o)
