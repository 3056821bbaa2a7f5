"""What a head subtracts from its attention map: N = A − S, its effective rank and size, and how alike A₁ and A₂ are.

Effective rank: exp(−Σ p ln p) of p = σ / Σσ, σ the singular values (Roy and Vetterli, 2007). Cancelling noise means that A₁ and
A₂ agree on keys that do not matter and differ on those that do; so their correlation is given apart for a row's most salient
keys, the top tenth by A₁, and for the rest (README, "What is computed").
"""

from __future__ import annotations

import numpy as np

from dexviz.errors import CaptureError
from dexviz.noise_records import NoiseTerm
from dexviz.records import HeadMap

MOST_TOKENS = 2048
"""Singular values of a larger map take too long."""
SALIENT = 0.1
_LEAST_KEYS = 3
"""Fewer salient keys have no correlation worth the name; so rows of fewer than thirty keys are left out."""
_NOTHING = 1e-12
"""Largest |N| that counts as nothing subtracted."""


def check_length(tokens: int) -> None:
    """Raise a CaptureError for a prompt whose noise term is too large for its singular values."""
    if tokens > MOST_TOKENS:
        raise CaptureError(f"at most {MOST_TOKENS:,} tokens for the rank of a noise term", f"{tokens:,}", "Shorten the prompt.")


def noise_term(head: HeadMap) -> NoiseTerm:
    """The noise term of one head's signed map.

    Args:
        head: an exact map of all tokens, of signed scores.

    Raises:
        CaptureError: another map, or one of more than 2,048 tokens.
    """
    n = len(head.row_edges) - 1
    whole = head.scores.shape == (n, n) and head.row_edges[-1] == n == head.col_edges[-1] and head.extreme is None
    if head.score != "signed" or not whole:
        raise CaptureError(
            "an exact map of signed scores", f"{head.score} scores, {head.scores.shape}", "Ask for the whole map."
        )
    check_length(n)
    a_NN = head.attention.astype(np.float64)
    noise_NN = a_NN - head.scores
    kind = "diff" if head.terms else "dex" if head.gain is not None else "none"
    nothing = kind == "none" or float(np.abs(noise_NN).max()) <= _NOTHING
    salient, rest, rows = _correlations(*head.terms) if head.terms else (None, None, 0)
    return NoiseTerm(
        layer=head.layer,
        head=head.head,
        tokens=n,
        kind=kind,
        rank=None if nothing else effective_rank(noise_NN),
        attention_rank=effective_rank(a_NN),
        energy=0.0 if nothing else float(np.linalg.norm(noise_NN) / np.linalg.norm(a_NN)),
        correlation_salient=salient,
        correlation_rest=rest,
        rows=rows,
    )


def effective_rank(matrix: np.ndarray) -> float:
    """exp of the entropy of the normalised singular values; 0 for a matrix of zeros."""
    sizes = np.linalg.svd(matrix, compute_uv=False)
    if not sizes.sum() > 0:
        return 0.0
    shares = sizes / sizes.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _correlations(first_NN: np.ndarray, second_NN: np.ndarray) -> tuple[float | None, float | None, int]:
    """Of A₁ and A₂ over salient keys and over the rest, means over the rows that have both, and how many these are."""
    found: list[tuple[float, float]] = []
    for row in range(int(_LEAST_KEYS / SALIENT) - 1, len(first_NN)):
        a, b = (part[row, : row + 1].astype(np.float64) for part in (first_NN, second_NN))
        order = np.argsort(-a, kind="stable")
        count = int(SALIENT * (row + 1))
        pair = tuple(_correlation(a[keys], b[keys]) for keys in (order[:count], order[count:]))
        if pair[0] is not None and pair[1] is not None:
            found.append((pair[0], pair[1]))
    if not found:
        return None, None, 0
    salient, rest = np.mean(found, axis=0)
    return float(salient), float(rest), len(found)


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's; None where one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    sizes = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / sizes if sizes > 0 else None
