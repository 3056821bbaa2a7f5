"""A plan of heads on disk: one JSON file, versioned, written whole or not at all, and not believed before it is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dexviz.errors import AdapterError
from dexviz.files import write_whole
from dexviz.head_plan import AGAIN, FORMAT, PLAIN, VERSION, HeadPlan

MAX_BYTES = 64 << 20


def write_plan(plan: HeadPlan, path: str | os.PathLike[str]) -> Path:
    """Write a plan to a file, whole or not at all; an older plan there is replaced.

    Raises:
        AdapterError: the path is in use by something else, or cannot be written.
    """
    path = Path(path)
    check_plan_target(path)
    text = json.dumps(plan.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        raise AdapterError(f"a place to write the plan {path}", _reason(error), "Choose another --out.") from error
    return path


def check_plan_target(path: str | os.PathLike[str]) -> None:
    """Raise an AdapterError unless `write_plan` may write there: before long work, say."""
    path = Path(path)
    try:
        if not path.name or (os.path.lexists(path) and not _is_plan(path)):
            raise AdapterError("a new file, or a plan to replace", f"{path}, which is neither", "Choose another --out.")
    except (OSError, ValueError) as error:
        raise AdapterError(f"a place to write the plan {path}", _reason(error), "Choose another --out.") from error


def _is_plan(path: Path) -> bool:
    """True for a file that says of itself that it is a plan, of whatever version."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_plan(path: str | os.PathLike[str]) -> HeadPlan:
    """Read a plan.

    Raises:
        AdapterError: no file, not a plan, of another version, damaged, or it names heads that it says do not exist.
    """
    path = Path(path)
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MAX_BYTES):
            raise AdapterError("a plan of heads", f"{path}, which is no such file", "Give the file that select-heads wrote.")
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except AdapterError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"a readable plan of heads in {path}", _reason(error), AGAIN) from error
    return plan_from_json(data, str(path))


def plan_from_json(data: Any, where: str = "the plan") -> HeadPlan:
    """Inverse of `HeadPlan.to_json`.

    Raises:
        AdapterError: a field is missing, of the wrong type, or contradicts another.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise AdapterError(f"a plan of heads in {where}", "other JSON", "Give the file that select-heads wrote.")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise AdapterError(f"a plan of version {VERSION} in {where}", f"version {data.get('version')!r}", AGAIN)
    try:
        fields: dict[str, Any] = {name: _typed(data, name, kind) for name, kind in PLAIN.items()}
        heads = tuple(tuple(_typed({"head": h}, "head", int) for h in layer) for layer in _typed(data, "heads", list))
        fields |= {name: _table(data, name) for name in ("entropy", "importance")}
        versions = {str(k): _typed({k: v}, k, str) for k, v in _typed(data, "versions", dict).items()}
        return HeadPlan(heads=heads, versions=versions, **fields)
    except AdapterError as error:
        raise AdapterError(f"a consistent plan of heads in {where}", error.got, AGAIN) from error
    except KeyError as error:
        raise AdapterError(f"a whole plan of heads in {where}", f"none of its field {error}", AGAIN) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise AdapterError(f"a plan of heads in {where}", _reason(error), AGAIN) from error


def _typed(data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data[name]
    if type(value) is not kind and not (name == "per_layer" and value is None):
        raise TypeError(f"{name} {str(value)[:40]!r}, where {kind.__name__} is due")
    return value


def _table(data: Mapping[str, Any], name: str) -> np.ndarray | None:
    if data[name] is None:
        return None
    rows: Sequence[Sequence[Any]] = _typed(data, name, list)
    wrong = [x for row in rows for x in row if x is not None and type(x) not in (int, float)]
    if wrong or len({len(row) for row in rows}) != 1:
        raise TypeError(f"{name} with {str(wrong[0])[:40]!r} in it" if wrong else f"rows of {name} that differ in length")
    values = np.array([[np.nan if x is None else x for x in row] for row in rows], dtype=np.float64)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name}, which is no number")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
