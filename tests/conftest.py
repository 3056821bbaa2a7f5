"""Shapes in annotations are checked while tests run: wrong axes fail where they enter, not three calls later.

A browser test that fails is run once more, and the summary says so; no other test gets a second try.
"""

from __future__ import annotations

import pytest
from jaxtyping import install_import_hook

install_import_hook(["dexviz.kernels", "dexviz.dex"], "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=1))
