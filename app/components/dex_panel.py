"""What DEX does to the selected head, in numbers."""

from __future__ import annotations

import numpy as np
import streamlit as st

from app.components.panel import panel_head
from app.components.theme import theme
from app.state import Selection, Widget
from dexviz.figures.curves import gain_curve, spectrum_curve
from dexviz.figures.numbers import BLANK, three
from dexviz.probes.gains import token_gains
from dexviz.probes.noise_terms import effective_rank
from dexviz.records import PROJECTIONS, SPACES, Capture, HeadMap, ProbeResult, head_name
from dexviz.requests import PairInfo

FORMULA = r"""
\begin{aligned}
S_{ij} &= \rho_j A_{ij}, \qquad \rho_j = 1 - \lambda\,\frac{\langle v_j W_D,\, v_j\rangle}{\lVert v_j\rVert^2} \\
\varepsilon_j &= \frac{\lVert v_j(I-\lambda W_D) - \rho_j v_j\rVert}{\lVert v_j(I-\lambda W_D)\rVert}
\end{aligned}
"""
DERIVED = (
    "DEX acts on values, so no signed map exists inside it: S is a derived quantity. ρ is the gain that best describes what "
    "DEX does to a token's value; ε is the share of the adapted value that ρ does not explain."
)
SIGNED_ONLY = "ρ and ε belong to the signed score."
SPACE_NOTE = {
    "value": "In value space ρ is the same for all adapted heads that share a key/value head.",
    "residual": "In residual space values are taken through the head's rows of W_O, which is what the next layer sees.",
}


def dex_panel(variant: Capture, right: HeadMap | None, choice: Selection, stored: bool) -> None:
    """λ, change of the output, ρ and ε of the head, with the formula."""
    name = head_name(choice.layer, choice.head)
    signed = variant.request.score == "signed"
    note = f"{DERIVED} {SPACE_NOTE[choice.space]}" if signed else SIGNED_ONLY
    panel_head(f"What DEX does to {name}", "ratios, no unit", key="dex", explain=note, formula=FORMULA if signed else None)
    if not variant.selected[choice.layer, choice.head]:
        st.caption(unadapted(variant, choice.layer, name))
        return
    gains = None if right is None else token_gains(right, variant.tokens)
    st.markdown(_facts(variant, gains, choice))
    if stored and signed and gains is None:
        st.caption(_held(variant, name))
    st.caption(note)
    if not signed:
        return
    st.latex(FORMULA)
    if not stored:
        st.segmented_control(
            "Space of ρ",
            SPACES,
            key=Widget.SPACE,
            persist_state="session",
            required=True,
            format_func=lambda s: f"{s.capitalize()} space",
        )


def spectrum_panel(info: PairInfo | None, layer: int) -> None:
    """Singular values of the layer's W_D, with λ what DEX takes away at most."""
    if info is None or layer >= len(info.spectra) or not info.spectra[layer]:
        return
    values = np.array(info.spectra[layer])
    lam = info.lam[layer]
    most = "" if lam is None else f"; λ σ₁ {three(lam * values[0])} is the largest share of an output that DEX takes away"
    panel_head(
        f"Spectrum of W_D, L{layer}",
        f"singular values; effective rank {three(effective_rank(np.diag(values)))} of {len(values)}",
        key="spectrum",
        explain="One W_D serves all adapted heads of a layer. Effective rank: exp of the entropy of the values as shares.",
    )
    st.plotly_chart(spectrum_curve(values, theme=theme()), key="spectrum-curve", theme=None, config={"displayModeBar": False})
    st.caption(f"σ₁ {three(values[0])}{most}.")


def gain_panel(variant: Capture, right: HeadMap | None) -> None:
    """ρ by key token, on a scale of its own."""
    gains = None if right is None else token_gains(right, variant.tokens)
    if gains is None:
        return
    panel_head(gains.title, "ρ, ratio; own scale", key="gain", explain=gains.definition, formula=FORMULA)
    st.plotly_chart(gain_curve(gains, theme=theme()), key="gain-curve", theme=None, config={"displayModeBar": False})


def unadapted(variant: Capture, layer: int, name: str) -> str:
    """Why there is nothing to tell of a head, and where a change in it comes from all the same."""
    changed = [part for part in (variant.provenance.get("adapter") or {}).get("trained", ()) if part in PROJECTIONS]
    if not variant.selected.any():
        if changed:
            return f"This adapter has no DEX: it changes {', '.join(changed)} of every layer, {name} included."
        return "There is no DEX adapter in this variant. Choose one under Change model and press Run."
    below = variant.selected[:layer].any()
    cause = "what changes in it comes from layers below" if below else "nothing below it is adapted, so it equals the base"
    if changed:
        cause = f"what changes in it comes from {', '.join(changed)}, which this adapter changes in every layer"
    return f"DEX leaves {name} alone; {cause}. Heads with a dot are adapted."


def _held(variant: Capture, name: str) -> str:
    """Which heads' ρ an example stores, where it is not this one's."""
    heads = sorted({place for place, held in variant.maps.items() if held.gain is not None})
    names = ", ".join(head_name(*place) for place in heads) or "no head"
    return f"This example stores ρ and ε of {names}. Press Run to compute those of {name}."


def _facts(variant: Capture, gains: ProbeResult | None, choice: Selection) -> str:
    """One row of numbers as a Markdown table; the header cells say what they are."""
    place = (choice.layer, choice.head)
    rho, epsilon = (_reach(None), _reach(None)) if gains is None else map(_reach, gains.values)
    cells = {
        f"λ of L{choice.layer}": three(float(variant.lam[choice.layer])),
        "‖ΔO‖ / ‖O‖": BLANK if variant.delta_norm is None else three(float(variant.delta_norm[place])),
        "cos(O, O′)": BLANK if variant.delta_cosine is None else three(float(variant.delta_cosine[place])),
        "ρ over keys": rho,
        "ε over keys": epsilon,
    }
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells.keys(), ["---:"] * len(cells), cells.values()))


def _reach(values: np.ndarray | None) -> str:
    if values is None or not np.isfinite(values).any():
        return BLANK
    return f"{three(float(np.nanmin(values)))} to {three(float(np.nanmax(values)))}"
