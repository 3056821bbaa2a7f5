"""Activation outliers: the largest absolute values of attention logits and hidden states, their median and kurtosis.

    attention logits   scale · Q Kᵀ as the softmax gets them (soft-cap and bias included), where a query may see the key
    hidden states      what every block of the model puts out

Everything is streamed: a block of rows of logits, or one block's output, goes into sums, a histogram and the values of the
highest ranks, and is dropped. Kurtosis is E(x − μ)⁴ / σ⁴ from central moments that are merged as Pébay (2008, SAND2008-6212,
Eq. 2.1) does it, in float64. The median is read off a histogram of the upper 16 bits of float32, whose bins are 0.8 % wide, to
their middle. In a DIFF Transformer logits of A₁ and of A₂ are given beside those of all softmax heads.

Axes: see `dexviz.kernels.softmax`; V values, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dexviz.attention import AttentionCall
from dexviz.bootstrap import Bootstrap, Comparison
from dexviz.claims_records import TOP, Extremes, OutlierResult, OutlierRow
from dexviz.context import active_recorder
from dexviz.errors import CaptureError
from dexviz.kernels.softmax import AttentionInputs, logits_rows, row_blocks
from dexviz.models import View
from dexviz.questions import OnStep, Progress, stage

LOGITS, LOGITS_1, LOGITS_2, HIDDEN = "attention logits", "attention logits of A₁", "attention logits of A₂", "hidden states"
KINDS = (LOGITS, LOGITS_1, LOGITS_2, HIDDEN)
_BINS = 1 << 15
_ENTRIES = 1 << 20
"""Logits that are held at a time."""


@dataclass
class Distribution:
    """What is kept of values that went by: moments, a histogram of absolute values, and the largest of these."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0
    """Sums of powers of x − mean."""
    bins: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, dtype=np.int64))
    largest: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """At most `TOP[-1]` absolute values, descending."""

    @classmethod
    def of(cls, values: Tensor) -> Distribution:
        """Of finite values of any shape."""
        size_V = values.flatten().float().abs()
        bins = torch.bincount(size_V.view(torch.int32) >> 16, minlength=_BINS)
        largest = size_V.topk(min(TOP[-1], len(size_V))).values
        exact_V = values.flatten().double()
        mean = exact_V.mean() if len(exact_V) else exact_V.sum()
        exact_V = exact_V - mean
        square_V = exact_V * exact_V
        m2, m3, m4 = (float(each) for each in (square_V.sum(), (square_V * exact_V).sum(), square_V.square().sum()))
        return cls(len(size_V), float(mean), m2, m3, m4, bins.cpu().numpy(), largest.double().cpu().numpy())

    def add(self, other: Distribution) -> None:
        """Take in other values (Pébay, Eq. 2.1)."""
        if not other.count:
            return
        n, m = self.count, other.count
        total, d = n + m, other.mean - self.mean
        m4 = self.m4 + other.m4 + d**4 * n * m * (n * n - n * m + m * m) / total**3
        m4 += 6 * d * d * (n * n * other.m2 + m * m * self.m2) / total**2 + 4 * d * (n * other.m3 - m * self.m3) / total
        m3 = self.m3 + other.m3 + d**3 * n * m * (n - m) / total**2 + 3 * d * (n * other.m2 - m * self.m2) / total
        self.m2 += other.m2 + d * d * n * m / total
        self.m3, self.m4 = m3, m4
        self.mean += d * m / total
        self.count = total
        self.bins = self.bins + other.bins
        self.largest = np.sort(np.concatenate([self.largest, other.largest]))[::-1][: TOP[-1]]

    def kurtosis(self) -> float | None:
        """E(x − μ)⁴ / σ⁴; None where all values are the same."""
        return self.count * self.m4 / self.m2**2 if self.m2 > 0 else None

    def median(self) -> float:
        """Of absolute values: the middle of the bin that holds the one in the middle."""
        index = int(np.searchsorted(np.cumsum(self.bins), (self.count + 1) // 2))
        low, high = np.array([index << 16, (index + 1) << 16], dtype=np.uint32).view(np.float32).astype(np.float64)
        return float(low + high) / 2 if index else 0.0

    def extremes(self) -> Extremes:
        """As reported."""
        top = {str(rank): float(self.largest[rank - 1]) if rank <= len(self.largest) else None for rank in TOP}
        return Extremes(self.count, top, self.median(), self.kurtosis())


class _Recorder:
    """Streams one pass over one prompt: logits as the seam sees them, hidden states as the blocks put them out."""

    def __init__(self, view: View) -> None:
        self.found: dict[str, dict[int, Distribution]] = {kind: {} for kind in KINDS}
        self._convention = view.layout.differential

    def __call__(self, call: AttentionCall) -> None:
        """The logits of a layer, once: DIFF may call attention twice on the same Q and K."""
        if call.layer in self.found[LOGITS]:
            return
        sides: Sequence[tuple[str, Sequence[int]]] = [(LOGITS, range(call.inputs.heads))]
        if self._convention is not None:
            sides = list(zip((LOGITS_1, LOGITS_2), self._convention.pairs(call.inputs.heads), strict=True))
        for logits_HRC in _logits(call.inputs):
            for kind, heads in sides:
                values = logits_HRC if len(heads) == len(logits_HRC) else logits_HRC[list(heads)]
                self._add(kind, call.layer, values[values > torch.finfo(values.dtype).min / 2])
        if self._convention is not None:
            both = self.found[LOGITS].setdefault(call.layer, Distribution())
            for kind, _ in sides:
                both.add(self.found[kind][call.layer])

    def hidden(self, layer: int, states: Tensor) -> None:
        """What a block put out, [B, N, C]."""
        self._add(HIDDEN, layer, states)

    def _add(self, kind: str, layer: int, values: Tensor) -> None:
        self.found[kind].setdefault(layer, Distribution()).add(Distribution.of(values))


@dataclass(frozen=True, eq=False)
class Measured:
    """Activations of one view over all prompts, by kind; kinds that the view does not have are missing."""

    layers: Mapping[str, Mapping[int, Distribution]]
    """By layer, over all prompts."""
    largest: Mapping[str, np.ndarray]
    """Largest absolute value of each prompt, float64 [P]."""
    kurtosis: Mapping[str, np.ndarray]
    """Of each prompt over all layers, float64 [P]; NaN where all values are the same."""


@torch.inference_mode()
def measure(view: View, prompts: Sequence[np.ndarray], on_step: OnStep | None = None) -> Measured:
    """Read prompts, int64 [N] each, and keep what their activations are like. Steps are prompts."""
    layers: dict[str, dict[int, Distribution]] = {kind: {} for kind in KINDS}
    totals: list[dict[str, Distribution]] = []
    for done, ids in enumerate(prompts, start=1):
        recorder = _Recorder(view)
        with _watching(view, recorder), view.active(recorder):
            view.model(torch.from_numpy(ids)[None].to(view.model.device), use_cache=False)
        for kind, found in recorder.found.items():
            for layer, distribution in found.items():
                layers[kind].setdefault(layer, Distribution()).add(distribution)
        totals.append({kind: joined(found.values()) for kind, found in recorder.found.items() if found})
        if on_step is not None:
            on_step(done, len(prompts))
    kinds = [kind for kind in KINDS if layers[kind]]
    return Measured(
        {kind: layers[kind] for kind in kinds},
        {kind: np.array([total[kind].largest[0] for total in totals]) for kind in kinds},
        {kind: np.array([total[kind].kurtosis() for total in totals], dtype=np.float64) for kind in kinds},
    )


def outliers(
    base: View,
    variant: View | None,
    prompts: Sequence[np.ndarray],
    source: str,
    *,
    bootstrap: Bootstrap | None = None,
    progress: Progress | None = None,
) -> OutlierResult:
    """Activations of both views on the same prompts, token ids int64 [N] each, of one length."""
    views = [view for view in (base, variant) if view is not None]
    measured = [measure(view, prompts, stage(progress, f"activations, {view.name}")) for view in views]
    draws = bootstrap or Bootstrap()

    def compare(values: Sequence[np.ndarray | None]) -> Comparison | None:
        known = [each for each in values if each is not None and np.isfinite(each).all()]
        return (
            draws.compare(known[0], known[1] if len(known) > 1 else None, unit="prompt") if len(known) == len(values) else None
        )

    def row(kind: str) -> OutlierRow:
        by_layer = [each.layers.get(kind) for each in measured]
        ends = [None if found is None else joined(found.values()).extremes() for found in by_layer]
        each_layer = [_by_layer(view, found) for view, found in zip(views, by_layer, strict=True)]
        return OutlierRow(
            kind,
            ends[0],
            ends[1] if len(ends) > 1 else None,
            compare([each.largest.get(kind) for each in measured]),
            compare([each.kurtosis.get(kind) for each in measured]),
            each_layer[0],
            each_layer[1] if len(each_layer) > 1 else (),
        )

    kinds = [kind for kind in KINDS if any(kind in each.layers for each in measured)]
    return OutlierResult(len(prompts), len(prompts[0]), source, tuple(row(kind) for kind in kinds))


def joined(parts: Iterable[Distribution]) -> Distribution:
    """All values together."""
    total = Distribution()
    for part in parts:
        total.add(part)
    return total


def _by_layer(view: View, found: Mapping[int, Distribution] | None) -> tuple[Extremes | None, ...]:
    if found is None:
        return ()
    return tuple(found[layer].extremes() if layer in found else None for layer in range(view.layout.layers))


def _logits(inputs: AttentionInputs) -> Iterator[Tensor]:
    """Logits of all heads in blocks of rows, [H, R, C]; where a query may not see a key they are as low as can be."""
    rows = max(1, _ENTRIES // (inputs.heads * inputs.mask.keys))
    for start, stop in row_blocks(inputs.mask.queries, rows):
        yield logits_rows(inputs, start, stop)[0][0]


@contextmanager
def _watching(view: View, recorder: _Recorder) -> Iterator[None]:
    """Let every block tell `recorder` what it puts out in passes that are its own."""

    def tell(layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        active: Any = active_recorder()
        if active is recorder:
            recorder.hidden(layer, output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(partial(tell, layer)) for layer, block in enumerate(blocks(view))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def blocks(view: View) -> list[nn.Module]:
    """The model's blocks, which stand in a list; an attention module is inside of each, or of some.

    Raises:
        CaptureError: there is no such list.
    """
    attention = next(iter(view.layout.modules.values()))
    path = next(name for name, module in view.model.named_modules() if module is attention).split(".")
    for depth in range(len(path) - 1, 0, -1):
        above = view.model.get_submodule(".".join(path[: depth - 1]))
        if isinstance(above, nn.ModuleList):
            return list(above)
    raise CaptureError("a model whose blocks stand in a list", type(view.model).__name__, "Leave outliers out.")
