"""What a statistic says about the heads of base and variant, side by side.

Both probes put base, variant and change (variant − base) on the axis "side", so that one result feeds every figure.
"""

from __future__ import annotations

import numpy as np

from dexviz.errors import CaptureError
from dexviz.records import STATISTICS, Capture, ProbeResult, Statistic, head_name

SIDES = ("base", "variant", "change")


def statistic(name: str) -> Statistic:
    """Label, unit and definition of a statistic; "span:<name>" is the mass on a named token span.

    Raises:
        CaptureError: there is no such statistic.
    """
    if name.startswith("span:"):
        span = name.removeprefix("span:")
        return Statistic(name, f"Mass on {span}", "share", f"Share of |S| on the tokens of the span {span!r}.")
    if name not in STATISTICS:
        raise CaptureError(f"a statistic out of {', '.join(STATISTICS)}", repr(name), "Choose one of these.")
    return STATISTICS[name]


def head_statistic(base: Capture, variant: Capture, name: str) -> ProbeResult:
    """A statistic of every head, averaged over the query rows: values [3, L, H] on the axes side, layer, head.

    Raises:
        CaptureError: the captures are not of one prompt, or hold no such statistic.
    """
    _check_same_prompt(base, variant)
    left, right = base.mean(name), variant.mean(name)
    return _by_head(variant, name, SIDES, np.stack([left, right, right - left]))


def one_view(capture: Capture, name: str, side: str) -> ProbeResult:
    """The same of one capture alone: values [1, L, H], the side named as it is called."""
    return _by_head(capture, name, (side,), capture.mean(name)[None])


def _by_head(capture: Capture, name: str, sides: tuple[str, ...], values: np.ndarray) -> ProbeResult:
    about = statistic(name)
    return ProbeResult(
        title=about.label,
        unit=about.unit,
        definition=f"{about.definition} Mean over the query rows.",
        axes=("side", "layer", "head"),
        labels={
            "side": sides,
            "layer": tuple(f"L{layer}" for layer in range(capture.layers)),
            "head": tuple(f"H{head}" for head in range(capture.heads)),
        },
        values=values,
        signed=about.signed,
        meta={"statistic": name, "score": capture.request.score, "tokens": len(capture.tokens)},
    )


def head_rows(base: Capture, variant: Capture, name: str, layer: int, head: int) -> ProbeResult:
    """A statistic of one head by query token: values [3, N] on the axes side, query.

    Raises:
        CaptureError: the captures are not of one prompt, or hold no such statistic.
    """
    _check_same_prompt(base, variant)
    about = statistic(name)
    base.mean(name), variant.mean(name)
    left, right = base.stats[name][layer, head], variant.stats[name][layer, head]
    return ProbeResult(
        title=f"{about.label} of {head_name(layer, head)} by query token",
        unit=about.unit,
        definition=about.definition,
        axes=("side", "query"),
        labels={"side": SIDES, "query": base.tokens.labels},
        values=np.stack([left, right, right - left]),
        signed=about.signed,
        meta={"statistic": name, "layer": layer, "head": head},
    )


def _check_same_prompt(base: Capture, variant: Capture) -> None:
    if base.stats["entropy"].shape != variant.stats["entropy"].shape or not np.array_equal(base.tokens.ids, variant.tokens.ids):
        raise CaptureError(
            "base and variant captured on the same prompt",
            f"{base.stats['entropy'].shape} and {variant.stats['entropy'].shape}",
            "Capture both views with the same tokens.",
        )


def is_differential(capture: Capture) -> bool:
    """Whether the capture is one of a DIFF Transformer."""
    return bool(capture.provenance.get("pairing"))


def pairing_text(capture: Capture, head: int) -> str | None:
    """The two softmax heads of a logical head of a DIFF Transformer, such as "A₁: head 1, A₂: head 5"; of a softmax head, whose
    map it is, such as "A₂ of logical head 1"; None for other models.
    """
    if not is_differential(capture):
        return None
    neighbours = str(capture.provenance["pairing"]).startswith("2p")
    if capture.request.score == "attention":
        second, logical = (head % 2, head // 2) if neighbours else divmod(head, capture.heads // 2)
        return f"{'A₂' if second else 'A₁'} of logical head {logical}"
    first, second = (2 * head, 2 * head + 1) if neighbours else (head, head + capture.heads)
    return f"A₁: head {first}, A₂: head {second}"
