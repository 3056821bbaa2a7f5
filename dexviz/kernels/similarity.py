"""Inner products ⟨S_g, S_h⟩ of the score maps of a layer's heads, streamed; cosine similarity follows exactly."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from dexviz.kernels.rows import plogp
from dexviz.kernels.terms import ScoreBlock

_EXACT_PRODUCTS = 1 << 26
"""Products up to which CKA multiplies in float64; above, in float32, summed over parts in float64."""
_PART_ROWS, _PART_HEADS = 4096, 3
"""What is multiplied at once."""


class Gram:
    """Streams row blocks into the Gram matrix of S over all causal entries, accumulated in float64."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.gram_SS = torch.zeros(heads, heads, dtype=torch.float64, device=device)

    def add(self, block: ScoreBlock) -> None:
        """Take in one row block."""
        self.gram_SS += inner_products(block)

    def merge(self, other: Gram) -> None:
        """Take in what another instance has seen of other rows."""
        self.gram_SS += other.gram_SS

    def cosine(self) -> Float[Tensor, "S S"]:
        """⟨S_g, S_h⟩ / (‖S_g‖ ‖S_h‖), float64 [S, S]; NaN for a head whose scores are all zero."""
        norm = self.gram_SS.diagonal().sqrt()
        cosine = self.gram_SS / (norm[:, None] * norm[None, :])
        return _unit_diagonal(cosine, norm > 0)


def inner_products(block: ScoreBlock) -> Float[Tensor, "S S"]:
    """⟨S_g, S_h⟩ over a block's entries, float64: products row by row, which lie in the cache, then their sum."""
    s_RSC = block.s_SRC.transpose(0, 1)
    return torch.bmm(s_RSC, s_RSC.transpose(1, 2)).sum(dim=0, dtype=torch.float64)


def linear_cka(o_SNE: Float[Tensor, "S N E"]) -> Float[Tensor, "S S"]:
    """Linear CKA between head outputs centred over tokens: ‖X_gᵀ X_h‖² / (‖X_gᵀ X_g‖ ‖X_hᵀ X_h‖).

    Source: Kornblith et al. 2019 (arXiv 1905.00414), Eq. 5 with linear kernels.

    Args:
        o_SNE: outputs of S heads over N tokens, width E.

    Returns:
        float64 [S, S]; NaN for a head whose output does not vary over the tokens.
    """
    s, n, e = o_SNE.shape
    centred_SNE = o_SNE - o_SNE.mean(dim=1, keepdim=True, dtype=torch.promote_types(o_SNE.dtype, torch.float32))
    exact = n * (s * e) ** 2 <= _EXACT_PRODUCTS
    x_NX = (centred_SNE.double() if exact else centred_SNE.float()).transpose(0, 1).reshape(n, s * e)
    hsic = x_NX.new_zeros(s, s, dtype=torch.float64)
    for head in range(0, s, _PART_HEADS):
        columns = slice(head * e, (head + _PART_HEADS) * e)
        parts = (part_RX[:, columns].T @ part_RX[:, head * e :] for part_RX in x_NX.split(_PART_ROWS))
        cross = functools.reduce(torch.add, (part.double() for part in parts))
        hsic[head : head + _PART_HEADS, head:] = cross.reshape(-1, e, s - head, e).square().sum(dim=(1, 3))
    hsic = hsic.triu()
    hsic = hsic + hsic.triu(1).T
    norm = hsic.diagonal().sqrt()
    return _unit_diagonal(hsic / (norm[:, None] * norm[None, :]), norm > 0)


class JensenShannon:
    """Streams row blocks into 1 − the mean over rows of the Jensen-Shannon divergence (bits) of |S| rows of two heads.

    A row counts for a pair of heads where both have mass in it.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self.sum_SS = torch.zeros(heads, heads, dtype=torch.float64, device=device)
        self.rows_SS = torch.zeros_like(self.sum_SS)

    def add(self, block: ScoreBlock) -> None:
        """Take in one row block."""
        mass_SRC = block.s_SRC.abs()
        total_SR = mass_SRC.sum(dim=-1)
        alive_SR = total_SR > 0
        p_SRC = mass_SRC / total_SR.where(alive_SR, torch.ones_like(total_SR))[..., None]
        plogp_SR = plogp(p_SRC)
        for head in range(len(p_SRC)):
            middle = plogp((p_SRC + p_SRC[head]) / 2)
            divergence_SR = (plogp_SR + plogp_SR[head]) / 2 - middle
            both_SR = alive_SR & alive_SR[head]
            self.sum_SS[head] += (divergence_SR.clamp(min=0) * both_SR).sum(dim=-1).double()
            self.rows_SS[head] += both_SR.sum(dim=-1)

    def merge(self, other: JensenShannon) -> None:
        """Take in what another instance has seen of other rows."""
        self.sum_SS += other.sum_SS
        self.rows_SS += other.rows_SS

    def similarity(self) -> Float[Tensor, "S S"]:
        """float64 [S, S]; NaN where no row has mass in both heads."""
        bits = self.sum_SS / torch.log(torch.tensor(2.0, dtype=torch.float64))
        return _unit_diagonal(1 - bits / self.rows_SS, self.rows_SS.diagonal() > 0)


def _unit_diagonal(matrix_SS: Tensor, alive_S: Tensor) -> Tensor:
    """A head is the same as itself: exactly 1 on the diagonal, NaN in the rows and columns of dead heads."""
    known = alive_S[:, None] & alive_S[None, :]
    eye = torch.eye(len(alive_S), dtype=torch.bool, device=matrix_SS.device)
    return torch.where(known, matrix_SS.masked_fill(eye, 1.0), torch.nan)
