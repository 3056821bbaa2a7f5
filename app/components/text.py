"""Text that came from outside, made safe for Markdown."""

from __future__ import annotations

import re

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_SHORTCODE = re.compile(r":(?=[A-Za-z+_-])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
WORD_JOINER = "\u2060"


def plain(text: str) -> str:
    """`text` as Markdown that shows exactly its characters, on one line.

    Streamlit replaces shortcodes such as `:red[…]` or `:smile:` after Markdown has been parsed; an invisible word joiner
    after the colon prevents it.
    """
    one_line = _CONTROL.sub(" ", text)
    return _PUNCTUATION.sub(r"\\\1", _SHORTCODE.sub(":" + WORD_JOINER, one_line))
