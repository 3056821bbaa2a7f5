"""What stands where results will be: progress with a Cancel button, or the reason why there are none."""

from __future__ import annotations

import streamlit as st

from app import cache
from app.cache import Failed, Pending
from app.components.text import plain
from dexviz.requests import Progress

ENDED = ("done", "failed", "cancelled")


def stand_in(outcome: Pending | Failed, height: int) -> None:
    """Progress in a panel of the size of the results, or the failure."""
    if isinstance(outcome, Failed):
        show_failure(outcome)
        return
    with st.container(height=height, border=True):
        _follow(outcome.tickets)


def show_failure(failed: Failed) -> None:
    """One clear message, exactly as the engine worded it; what the user has stopped is no error."""
    if failed.cancelled:
        st.info(plain(failed.text), icon=":material/cancel:")
        return
    st.error(plain(failed.text), icon=":material/error:")


@st.fragment(run_every=0.5)
def _follow(tickets: tuple[str, ...]) -> None:
    steps = cache.progress(tickets)
    if all(step.state in ENDED for step in steps):
        st.rerun()
    ended = sum(step.state in ENDED for step in steps)
    now = max((step for step in steps if step.state not in ENDED), key=_share)
    counted = f", {now.done:,} of {now.total:,}" if now.total > 1 else ""
    st.progress(min(1.0, (ended + _share(now)) / len(steps)), text=plain(f"{now.stage or now.state}{counted}"))
    st.button("Cancel", key=f"cancel-{tickets[0]}", on_click=cache.cancel, args=(tickets,))


def _share(step: Progress) -> float:
    return step.done / step.total if step.total else 0.0
