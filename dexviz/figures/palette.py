"""Every colour the product uses: two accents and two scales, each with a twin for dark backgrounds.

Scales are lists of hex stops at equal steps. `SEQUENTIAL` runs from zero to the largest value. `DIVERGING` runs from the
most negative (red) through zero to the most positive (blue), so that its positive half is the sequential scale: one value
has one colour whether or not a negative one stands beside it. Both are safe for the common forms of colour blindness.
"""

from __future__ import annotations

from typing import Literal

Theme = Literal["light", "dark"]

BASE = "#0072B2"
"""Accent of the base model."""
VARIANT = "#D55E00"
"""Accent of the variant."""
BASE_DARK = "#4FB3E8"
"""Accent of the base model on a dark background."""
VARIANT_DARK = "#F28E4B"
"""Accent of the variant on a dark background."""

ACCENTS: dict[Theme, dict[str, str]] = {
    "light": {"base": BASE, "variant": VARIANT},
    "dark": {"base": BASE_DARK, "variant": VARIANT_DARK},
}

MARKS = {"needle": "#009E73", "question": "#CC79A7"}
"""What is marked in a prompt, on either background."""

_POSITIVE: dict[Theme, list[str]] = {
    "light": ["#FFFFFF", "#D1E5F0", "#92C5DE", "#4393C3", "#2166AC", "#053061"],
    "dark": ["#12161D", "#0F2C49", "#145385", "#2C82BE", "#6AB6E6", "#C4E7FF"],
}
_NEGATIVE: dict[Theme, list[str]] = {
    "light": ["#67001F", "#B2182B", "#D6604D", "#F4A582", "#FDDBC7"],
    "dark": ["#FFD0C2", "#F58A6C", "#CC4A41", "#862631", "#42151D"],
}

SEQUENTIAL: dict[Theme, list[str]] = _POSITIVE
"""From zero to the largest value."""
DIVERGING: dict[Theme, list[str]] = {theme: _NEGATIVE[theme] + _POSITIVE[theme] for theme in _POSITIVE}
"""From −limit through zero to +limit."""
