"""What it takes to repeat a measurement of a pair: the models as they were, and the libraries that ran them."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from dexviz import __version__, fingerprint
from dexviz.models import ModelPair, View


def second_view(pair: ModelPair) -> View | None:
    """The variant; None where it is the base again."""
    same = pair.variant.adapter is None and pair.variant.loaded is pair.base.loaded
    return None if same else pair.variant


def of_pair(pair: ModelPair) -> dict[str, Any]:
    """Names, fingerprints, dtypes, device, versions and date, ready for JSON."""
    variant, adapter = second_view(pair), pair.variant.adapter
    return {
        "base": {"name": pair.base.loaded.name, "fingerprint": pair.base.loaded.fingerprint},
        "variant": None if variant is None else {"name": variant.title, "fingerprint": variant.loaded.fingerprint},
        "adapter": None if adapter is None else {"fingerprint": fingerprint.of_module(adapter)},
        "dtype": str(pair.base.model.dtype).removeprefix("torch."),
        "variant_dtype": None if variant is None else str(variant.model.dtype).removeprefix("torch."),
        "device": str(pair.base.model.device),
        "versions": {
            "dexviz": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
