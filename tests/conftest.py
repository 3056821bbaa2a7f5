"""Shapes in annotations are checked while tests run: wrong axes fail where they enter, not three calls later."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook(["dexviz.kernels", "dexviz.dex"], "beartype.beartype")
