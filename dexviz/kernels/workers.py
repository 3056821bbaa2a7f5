"""Threads that share the rows of a layer on the CPU, each with torch operators on one core.

A block of rows fits a core's cache, and its operators are too short to be worth waking other cores for each: two threads with
one core each took 65 % of the time of one thread with two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def spread(work: Callable[[int], T], count: int) -> list[T]:
    """[work(0), …, work(count − 1)], side by side; in the calling thread where the count is 1.

    All are waited for, also where one raises; the first error is raised.
    """
    if count == 1:
        return [work(0)]
    futures = [_submitted(lambda index=index: work(index), count) for index in range(count)]  # type: ignore[misc]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def on_one_core(work: Callable[[], T], count: int) -> T:
    """What `work` returns, from one of `count` threads: operators too short to wake other cores for."""
    return work() if count == 1 else _submitted(work, count).result()


def _submitted(work: Callable[[], T], count: int) -> Future[T]:
    mode = torch.is_inference_mode_enabled()

    def job() -> T:
        with torch.inference_mode(mode):
            return work()

    return _pool(count).submit(job)


def _pool(count: int) -> ThreadPoolExecutor:
    with _lock:
        if count not in _pools:
            _pools[count] = _started(count)
        return _pools[count]


def _started(count: int) -> ThreadPoolExecutor:
    """A pool whose threads are all up and run torch on one core.

    `torch.set_num_threads` acts on the calling thread, and on every thread that has not used torch yet: a worker uses it first,
    and the number is set back here.
    """
    cores, together = torch.get_num_threads(), threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        together.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="dexviz-rows", initializer=begin)
    for future in [pool.submit(together.wait) for _ in range(count)]:
        future.result()
    torch.set_num_threads(cores)
    return pool
