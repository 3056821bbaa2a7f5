"""Ready examples: two snapshots and what they show, readable without torch and before any model is loaded.

An example is three files: `<name>.json` (title, finding, prompt, how its head is picked) and the snapshots
`<name>.base.safetensors` and `<name>.variant.safetensors`. The numbers in a finding are read from the snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dexviz.errors import SnapshotError
from dexviz.figures.numbers import three
from dexviz.probes.heads import statistic
from dexviz.records import Capture, HeadMap, head_name
from dexviz.snapshot import load_snapshot

FOLDER = Path(__file__).parent
VIEWS: tuple[Literal["base", "variant"], ...] = ("base", "variant")


@dataclass(frozen=True)
class Pick:
    """Which head the example opens on: the one that is highest or lowest in a statistic."""

    statistic: str
    of: Literal["base", "variant", "change"] = "variant"
    best: Literal["max", "min"] = "max"
    adapted: bool = False
    """True to look only among the heads that DEX adapts."""
    last: bool = False
    """True to look only at the last query row, where the answer comes from."""

    @property
    def rows(self) -> slice:
        return slice(-1, None) if self.last else slice(None)


@dataclass(frozen=True)
class Recipe:
    """What an example is made of."""

    name: str
    title: str
    finding: str
    """One paragraph; {head}, {base}, {variant} and {change} stand for the picked head and its statistic."""
    prompt: str
    pick: Pick
    order: int = 0
    chat: bool = False
    score: str = "signed"
    space: str = "value"
    spans: Mapping[str, str] = field(default_factory=dict)
    """Name of a token span → its text, taken where it stands last in the prompt."""


@dataclass(frozen=True)
class Example:
    """A recipe with its snapshots and the head it opens on."""

    recipe: Recipe
    base: Capture
    variant: Capture
    head: tuple[int, int]

    @property
    def finding(self) -> str:
        """The paragraph with its numbers."""
        pick = self.recipe.pick
        left, right = (float(capture.mean(pick.statistic, pick.rows)[self.head]) for capture in (self.base, self.variant))
        return self.recipe.finding.format(
            head=head_name(*self.head), base=three(left), variant=three(right), change=three(right - left, signed=True)
        )


def recipes() -> list[Recipe]:
    """All recipes in the order of the gallery."""
    found = [_read_recipe(path) for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda recipe: (recipe.order, recipe.name))


def stamps() -> dict[str, float]:
    """Examples whose snapshots are there, in order, with the time of their newest file."""
    times = {}
    for recipe in recipes():
        files = [FOLDER / f"{recipe.name}.json", *(snapshot_path(recipe.name, view) for view in VIEWS)]
        if all(path.is_file() for path in files):
            times[recipe.name] = max(path.stat().st_mtime for path in files)
    return times


def load(name: str) -> Example:
    """One example from its files.

    Raises:
        SnapshotError: there is no such example, or its files are damaged.
    """
    recipe = next((recipe for recipe in recipes() if recipe.name == name), None)
    if recipe is None:
        raise SnapshotError("an example of the gallery", repr(name), "Open one of the cards on the Home page.")
    base, variant = (load_snapshot(snapshot_path(name, view)) for view in VIEWS)
    return Example(recipe, base, variant, picked_head(recipe.pick, base, variant))


def snapshot_path(name: str, view: str) -> Path:
    """Where the snapshot of a view lies."""
    return FOLDER / f"{name}.{view}.safetensors"


def picked_head(pick: Pick, base: Capture, variant: Capture) -> tuple[int, int]:
    """The head that an example opens on."""
    statistic(pick.statistic)
    left, right = (capture.mean(pick.statistic, pick.rows) for capture in (base, variant))
    values = {"base": left, "variant": right, "change": right - left}[pick.of]
    ranked = np.where(np.isfinite(values), values if pick.best == "max" else -values, -np.inf)
    if pick.adapted and variant.selected.any():
        ranked = np.where(variant.selected, ranked, -np.inf)
    layer, head = np.unravel_index(int(np.argmax(ranked)), ranked.shape)
    return int(layer), int(head)


def map_in(capture: Capture, layer: int, head: int) -> HeadMap | None:
    """A head's exact map as far as the snapshot holds it: stored as such, or as tiles of one token each."""
    if (layer, head) in capture.maps:
        return capture.maps[layer, head]
    count = len(capture.tokens)
    if capture.pooled is None or capture.pooled.shape[-1] != count:
        return None
    scores, edges = capture.pooled[layer, head], np.arange(count + 1)
    attention = scores if capture.request.score == "attention" else np.full_like(scores, np.nan)
    return HeadMap(layer, head, capture.request.score, scores, attention, edges, edges)


def _read_recipe(path: Path) -> Recipe:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Recipe(name=path.stem, **{**fields, "pick": Pick(**fields["pick"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SnapshotError(
            f"a readable recipe in {path.name}", f"{type(error).__name__}: {error}", "Restore the file from the repository."
        ) from error
