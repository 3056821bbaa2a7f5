"""Proof that annotated shapes are executed in tests."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from dexviz.dex import gains
from dexviz.kernels.dex import dex_output


def test_wrong_axes_are_noticed() -> None:
    o, w, lam, heads = torch.randn(1, 3, 5, 4), torch.randn(4, 4), torch.tensor(0.5), torch.tensor([0])
    dex_output(o, w, lam, heads)
    for arguments in ((o[0], w, lam, heads), (o, w[:, :3], lam, heads), (o, w, lam, heads.float())):
        with pytest.raises(TypeCheckError):
            dex_output(*arguments)
    with pytest.raises(TypeCheckError):
        gains(torch.randn(2, 5, 4), torch.randn(5, 5), 0.1)
