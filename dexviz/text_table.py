"""Measurements as lines of text: one number a line, base | variant | change, intervals in brackets."""

from __future__ import annotations

from dexviz.bootstrap import Comparison, Interval

_LABEL, _CELL = 26, 26
ABSENT = "—"


def row(label: str, *cells: str, width: int = _CELL) -> str:
    """A label and its cells in columns."""
    return f"{label:<{_LABEL}}" + "".join(f"{cell:<{width}}" for cell in cells)


def interval(value: Interval | None, digits: int, *, signed: bool = False, scale: float = 1.0, unit: str = "") -> str:
    """A mean with its interval in brackets, where there is one."""
    if value is None:
        return ABSENT
    form = f"{'+' if signed else ''}.{digits}f"
    text = f"{scale * value.mean:{form}}{unit}"
    if value.low is not None and value.high is not None:
        text += f" [{scale * value.low:{form}}, {scale * value.high:{form}}]"
    return text


def comparison(label: str, value: Comparison, digits: int, *, scale: float = 1.0, unit: str = "", change: str = "") -> str:
    """Base, variant and change on one line."""
    return row(
        label,
        interval(value.base, digits, scale=scale, unit=unit),
        interval(value.variant, digits, scale=scale, unit=unit),
        interval(value.change, digits, signed=True, scale=scale, unit=change or unit),
    )
