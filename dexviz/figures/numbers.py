"""Numbers as the product writes them: three significant digits, a true minus, a dash for blanks."""

from __future__ import annotations

import math

BLANK = "–"


def three(value: float, signed: bool = False) -> str:
    """Three significant digits: 0.123, 12.3, 1.23e−5; a dash where there is no value; with `signed` always a sign."""
    if not math.isfinite(value):
        return BLANK
    if value == 0:
        return "0"
    size = abs(value)
    mantissa, _, power = f"{size:.2e}".partition("e")
    exponent = int(power)
    text = f"{mantissa}e{exponent}" if exponent < -4 or exponent > 5 else f"{size:.{max(0, 2 - exponent)}f}"
    sign = "−" if value < 0 else "+" if signed else ""
    return sign + text.replace("-", "−")
