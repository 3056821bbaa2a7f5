"""Mounts the attention map alone, with the synthetic maps that the query parameter `case` names."""

import json
from dataclasses import asdict

import streamlit as st

from app.components.attention_map import Lock, MapEvent, attention_map
from tests.apps.synthetic_maps import CASES, synthetic_maps

KEY = "map"
st.set_page_config(layout="wide")
case = CASES[st.query_params.get("case", "signed")]
st.session_state.setdefault("events", [])
st.session_state.setdefault("event", MapEvent())


def remember(event: MapEvent) -> None:
    st.session_state.event = event
    st.session_state.events.append(asdict(event))


if st.button("Other head"):
    st.session_state.seed = st.session_state.get("seed", 0) + 1
if st.button("Lock row 2"):
    st.session_state.event = MapEvent(lock=Lock(query=2))
seed = st.session_state.get("seed", 0)
maps = synthetic_maps(case, seed, st.session_state.event)
event = attention_map(
    maps.base, maps.variant, maps.tokens, key=KEY, lock=st.session_state.event.lock, strips=maps.strips, on_change=remember
)
st.button("Rerun")
st.code(json.dumps({"event": asdict(event), "count": len(st.session_state.events)}), language=None)
