"""Masks as ranges of keys: which masks are ranges, what a block of rows sees, and how often a mask is evaluated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dexviz.kernels import softmax
from dexviz.kernels.softmax import MaskSpec
from tests import reference as ref

CPU = torch.device("cpu")


def spec_of(seen: np.ndarray | Tensor) -> MaskSpec:
    mask = torch.as_tensor(seen)
    mask = mask[None, None] if mask.dim() == 2 else mask
    return MaskSpec(*mask.shape[-2:], lambda r0, r1, c0, c1: mask[..., r0:r1, c0:c1])


def padded(tokens: int, padding: int, window: int | None = None) -> np.ndarray:
    seen = ref.causal_mask(tokens, window)
    seen[:, :padding] = False
    return seen


def assert_ranges(spec: MaskSpec, seen_NM: np.ndarray) -> None:
    ranges = spec.ranges(CPU)
    assert ranges is not None
    low_N, high_N = (edge.numpy()[:, None] for edge in ranges)
    assert all(edge.dtype == torch.int32 for edge in ranges)
    keys = np.arange(seen_NM.shape[1])
    np.testing.assert_array_equal((keys >= low_N) & (keys < high_N), seen_NM)


def assert_columns(spec: MaskSpec, seen_NM: np.ndarray, start: int, stop: int) -> None:
    """The keys that any of the rows sees, no more of them, and at least one column."""
    seen = np.flatnonzero(seen_NM[start:stop].any(axis=0))
    mask, c0, c1 = spec.rows(start, stop, CPU)
    shown = (
        np.ones((stop - start, c1 - c0), dtype=bool) if mask is None else np.broadcast_to(mask, (1, 1, stop - start, c1 - c0))
    )
    np.testing.assert_array_equal(shown.reshape(stop - start, -1), seen_NM[start:stop, c0:c1])
    if len(seen):
        assert (c0, c1) == (seen[0], seen[-1] + 1)
    else:
        assert c1 == c0 + 1
    if spec.ranges(CPU) is not None:
        assert spec.columns(start, stop, CPU) == (c0, c1)


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        (MaskSpec(9, 9), ref.causal_mask(9)),
        (MaskSpec(1, 1), ref.causal_mask(1)),
        (MaskSpec(3, 9), ref.causal_mask(9)[6:]),
        (MaskSpec(4, 7, causal=False), np.ones((4, 7), bool)),
    ],
)
def test_plain_masks_need_no_evaluation(spec, seen):
    assert_ranges(spec, seen)
    for start in range(len(seen)):
        for stop in range(start + 1, len(seen) + 1):
            assert_columns(spec, seen, start, stop)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.integers(1, 30),
    window=st.none() | st.integers(1, 32),
    padding=st.integers(0, 30),
    entries=st.integers(1, 200),
    ends=st.tuples(st.integers(0, 29), st.integers(1, 30)),
)
def test_windows_and_padding_are_ranges(tokens, window, padding, entries, ends):
    """However few entries are evaluated at once; rows that see nothing have an empty range."""
    seen = padded(tokens, min(padding, tokens), window)
    spec = spec_of(seen)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(softmax, "_MASK_ENTRIES", entries)
        assert_ranges(spec, seen)
    start = min(ends[0], tokens - 1)
    assert_columns(spec, seen, start, max(start + 1, min(ends[1], tokens)))


def gaps() -> np.ndarray:
    seen = ref.causal_mask(12)
    seen[9, 4] = False
    return seen


@pytest.mark.parametrize(
    "mask",
    [
        torch.from_numpy(gaps())[None, None],
        torch.zeros(1, 1, 12, 12).masked_fill(~torch.from_numpy(ref.causal_mask(12)), -torch.inf),
        torch.from_numpy(np.stack([ref.causal_mask(12), ref.causal_mask(12, 4)]))[None],
        torch.from_numpy(np.stack([ref.causal_mask(12), padded(12, 3)]))[:, None],
    ],
    ids=["gap", "additive", "per head", "per prompt"],
)
def test_what_is_no_range_stays_a_mask(mask):
    spec = spec_of(mask)
    assert spec.ranges(CPU) is None
    assert spec.columns(2, 7, CPU) is None
    shown, c0, c1 = spec.rows(2, 7, CPU)
    assert (c0, c1) == (0, 7)
    assert torch.equal(shown, mask[:, :, 2:7, :7])


def test_a_gap_in_the_last_of_many_blocks_is_noticed(monkeypatch):
    monkeypatch.setattr(softmax, "_MASK_ENTRIES", 12)
    seen = ref.causal_mask(12)
    seen[11, 3] = False
    assert spec_of(seen).ranges(CPU) is None


@pytest.mark.parametrize("ranged", [True, False])
def test_a_mask_is_evaluated_once_however_many_layers_ask(ranged):
    evaluated: list[tuple[int, int]] = []
    seen = torch.from_numpy(ref.causal_mask(20, 5) if ranged else ref.causal_mask(20) & (np.arange(20) != 7))[None, None]

    def block(r0: int, r1: int, c0: int, c1: int) -> Tensor:
        evaluated.append((r0, r1))
        return seen[:, :, r0:r1, c0:c1]

    spec = MaskSpec(20, 20, block)
    for _ in range(30):
        assert (spec.ranges(CPU) is not None) == ranged
        spec.columns(3, 9, CPU)
    assert evaluated == [(0, 20)]
    spec.rows(3, 9, CPU)
    assert evaluated == [(0, 20)] if ranged else [(0, 20), (3, 9)]


def test_rows_that_see_nothing_keep_one_column():
    spec = spec_of(padded(10, 6))
    assert spec.columns(0, 6, CPU) == (0, 1)
    assert spec.columns(4, 8, CPU) == (6, 8)
