"""The sidebar: model pair, prompt, and what is looked at. The same on every page."""

from __future__ import annotations

import streamlit as st

from app import cache, state
from app.cache import Failed, Pending
from app.components.text import plain
from app.presets import presets_for
from app.state import Selection, Widget
from dexviz.figures.numbers import three
from dexviz.probes.heads import statistic
from dexviz.records import SCORES, STATISTICS
from dexviz.requests import ModelInfo, PairInfo, PairSpec, TokenizePrompt

CHARACTERS_PER_TOKEN = 4
UNKNOWN = "<unk>"
SCORE_HELP = (
    "**Attention**: the softmax weights A.  \n**Signed**: S = A minus what the variant cancels; in the base it is A itself.  \n"
    "**Contribution**: the key's share of the head's output along that output; rows sum to 1, entries may be negative."
)


def sidebar() -> None:
    """Draw it; every choice goes into the state."""
    choice = state.current()
    with st.sidebar:
        _pair(choice)
        _prompt(choice, _counted_by(choice))
        _view(choice)


def _pair(choice: Selection) -> None:
    """The pair on screen, and the one that Run would take where that is another."""
    known = cache.models()
    titles = {model.name: model.title for model in known if model.kind == "model"}
    shown = cache.on_screen(choice)
    pair = choice.pair if shown is None else shown.pair
    info, stored = cache.known_pair(pair), shown is not None and choice.example is not None
    with st.container(gap="xxsmall"):
        st.badge(plain(f"Base: {titles.get(pair.base, pair.base)}"), color="blue")
        st.caption(_base_text(info, stored))
        st.badge(plain(f"Variant: {_variant_name(pair, titles)}"), color="orange")
        st.caption(variant_text(pair, info, stored))
        if pair != choice.pair:
            chosen = f"{titles.get(choice.pair.base, choice.pair.base)}; variant: {_variant_name(choice.pair, titles)}"
            st.caption(f"Chosen: {plain(chosen)}. It takes effect with Run.")
    with st.popover("Change model", width="stretch"):
        _model_choice(choice, known, titles)


def _base_text(info: PairInfo | None, stored: bool) -> str:
    if info is None:
        return "Of the example on screen; no model is loaded for it." if stored else "Not loaded yet; the first Run loads it."
    return plain(
        f"{info.layers} layers × {info.heads} heads, {_count(info.parameters)} parameters, {info.dtype}, {info.device}"
    )


def _count(parameters: int) -> str:
    """Number of parameters, in millions where there are as many."""
    if parameters < 1_000_000:
        return f"{parameters:,}"
    return f"{parameters / 1e6:,.0f} M" if parameters >= 10_000_000 else f"{three(parameters / 1e6)} M"


def _variant_name(pair: PairSpec, titles: dict[str, str]) -> str:
    if pair.variant is not None:
        return titles.get(pair.variant, f"model {pair.variant}")
    return "the base itself" if pair.adapter is None else f"adapter {pair.adapter}"


def variant_text(pair: PairSpec, info: PairInfo | None, stored: bool) -> str:
    """What the variant is: its λ and adapted heads, the projections that it changes, or that there is none."""
    if pair.adapter is None and pair.variant is None:
        return "Choose an adapter or a second model to compare."
    if info is None:
        return "Of the example on screen." if stored else "Not loaded yet."
    if pair.variant is not None:
        return _second_text(info)
    lam = [value for value, heads in zip(info.lam, info.selected, strict=True) if heads and value is not None]
    parts = [f"changes {', '.join(info.projections)}"] if info.projections else []
    if lam:
        ends = dict.fromkeys((three(min(lam)), three(max(lam))))
        parts.insert(0, f"λ {' to '.join(ends)}; adapts {sum(map(len, info.selected))} of {info.layers * info.heads} heads")
    return "; ".join(parts)


def _second_text(info: PairInfo) -> str:
    """Size of a second model, and for a DIFF Transformer its λ and its pairs of heads."""
    size = f"{info.variant_layers} layers × {info.variant_heads}"
    if info.pairing is None:
        return f"{size} heads"
    known = [value for value in info.lam if value is not None]
    lam = " to ".join(dict.fromkeys((three(min(known)), three(max(known))))) if known else "one a token"
    return f"{size} logical heads (softmax heads {info.pairing}); λ {lam}"


def _model_choice(choice: Selection, known: list[ModelInfo], titles: dict[str, str]) -> None:
    base, adapter = choice.pair.base, choice.pair.adapter or state.NO_ADAPTER
    st.selectbox(
        "Base model",
        _with(list(titles), base),
        key=Widget.BASE,
        persist_state="session",
        accept_new_options=True,
        format_func=lambda name: titles.get(name, name),
        on_change=state.choose_base,
        args=(known,),
        help="A known model, or type a folder on the server or a hub id such as owner/name. Only safetensors are loaded.",
    )
    st.selectbox(
        "DEX adapter",
        _with([state.NO_ADAPTER, *(m.name for m in known if m.kind == "adapter" and m.base == base)], adapter),
        key=Widget.ADAPTER,
        persist_state="session",
        accept_new_options=True,
        on_change=state.choose_adapter,
        help="A known adapter of this base, or type a folder or hub id. Without one the variant is the base.",
    )
    second = choice.pair.variant or state.NO_ADAPTER
    st.selectbox(
        "Second model in place of an adapter",
        _with([state.NO_ADAPTER, *(name for name in titles if name != base)], second),
        key=Widget.VARIANT,
        persist_state="session",
        accept_new_options=True,
        format_func=lambda name: titles.get(name, name),
        on_change=state.choose_variant,
        help="Another model with the same tokenizer, such as a DIFF Transformer, or type a folder or hub id.",
    )
    st.caption("The choice takes effect with Run.")


def _with(options: list[str], value: str) -> list[str]:
    return options if value in options else [*options, value]


def _prompt(choice: Selection, info: PairInfo | None) -> None:
    st.text_area(
        "Prompt", key=Widget.DRAFT, height=150, persist_state="session", placeholder="Type a prompt, or take one below."
    )
    with st.container(horizontal=True, gap="xsmall"):
        for name in presets_for(choice.pair.base):
            st.button(name, key=f"preset-{name}", type="tertiary", on_click=state.use_preset, args=(name,))
    st.toggle(
        "Chat template", key=Widget.CHAT, persist_state="session", help="Put the model's chat template around the prompt."
    )
    st.button("Run", type="primary", width="stretch", shortcut="Ctrl+Enter", on_click=_run, key="run")
    trouble = _trouble(choice, info)
    if trouble is not None and choice.refused == choice.draft:
        st.error(plain(trouble))
    else:
        st.caption(_size_text(choice, info))


def _run() -> None:
    """Run the draft; one that cannot be run leaves alone what is on screen."""
    choice = state.current()
    info = _counted_by(choice)
    if info is not None:
        state.failures().pop(cache.key_of(TokenizePrompt(info.pair, choice.draft)), None)
    if _trouble(choice, info, patience=2.0) is not None:
        state.refuse_draft()
        return
    cache.cancel_all()
    state.run_prompt()


def _counted_by(choice: Selection) -> PairInfo | None:
    """The loaded pair whose tokeniser counts the draft: the chosen one, else the one on screen if it has the same base."""
    info, shown = cache.known_pair(choice.pair), cache.on_screen(choice)
    if info is None and shown is not None and shown.pair.base == choice.pair.base:
        return cache.known_pair(shown.pair)
    return info


def _trouble(choice: Selection, info: PairInfo | None, patience: float = cache.PATIENCE) -> str | None:
    """Why the draft cannot be run, as far as that is known before its model is loaded."""
    if not choice.draft.text:
        return "There is no prompt to run. Type one, or take one of the presets."
    if info is None:
        return None
    counted = cache.ask(TokenizePrompt(info.pair, choice.draft), patience=patience)
    return counted.text if isinstance(counted, Failed) and not counted.cancelled else None


def _size_text(choice: Selection, info: PairInfo | None) -> str:
    """Token count with its limit and the estimated cost, and whether this prompt is the one on screen."""
    if not choice.draft.text:
        return "No prompt yet."
    shown = cache.on_screen(choice)
    note = "" if shown is not None and shown.prompt == choice.draft else "Not run yet · "
    return note + _count_text(choice, info)


def _count_text(choice: Selection, info: PairInfo | None) -> str:
    """Token count with its limit and the estimated cost; a guess from the length before the model is loaded."""
    if info is None:
        guess = max(1, len(choice.draft.text) // CHARACTERS_PER_TOKEN)
        return f"Roughly {guess:,} {'token' if guess == 1 else 'tokens'}; counted when the model is loaded."
    counted = cache.ask(TokenizePrompt(info.pair, choice.draft))
    if isinstance(counted, Failed):
        return f":red[{plain(counted.text)}]"
    if isinstance(counted, Pending):
        return "Counting tokens."
    tokens = len(counted.values[0])
    cost = cache.cost_of(info, tokens)
    size = f"{tokens:,} of {info.max_tokens:,} tokens · {cost}"
    if unknown := counted.values[0].labels.count(UNKNOWN):
        size += f"  \n:red[{unknown} {'word is' if unknown == 1 else 'words are'} unknown to this model.]"
    return size if cost.refusal is None else f"{size}  \n:red[{plain(cost.refusal)}]"


def _view(choice: Selection) -> None:
    stored = choice.example is not None
    st.selectbox(
        "Score",
        SCORES,
        key=Widget.SCORE,
        persist_state="session",
        format_func=str.capitalize,
        disabled=stored,
        help="The example on screen holds this score; Run computes the others." if stored else SCORE_HELP,
    )
    st.selectbox(
        "Statistic",
        _with(list(STATISTICS), choice.statistic),
        key=Widget.STATISTIC,
        persist_state="session",
        format_func=lambda name: f"{statistic(name).label} ({statistic(name).unit})",
        help="  \n".join(f"**{s.label}**: {s.definition}" for s in STATISTICS.values()),
    )
