"""Noise terms of chosen heads from one pass: what they subtract from their attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

from dexviz.models import View
from dexviz.noise_records import NoiseTerm
from dexviz.probes.noise_terms import check_length, noise_term
from dexviz.recorder import capture
from dexviz.records import CaptureRequest, Space, Tokens


def noise_terms(
    view: View,
    tokens: Tokens,
    heads: Sequence[tuple[int, int]],
    *,
    space: Space = "value",
    cancel: Event | None = None,
) -> tuple[NoiseTerm, ...]:
    """Effective rank, size and correlation of A₁ and A₂ of N = A − S, head by head (see `dexviz.probes.noise_terms`).

    Args:
        heads: (layer, head); logical heads of a DIFF Transformer.
        space: where DEX gains are measured.

    Raises:
        CaptureError: a head that the view does not have, or more than 2,048 tokens.
        Cancelled: `cancel` was set.
    """
    check_length(len(tokens))
    maps = capture(view, tokens, CaptureRequest(maps=tuple(heads), space=space), cancel=cancel).maps
    return tuple(noise_term(maps[place]) for place in heads)
