"""Shapes in annotations are checked while tests run: wrong axes fail where they enter, not three calls later.

Where there is no GPU, Triton kernels run in Triton's interpreter, which must be asked for before anything imports triton.

A browser test that fails is run once more, and the summary says so; no other test gets a second try.
"""

from __future__ import annotations

import os

import pytest
import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

install_import_hook(["dexviz.kernels", "dexviz.dex"], "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=1))
