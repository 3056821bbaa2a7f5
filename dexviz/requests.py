"""Requests and answers of the engine: plain, frozen, JSON-ready, so that a worker in another process can serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from dexviz.budget import ModelSize
from dexviz.claims_records import CLAIMS
from dexviz.noise_records import BatteryRequest, Marks
from dexviz.records import CaptureRequest, Score, Space, ViewName


@dataclass(frozen=True)
class PairSpec:
    """Which two views are compared: a base with a DEX adapter, with a second model, or alone."""

    base: str
    """Known name, hub id, or folder."""
    adapter: str | None = None
    """"default" or another known name, hub id, or folder."""
    variant: str | None = None
    """A second model; excludes `adapter`."""


@dataclass(frozen=True)
class Prompt:
    """What the user typed, and whether the model's chat template is put around it."""

    text: str
    chat: bool = False


@dataclass(frozen=True)
class DescribePair:
    """Load the pair if need be and describe it → PairInfo."""

    pair: PairSpec


@dataclass(frozen=True)
class TokenizePrompt:
    """→ Tokens."""

    pair: PairSpec
    prompt: Prompt


@dataclass(frozen=True)
class CaptureView:
    """One pass over one view → Capture."""

    pair: PairSpec
    prompt: Prompt
    view: ViewName = "variant"
    capture: CaptureRequest = field(default_factory=CaptureRequest)


@dataclass(frozen=True)
class MapHead:
    """One head's map in one view → HeadMap; no forward pass where the prompt's Q, K, V are still held."""

    pair: PairSpec
    prompt: Prompt
    view: ViewName
    layer: int
    head: int
    score: Score = "signed"
    space: Space = "value"
    window: tuple[int, int, int, int] | None = None
    """(row start, row stop, column start, column stop) of the exact entries wanted; None for all tokens."""
    pool: int | None = None
    """Tile the window down to at most this many rows and columns; None for exact entries."""


@dataclass(frozen=True)
class CheckClaims:
    """The papers' claims about a pair → `dexviz.claims_records.ClaimsReport`; fields as in its `ClaimsRequest`."""

    pair: PairSpec
    claims: tuple[str, ...] = CLAIMS
    seed: int = 0
    orders: int = 8
    prompts: int = 8
    tokens: int = 256
    resamples: int = 2000
    level: float = 0.95


@dataclass(frozen=True)
class MeasureNoise:
    """Signal and noise of every head of both views on a marked prompt → NoiseOnPrompt."""

    pair: PairSpec
    prompt: Prompt
    marks: Marks
    rows: tuple[int, ...] | None = None
    """Query rows by token of the base's prompt, negative ones from its end; None: the last."""
    score: Score = "signed"
    space: Space = "value"
    answer: str | None = None
    """Text whose log-probability after the prompt is wanted."""


@dataclass(frozen=True)
class DescribeNoise:
    """What one head subtracts from its attention map → NoiseTerm; no forward pass where the prompt's Q, K, V are still held."""

    pair: PairSpec
    prompt: Prompt
    view: ViewName
    layer: int
    head: int
    space: Space = "value"


@dataclass(frozen=True)
class RunBattery:
    """A grid of needle prompts on both views → BatteryReport."""

    pair: PairSpec
    battery: BatteryRequest = field(default_factory=BatteryRequest)


Request = DescribePair | TokenizePrompt | CaptureView | MapHead | MeasureNoise | DescribeNoise | RunBattery | CheckClaims


@dataclass(frozen=True)
class PairInfo:
    """What the sidebar shows of a loaded pair."""

    pair: PairSpec
    base_name: str
    variant_name: str
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    max_tokens: int
    parameters: int
    dtype: str
    device: str
    lam: tuple[float | None, ...]
    """λ per layer of the variant; zeros without DEX or DIFF, None in DIFF V2, where every token has its own."""
    selected: tuple[tuple[int, ...], ...]
    """Heads that DEX adapts, per layer."""
    checks: Mapping[str, float]
    """What the load-time self-check measured: name → largest deviation."""
    size: ModelSize
    """What the cost of a capture follows from."""
    projections: tuple[str, ...] = ()
    """Projections that the variant's adapter changes: "W_K", "W_V", "W_O"."""
    spectra: tuple[tuple[float, ...], ...] = ()
    """Singular values of W_D by layer, largest first, none in a layer without DEX; () where there is no DEX."""
    variant_layers: int = 0
    """Layers and score heads of the variant; those of signed scores, so logical heads of a DIFF Transformer."""
    variant_heads: int = 0
    pairing: str | None = None
    """Softmax heads of the variant's logical head p, such as "p, p + H/2"; None unless it is a DIFF Transformer."""


@dataclass(frozen=True)
class ModelInfo:
    """A model or adapter that can be chosen by name."""

    name: str
    title: str
    kind: str
    """"model" or "adapter"."""
    base: str | None
    """For an adapter: its base model's name."""
    licence: str
    parameters: int
    ready: bool
    """True where its files are on this machine."""
    partner: str | None = None
    """A model that is made to be compared with this one."""


@dataclass(frozen=True)
class Progress:
    """How far a request is: `done` of `total` steps of `stage`; `state` is queued, running, done, failed or cancelled."""

    state: str
    stage: str
    done: int
    total: int


def to_json(request: Request) -> dict[str, Any]:
    """JSON-ready form of a request; `from_json` inverts it."""
    return {"kind": type(request).__name__, **asdict(request)}


def from_json(data: Mapping[str, Any]) -> Request:
    """Inverse of `to_json`."""
    fields = dict(data)
    kind = {cls.__name__: cls for cls in get_args(Request)}[fields.pop("kind")]
    fields["pair"] = PairSpec(**fields["pair"])
    if "prompt" in fields:
        fields["prompt"] = Prompt(**fields["prompt"])
    if "capture" in fields:
        fields["capture"] = CaptureRequest.from_json(fields["capture"])
    if "claims" in fields:
        fields["claims"] = tuple(fields["claims"])
    if "marks" in fields:
        fields["marks"] = Marks.from_json(fields["marks"])
    if "battery" in fields:
        fields["battery"] = BatteryRequest.from_json(fields["battery"])
    for name in ("window", "rows"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
    return kind(**fields)
