"""A capture's numbers of one layer from its dense attention maps, in plain numpy: the yardstick of `dexviz bench`.

This is what one writes after `output_attentions=True`, or after a tool that caches attention patterns: vectorised, float32, one
head at a time where that saves temporaries. Formulas: README, "What is computed". It needs numpy alone, so that it runs in the
environment of another tool, too. Axes: H heads, N tokens, P tiles a side, E width of a head's output.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
_TINY = np.finfo(np.float32).tiny


def layer_numbers(
    a_HNN: Array, o_HNE: Array, *, pool: int, sink: int = 1, local: int = 8, threshold: float = 1e-3
) -> dict[str, Array]:
    """Statistics [H, N], "pooled" and "extreme" [H, P, P], "cosine" and "cka" [H, H], all float32, of causal attention maps.

    Args:
        a_HNN: float32, rows are queries, zero above the diagonal, nowhere negative.
        o_HNE: float32, the heads' outputs.
        pool: P, tiles a side, at most N.
        sink, local, threshold: as in `CaptureRequest`.
    """
    edges = np.arange(pool + 1) * a_HNN.shape[1] // pool
    heads = [_head(a_NN, edges, sink, local, threshold) for a_NN in a_HNN]
    numbers = {name: np.stack([head[name] for head in heads]) for name in heads[0]}
    return {**numbers, "cosine": _cosine(a_HNN), "cka": _cka(o_HNE)}


def _head(a_NN: Array, edges: Array, sink: int, local: int, threshold: float) -> dict[str, Array]:
    n = len(a_NN)
    causal_N = np.arange(1, n + 1)
    total_N = a_NN.sum(axis=1)
    work_NN = np.maximum(a_NN, _TINY)
    np.log(work_NN, out=work_NN)
    plogp_N = np.einsum("ij,ij->i", a_NN, work_NN)
    near_N = np.zeros(n, np.float32)
    for distance in range(min(local, n)):
        near_N[distance:] += np.diagonal(a_NN, -distance)
    below_N = np.count_nonzero(a_NN < threshold, axis=1) - (n - causal_N)
    pooled, extreme = _tiles(a_NN, edges)
    return {
        "entropy": np.maximum(np.log(total_N) - plogp_N / total_N, 0),
        "sink": a_NN[:, :sink].sum(axis=1) / total_N,
        "local": near_N / total_N,
        "sparsity": (below_N / causal_N).astype(np.float32),
        "negative": np.zeros(n, np.float32),
        "net": total_N,
        "max": a_NN.max(axis=1),
        "argmax": a_NN.argmax(axis=1).astype(np.float32),
        "pooled": pooled,
        "extreme": extreme,
    }


def _tiles(a_NN: Array, edges: Array) -> tuple[Array, Array]:
    """Mean and largest of each tile's causal entries, [P, P]; NaN where a tile has none. Rows first, which numpy vectorises."""
    starts = edges[:-1]
    sums = np.add.reduceat(np.add.reduceat(a_NN, starts, axis=0), starts, axis=1)
    high = np.maximum.reduceat(np.maximum.reduceat(a_NN, starts, axis=0), starts, axis=1)
    rows = np.arange(len(a_NN))
    seen = np.clip(rows[:, None] + 1 - starts[None, :], 0, np.diff(edges)[None, :])
    count = np.add.reduceat(seen, starts, axis=0).astype(np.float32)
    empty = count == 0
    return np.where(empty, np.nan, sums / np.maximum(count, 1)), np.where(empty, np.nan, high)


def _cosine(a_HNN: Array) -> Array:
    flat = a_HNN.reshape(len(a_HNN), -1)
    gram = flat @ flat.T
    norm = np.sqrt(gram.diagonal())
    return gram / (norm[:, None] * norm[None, :])


def _cka(o_HNE: Array) -> Array:
    """Linear CKA of the heads' outputs, centred over tokens."""
    heads, n, width = o_HNE.shape
    x = (o_HNE - o_HNE.mean(axis=1, keepdims=True)).transpose(1, 0, 2).reshape(n, heads * width)
    cross = (x.T @ x).reshape(heads, width, heads, width)
    hsic = np.square(cross).sum(axis=(1, 3))
    norm = np.sqrt(hsic.diagonal())
    return hsic / (norm[:, None] * norm[None, :])
