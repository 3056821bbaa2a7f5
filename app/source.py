"""Where a page's data come from: the engine, or the snapshots of a ready example. Pages do not care which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from app import cache, gallery, state
from app.cache import Failed, Outcome, Ready
from dexviz.errors import SnapshotError
from dexviz.records import CaptureRequest, Score, ViewName, head_name
from dexviz.requests import CaptureView, MapHead, PairSpec, Prompt

Window = tuple[int, int, int, int]


class Source(Protocol):
    """Base and variant of one pair on one prompt."""

    def captures(self) -> Outcome:
        """The two captures, base first."""
        ...

    def maps(self, layer: int, head: int, window: Window | None = None, pool: int | None = None) -> Outcome:
        """One head's two maps, base first."""
        ...

    def map(
        self,
        view: ViewName,
        layer: int,
        head: int,
        window: Window | None = None,
        pool: int | None = None,
        score: Score = "signed",
    ) -> Outcome:
        """One head's map in one view."""
        ...


@dataclass(frozen=True)
class Live:
    """Answers of the engine."""

    pair: PairSpec
    prompt: Prompt
    request: CaptureRequest

    def captures(self) -> Outcome:
        base = CaptureView(self.pair, self.prompt, "base", self.request)
        return cache.ask(base, replace(base, view="variant"))

    def maps(self, layer: int, head: int, window: Window | None = None, pool: int | None = None) -> Outcome:
        base = MapHead(self.pair, self.prompt, "base", layer, head, self.request.score, self.request.space, window, pool)
        return cache.ask(base, replace(base, view="variant"), patience=2.0)

    def map(
        self,
        view: ViewName,
        layer: int,
        head: int,
        window: Window | None = None,
        pool: int | None = None,
        score: Score = "signed",
    ) -> Outcome:
        return cache.ask(
            MapHead(self.pair, self.prompt, view, layer, head, score, self.request.space, window, pool), patience=2.0
        )


@dataclass(frozen=True)
class Stored:
    """Snapshots of a ready example."""

    example: gallery.Example

    def captures(self) -> Outcome:
        return Ready((self.example.base, self.example.variant))

    def maps(self, layer: int, head: int, window: Window | None = None, pool: int | None = None) -> Outcome:
        found = tuple(gallery.map_in(capture, layer, head) for capture in (self.example.base, self.example.variant))
        if None in found:
            return Failed(f"This example holds no map of {head_name(layer, head)}. Press Run to compute it with the model.")
        return Ready(found)

    def map(
        self,
        view: ViewName,
        layer: int,
        head: int,
        window: Window | None = None,
        pool: int | None = None,
        score: Score = "signed",
    ) -> Outcome:
        found = gallery.map_in(self.example.base if view == "base" else self.example.variant, layer, head)
        if found is None or found.score != score or not np.isfinite(found.attention).any():
            return Failed(
                f"This example holds no such map of {head_name(layer, head)}. Press Run to compute it with the model."
            )
        return Ready((found,))


def chosen() -> Source | Failed | None:
    """The source that this session looks at; None where nothing was run or opened yet."""
    choice = state.current()
    if choice.example is not None:
        try:
            return Stored(cache.example(choice.example, gallery.stamps().get(choice.example, 0.0)))
        except SnapshotError as error:
            return Failed(str(error))
    if choice.ran is None:
        return None
    return Live(choice.ran.pair, choice.ran.prompt, CaptureRequest(score=choice.score, space=choice.space))
