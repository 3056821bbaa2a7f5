"""Numbers as the product writes them: three significant digits, a true minus, a dash for blanks."""

from __future__ import annotations

import math

BLANK = "–"


def three(value: float, signed: bool = False) -> str:
    """Three significant digits: 0.123, 12.3, 1.23e-05; a dash where there is no value; with `signed` always a sign."""
    if not math.isfinite(value):
        return BLANK
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    text = f"{value:.2e}" if exponent < -4 or exponent > 5 else f"{value:.{max(0, 2 - exponent)}f}"
    return f"+{text}" if signed and value > 0 else text.replace("-", "−")
