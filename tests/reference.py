"""What dexviz computes, once more and independently: dense, float64, plain numpy, written for reading.

Nothing here is imported from dexviz, and torch is not used. Row vectors throughout. Axes:
    H query heads, G key/value heads, N tokens (rows i are queries, columns j keys), D key width, E value width, M hidden size.
Sources: softmax attention; DEX, arXiv 2505.16333, Eq. 3-5; DIFF Transformer, arXiv 2410.05258, Eq. 1-3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Array = np.ndarray


def causal_mask(tokens: int, window: int | None = None) -> Array:
    """bool [N, N], True where query i may see key j: j ≤ i, and i − j < window where there is one."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    return (distance >= 0) & (distance < (window or tokens + 1))


def per_query_head(shared: Array, heads: int) -> Array:
    """[G, …] → [H, …]: head h uses key/value head h // (H / G)."""
    return np.stack([shared[h // (heads // len(shared))] for h in range(heads)])


# ---------------------------------------------------------------- attention


def attention(
    q_HND: Array, k_GND: Array, scale: float, mask_NN: Array, softcap: float | None = None, sinks_H: Array | None = None
) -> Array:
    """A [H, N, N] = softmax(z + mask), z = scale · Q Kᵀ, or c · tanh(z / c) with a soft-cap c.

    A sink adds exp(sink) to each row's denominator: A_ij = exp(z_ij) / (exp(sink) + Σ_k exp(z_ik)).
    """
    heads = len(q_HND)
    k_HND = per_query_head(np.asarray(k_GND, np.float64), heads)
    maps = []
    for h in range(heads):
        z = scale * np.asarray(q_HND[h], np.float64) @ k_HND[h].T
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = np.where(mask_NN, z, -np.inf)
        sink = -np.inf if sinks_H is None else float(sinks_H[h])
        top = np.maximum(z.max(axis=1, keepdims=True), sink)
        e = np.exp(z - top)
        maps.append(e / (e.sum(axis=1, keepdims=True) + np.exp(sink - top)))
    return np.stack(maps)


def outputs(a_HNN: Array, v_GNE: Array) -> Array:
    """O_h = A_h V_h, [H, N, E]."""
    v_HNE = per_query_head(np.asarray(v_GNE, np.float64), len(a_HNN))
    return np.stack([a @ v for a, v in zip(a_HNN, v_HNE, strict=True)])


# ---------------------------------------------------------------- DEX


def lambda_init(layer: int) -> float:
    """λ_init,l = 0.8 − 0.6 · exp(−0.3 · l)."""
    return 0.8 - 0.6 * float(np.exp(-0.3 * layer))


def lambda_at(step: int, total: int, layer: int, learned: float) -> float:
    """λ_l(t) = (1 − α)(t / T) λ_init,l + α λ_learn,l with α = min(1, t / T)."""
    alpha = min(1.0, step / total)
    return (1 - alpha) * (step / total) * lambda_init(layer) + alpha * learned


def adapted(x: Array, w_d_EE: Array, lam: float) -> Array:
    """x (I − λ W_D) for row vectors x."""
    return np.asarray(x, np.float64) @ (np.eye(len(w_d_EE)) - lam * np.asarray(w_d_EE, np.float64))


def dex_outputs(o_HNE: Array, w_d_EE: Array, lam: float, selected: Array) -> Array:
    """O'_h = O_h − λ · 1[h ∈ H_l] · O_h W_D; `selected` is bool [H]."""
    return np.stack([o - lam * o @ w_d_EE if chosen else o for o, chosen in zip(o_HNE, selected, strict=True)])


def dex_values(v_GNE: Array, w_d_EE: Array, lam: float, selected: Array) -> Array:
    """v'_h = v_h (I − λ W_D) on selected heads, v_h elsewhere: [H, N, E]."""
    v_HNE = per_query_head(np.asarray(v_GNE, np.float64), len(selected))
    return np.stack([adapted(v, w_d_EE, lam) if chosen else v for v, chosen in zip(v_HNE, selected, strict=True)])


def gain_and_residue(before_NE: Array, after_NE: Array) -> tuple[Array, Array]:
    """ρ_j = ⟨after_j, before_j⟩ / ‖before_j‖² and ε_j = ‖after_j − ρ_j before_j‖ / ‖after_j‖, both [N].

    With after = v (I − λ W_D) this is ρ_j = 1 − λ ⟨v_j W_D, v_j⟩ / ‖v_j‖². A zero vector is left as it is: ρ = 1, ε = 0.
    """
    rho, epsilon = np.ones(len(before_NE)), np.zeros(len(before_NE))
    for j, (before, after) in enumerate(zip(before_NE, after_NE, strict=True)):
        if before @ before > 0:
            rho[j] = (after @ before) / (before @ before)
        if after @ after > 0:
            epsilon[j] = np.linalg.norm(after - rho[j] * before) / np.linalg.norm(after)
    return rho, epsilon


def dex_gains(v_GNE: Array, w_d_EE: Array, lam: float, selected: Array, w_o_HEM: Array | None = None) -> tuple[Array, Array]:
    """ρ and ε [H, N]; in residual space, with vectors taken through W_O,h, where `w_o_HEM` is given. 1 and 0 elsewhere."""
    v_HNE = per_query_head(np.asarray(v_GNE, np.float64), len(selected))
    rho, epsilon = np.ones(v_HNE.shape[:2]), np.zeros(v_HNE.shape[:2])
    for h in np.flatnonzero(selected):
        through = np.eye(v_HNE.shape[-1]) if w_o_HEM is None else np.asarray(w_o_HEM[h], np.float64)
        rho[h], epsilon[h] = gain_and_residue(v_HNE[h] @ through, adapted(v_HNE[h], w_d_EE, lam) @ through)
    return rho, epsilon


def merged_output_projection(w_o_HEM: Array, w_d_EE: Array, lam: float, selected: Array) -> Array:
    """W_O,h ← (I − λ W_D) W_O,h for each selected head, [H, E, M]."""
    change = np.eye(len(w_d_EE)) - lam * np.asarray(w_d_EE, np.float64)
    return np.stack([change @ w if chosen else np.asarray(w, np.float64) for w, chosen in zip(w_o_HEM, selected, strict=True)])


def projected(o_HNE: Array, w_o_HEM: Array) -> Array:
    """What attention adds to the residual stream: Σ_h O_h W_O,h, [N, M]."""
    return sum(o @ w for o, w in zip(o_HNE, w_o_HEM, strict=True))


def delta_norm(o_HNE: Array, changed_HNE: Array) -> Array:
    """‖O' − O‖ / ‖O‖ per head, Frobenius over tokens, [H]."""
    return np.array([np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(o_HNE, changed_HNE, strict=True)])


def delta_cosine(o_HNE: Array, changed_HNE: Array) -> Array:
    """cos(O, O') = ⟨O, O'⟩ / (‖O‖ ‖O'‖) per head, [H]."""
    return np.array([(a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(o_HNE, changed_HNE, strict=True)])


# ---------------------------------------------------------------- score maps


def signed(a_HNN: Array, rho_HN: Array) -> Array:
    """S_ij = ρ_j A_ij."""
    return np.stack([a * rho[None, :] for a, rho in zip(a_HNN, rho_HN, strict=True)])


def contribution(s_HNN: Array, v_HNE: Array) -> Array:
    """Token j's share of the output along the output: C_ij = s_ij ⟨o_i, v_j⟩ / ‖o_i‖² with o = s V; zeros where o_i = 0.

    `s_HNN` are the weights that make the output: A of base and DEX (with v' as values), A₁ − λ A₂ of DIFF.
    """
    shares = []
    for s, v in zip(s_HNN, v_HNE, strict=True):
        o = s @ v
        squared = (o * o).sum(axis=1, keepdims=True)
        shares.append(np.where(squared > 0, s * (o @ v.T) / np.where(squared > 0, squared, 1.0), 0.0))
    return np.stack(shares)


# ---------------------------------------------------------------- DIFF Transformer


def diff_lambda(q1: Array, k1: Array, q2: Array, k2: Array, init: float) -> float:
    """λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init."""
    return float(np.exp(q1 @ k1) - np.exp(q2 @ k2) + init)


def diff_signed(a_HNN: Array, lam: float) -> Array:
    """DiffLlama: logical head p is S = A_p − λ A_{p + H/2}, [H/2, N, N]."""
    half = len(a_HNN) // 2
    return np.stack([a_HNN[p] - lam * a_HNN[p + half] for p in range(half)])


def diff_values(v_GND: Array, heads: int) -> Array:
    """DiffLlama: logical head p has values [V₁; V₂] of key/value heads p // g and G/2 + p // g: [H/2, N, 2D]."""
    group, half = heads // len(v_GND), len(v_GND) // 2
    return np.stack([np.concatenate([v_GND[p // group], v_GND[half + p // group]], axis=1) for p in range(heads // 2)])


# ---------------------------------------------------------------- statistics of the rows


def _share(part_HN: Array, whole_HN: Array) -> Array:
    """part / whole, NaN where the whole is zero."""
    return np.where(whole_HN > 0, part_HN / np.where(whole_HN > 0, whole_HN, 1.0), np.nan)


def row_statistics(
    s_HNN: Array, sink: int = 1, local: int = 8, threshold: float = 1e-3, spans: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Array]:
    """Name → [H, N] for score maps with one row per token; shares are of |S| / Σ_j |S|.

    entropy −Σ p ln p with p = |S| / Σ|S|; sink Σ_{j < sink} p; local Σ_{i − local < j ≤ i} p; sparsity, the share of
    entries j ≤ i with |S| < threshold; negative Σ_{S < 0} p; net Σ S; max |S| and
    the first key that has it; span:<name> Σ_{start ≤ j < stop} p.
    """
    tokens = s_HNN.shape[1]
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    size = np.abs(s_HNN)
    total = size.sum(axis=2)
    p = _share(size, total[:, :, None])
    stats = {
        "entropy": -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), p).sum(axis=2),
        "sink": _share((size * (j < sink)).sum(axis=2), total),
        "local": _share((size * ((j > i - local) & (j <= i))).sum(axis=2), total),
        "sparsity": ((size < threshold) & (j <= i)).sum(axis=2) / (j <= i).sum(axis=1),
        "negative": _share((size * (s_HNN < 0)).sum(axis=2), total),
        "net": s_HNN.sum(axis=2),
        "max": size.max(axis=2),
        "argmax": np.where(total > 0, size.argmax(axis=2), np.nan),
    }
    for name, (start, stop) in (spans or {}).items():
        stats[f"span:{name}"] = _share(size[:, :, start:stop].sum(axis=2), total)
    return stats


def assert_strongest(found_HN: Array, s_HNN: Array, expected_HN: Array, tolerance: float) -> None:
    """Each row's strongest key has the largest |S| up to the tolerance, or is −1 where the row has no mass."""
    assert np.array_equal(found_HN < 0, np.isnan(expected_HN))
    size, alive = np.abs(s_HNN), found_HN >= 0
    there = np.take_along_axis(size, np.maximum(found_HN, 0)[:, :, None], axis=2)[:, :, 0]
    assert (there[alive] >= size.max(axis=2)[alive] - tolerance).all()


# ---------------------------------------------------------------- tiles


def tile_edges(tokens: int, tiles: int) -> Array:
    """Tile t covers the tokens floor(t · N / P) to floor((t + 1) · N / P): int [P + 1]."""
    return np.array([t * tokens // tiles for t in range(tiles + 1)])


def tiled(s_NN: Array, row_edges: Array, col_edges: Array) -> tuple[Array, Array]:
    """Mean, and entry of largest magnitude, of each tile's causal entries (j ≤ i); NaN where a tile has none."""
    shape = len(row_edges) - 1, len(col_edges) - 1
    mean, extreme = np.full(shape, np.nan), np.full(shape, np.nan)
    for r, c in np.ndindex(shape):
        rows = np.arange(row_edges[r], row_edges[r + 1])
        cols = np.arange(col_edges[c], col_edges[c + 1])
        tile = s_NN[np.ix_(rows, cols)][cols[None, :] <= rows[:, None]]
        if tile.size:
            mean[r, c], extreme[r, c] = tile.mean(), tile[np.abs(tile).argmax()]
    return mean, extreme


# ---------------------------------------------------------------- similarity of heads


def cosine_similarity(s_HNN: Array) -> Array:
    """⟨S_g, S_h⟩ / (‖S_g‖ ‖S_h‖) over all causal entries, [H, H]; NaN where a map is all zero."""
    flat = np.stack([np.tril(s).ravel() for s in s_HNN])
    norm = np.linalg.norm(flat, axis=1)
    return np.where(np.outer(norm, norm) > 0, flat @ flat.T / np.maximum(np.outer(norm, norm), 1e-300), np.nan)


def _divergence_bits(p: Array, q: Array) -> float:
    """Jensen-Shannon divergence in bits: ½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p + q) / 2."""
    m = (p + q) / 2
    return 0.5 * sum(float((x[x > 0] * np.log2(x[x > 0] / m[x > 0])).sum()) for x in (p, q))


def js_similarity(s_HNN: Array) -> Array:
    """1 − mean over rows of the divergence of the rows |S| / Σ|S|, [H, H]; over rows that are not all zero in either head."""
    size = np.abs(s_HNN)
    total = size.sum(axis=2)
    result = np.full((len(size), len(size)), np.nan)
    for g, h in np.ndindex(result.shape):
        rows = np.flatnonzero((total[g] > 0) & (total[h] > 0))
        if len(rows):
            pairs = ((size[g, i] / total[g, i], size[h, i] / total[h, i]) for i in rows)
            result[g, h] = 1 - np.mean([_divergence_bits(p, q) for p, q in pairs])
    return result


def cka(o_HNE: Array) -> Array:
    """Linear CKA ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of head outputs centred over tokens, [H, H]; NaN where one is constant."""
    centred = [o - o.mean(axis=0, keepdims=True) for o in o_HNE]
    result = np.full((len(centred), len(centred)), np.nan)
    for g, h in np.ndindex(result.shape):
        x, y = centred[g], centred[h]
        whole = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
        if whole > 0:
            result[g, h] = np.linalg.norm(x.T @ y) ** 2 / whole
    return result
