"""Shapes in annotations are checked while tests run: wrong axes fail where they enter, not three calls later.

Where there is no GPU, Triton kernels run in Triton's interpreter, which must be asked for before anything imports triton.

A browser test that fails is run once more, and the summary says so; no other test gets a second try.

A test in whose course kernels fell back to their eager twins fails, unless it asked for that: a broken kernel gives the right
numbers, slowly, and would go unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import install_import_hook

from tests.fallbacks import check_kernels

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

install_import_hook(["dexviz.kernels", "dexviz.dex"], "beartype.beartype")


@pytest.fixture(autouse=True)
def kernels_that_hold() -> Iterator[None]:
    """Set up before a test's own fixtures and checked after them, when failures that it provoked are put away."""
    yield
    check_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=1))
