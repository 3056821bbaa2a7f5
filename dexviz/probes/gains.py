"""What DEX does to each key token of a head: the gain ρ and what it leaves unexplained, ε (DESIGN: signed scores of DEX)."""

from __future__ import annotations

import numpy as np

from dexviz.records import HeadMap, ProbeResult, Tokens, head_name


def token_gains(head: HeadMap, tokens: Tokens) -> ProbeResult | None:
    """ρ and ε by key token: values [2, N] on the axes quantity, key; None where DEX does not adapt the head."""
    if head.gain is None or head.residue is None:
        return None
    return ProbeResult(
        title=f"Gain of {head_name(head.layer, head.head)} by key token",
        unit="ratio",
        definition="ρ is the least-squares gain of the adapted value on the value itself; ε is the share ρ does not explain.",
        axes=("quantity", "key"),
        labels={"quantity": ("gain", "residue"), "key": tokens.labels},
        values=np.stack([head.gain, head.residue]),
        meta={"layer": head.layer, "head": head.head},
    )
