"""A layer's rows over threads: the reference's numbers, the same bits each time, and threads that are left as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch
from torch import Tensor

from dexviz.errors import Cancelled
from dexviz.kernels import operators, workers
from dexviz.kernels.operators import EAGER, Operators
from dexviz.records import CaptureRequest
from dexviz.stream import Streamed, stream
from tests import reference as ref
from tests.compiled_cases import close, edges_of, empty_output, single
from tests.score_cases import Case, layer

CASE = Case(150, kv_heads=1, groups=3, kind="gain", window=70, sinks=True)
WIDE = Case(131, kv_heads=2, groups=2, kind="contribution")
REQUEST = CaptureRequest(pool=7, similarity=("cosine", "js"), spans={"needle": (20, 30)}, threshold=0.01)
SIZES = (11, 30, 5, 1, 22)


@pytest.fixture(autouse=True)
def fresh_pools(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_pools", {})
    yield
    for pool in workers._pools.values():
        pool.shutdown()


def compiled(threads: int, **changes: object) -> Operators:
    return shared(operators._compiled(), threads, **changes)


def shared(ops: Operators, threads: int, **changes: object) -> Operators:
    """Operators that cut the rows into many uneven blocks, for this many threads."""
    return replace(
        ops,
        blocks=lambda score: edges_of(SIZES, score.inputs.mask.queries),
        threads=lambda score, blocks: threads,
        **changes,
    )


def run(ops: Operators, case: Case = CASE, cancel: Event | None = None) -> tuple[Streamed, Tensor]:
    score = single(layer(case).score)
    out_HNE = empty_output(score)
    return stream(score, REQUEST, ops, cancel=cancel, out_HNE=out_HNE), out_HNE


def parts_of(streamed: Streamed, out_HNE: Tensor) -> dict[str, Tensor]:
    tiles = {"pooled": streamed.pooled, "extreme": streamed.extreme, "strongest": streamed.strongest}
    return {**streamed.stats, **streamed.similarity, **tiles, "output": out_HNE}


def assert_reference(streamed: Streamed, out_HNE: Tensor, case: Case = CASE) -> None:
    s_SNN, tolerance = layer(case).s_SNN, 3e-5
    expected = ref.row_statistics(s_SNN, threshold=0.01, spans=REQUEST.spans)
    ref.assert_strongest(streamed.strongest.numpy(), s_SNN, expected.pop("argmax"), tolerance * np.abs(s_SNN).max())
    assert streamed.stats.keys() == expected.keys()
    for name, values in expected.items():
        close(streamed.stats[name], values, tolerance, name)
    edges = ref.tile_edges(case.tokens, 7)
    dense = [ref.tiled(s, edges, edges) for s in s_SNN]
    close(streamed.pooled, np.stack([mean for mean, _ in dense]), tolerance)
    close(streamed.extreme.abs(), np.abs(np.stack([extreme for _, extreme in dense])), tolerance)
    close(streamed.similarity["cosine"], ref.cosine_similarity(s_SNN), tolerance)
    close(streamed.similarity["js"], ref.js_similarity(s_SNN), tolerance)
    close(out_HNE, layer(case).o_HNE, tolerance)


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.numpy().tobytes() == other[name].numpy().tobytes(), name


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("case", [CASE, WIDE], ids=str)
@pytest.mark.parametrize("twins", ["compiled", "eager"])
def test_any_number_of_threads_gives_the_references_numbers_and_the_same_bits_again(threads, case, twins):
    ops = shared(EAGER if twins == "eager" else operators._compiled(), threads)
    first, again = run(ops, case), run(ops, case)
    assert_reference(*first, case)
    assert_same_bits(parts_of(*first), parts_of(*again))


def test_a_cancelled_pass_stops_in_its_workers_and_the_threads_go_on_with_the_next():
    cancel, seen = Event(), []
    whole = operators._compiled().score_rows

    def watched(score, start, stop, *rest):
        seen.append((start, threading.current_thread().name))
        if len(seen) >= 3:
            cancel.set()
        return whole(score, start, stop, *rest)

    with pytest.raises(Cancelled):
        run(compiled(2, score_rows=watched), cancel=cancel)
    assert 3 <= len(seen) <= 4, "each thread stops at its next block"
    assert all(name.startswith("dexviz-rows") for _, name in seen)
    assert_reference(*run(compiled(2)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_error_in_one_thread_is_raised(threads):
    whole = operators._compiled().score_rows

    def broken(score, start, stop, *rest):
        if start == 11:
            raise ArithmeticError("row 11")
        return whole(score, start, stop, *rest)

    with pytest.raises(ArithmeticError, match="row 11"):
        run(compiled(threads, score_rows=broken))
    assert_reference(*run(compiled(threads)))


def test_threads_of_the_caller_and_of_new_threads_stay_as_they_were():
    before = torch.get_num_threads()

    def counted() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    try:
        torch.set_num_threads(3)
        whole, within = operators._compiled().score_rows, set()

        def watched(*args):
            within.add(torch.get_num_threads())
            return whole(*args)

        assert counted() == 3
        assert_reference(*run(compiled(2, score_rows=watched)))
        assert (torch.get_num_threads(), counted(), within) == (3, 3, {1})
    finally:
        torch.set_num_threads(before)


def test_two_passes_at_once_are_as_good_as_one_after_the_other():
    ops, rounds = compiled(2), 6
    alone = {case: parts_of(*run(ops, case)) for case in (CASE, WIDE)}
    together = threading.Barrier(2)

    def again(case: Case) -> list[dict[str, Tensor]]:
        together.wait()
        return [parts_of(*run(ops, case)) for _ in range(rounds)]

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(alone, pool.map(again, alone), strict=True))
    for case, parts in found.items():
        for part in parts:
            assert_same_bits(part, alone[case])


def test_workers_keep_the_callers_inference_mode():
    def modes() -> list[bool]:
        return workers.spread(lambda index: torch.is_inference_mode_enabled(), 2)

    with torch.inference_mode():
        assert modes() == [True, True]
    assert modes() == [False, False]
