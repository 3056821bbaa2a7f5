"""Attention heads of a language model and of its differential (DEX) variant, side by side.

Public names are resolved when first used, so that `import dexviz` needs neither torch nor triton nor streamlit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dexviz.battery import noise_battery as noise_battery
    from dexviz.budget import Estimate as Estimate
    from dexviz.claims import noise_claims as noise_claims
    from dexviz.claims_records import ClaimsReport as ClaimsReport, ClaimsRequest as ClaimsRequest
    from dexviz.errors import (
        AdapterError as AdapterError,
        BudgetError as BudgetError,
        Cancelled as Cancelled,
        CaptureError as CaptureError,
        DexvizError as DexvizError,
        EvaluationError as EvaluationError,
        ModelError as ModelError,
        PromptError as PromptError,
        SnapshotError as SnapshotError,
        TrainingError as TrainingError,
    )
    from dexviz.evaluation import EvalConfig as EvalConfig, Evaluation as Evaluation, evaluate as evaluate
    from dexviz.fetching import fetch as fetch
    from dexviz.head_terms import noise_terms as noise_terms
    from dexviz.merging import merge as merge
    from dexviz.models import ModelPair as ModelPair, View as View, load_pair as load_pair
    from dexviz.needle_noise import noise as noise
    from dexviz.noise_records import (
        BatteryReport as BatteryReport,
        BatteryRequest as BatteryRequest,
        Marks as Marks,
        NoiseOnPrompt as NoiseOnPrompt,
    )
    from dexviz.recorder import capture as capture
    from dexviz.records import (
        Capture as Capture,
        CaptureRequest as CaptureRequest,
        HeadMap as HeadMap,
        ProbeResult as ProbeResult,
        Tokens as Tokens,
        TopTokens as TopTokens,
    )
    from dexviz.room import estimate as estimate
    from dexviz.snapshot import load_snapshot as load_snapshot, save_snapshot as save_snapshot

__version__ = "0.1.0"

_HOME = {
    "battery": ("noise_battery",),
    "budget": ("Estimate",),
    "claims": ("noise_claims",),
    "claims_records": ("ClaimsReport", "ClaimsRequest"),
    "errors": (
        "AdapterError",
        "BudgetError",
        "Cancelled",
        "CaptureError",
        "DexvizError",
        "EvaluationError",
        "ModelError",
        "PromptError",
        "SnapshotError",
        "TrainingError",
    ),
    "evaluation": ("EvalConfig", "Evaluation", "evaluate"),
    "fetching": ("fetch",),
    "head_terms": ("noise_terms",),
    "merging": ("merge",),
    "models": ("ModelPair", "View", "load_pair"),
    "needle_noise": ("noise",),
    "noise_records": ("BatteryReport", "BatteryRequest", "Marks", "NoiseOnPrompt"),
    "recorder": ("capture",),
    "records": ("Capture", "CaptureRequest", "HeadMap", "ProbeResult", "Tokens", "TopTokens"),
    "room": ("estimate",),
    "snapshot": ("load_snapshot", "save_snapshot"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dexviz' has no attribute {name!r}")
    value = getattr(import_module(f"dexviz.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
