"""What the engine does with a request: loaded models, kept Q, K, V of recent prompts, and one handler a request."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dexviz.budget import keep_bytes
from dexviz.errors import CaptureError
from dexviz.headmaps import head_map
from dexviz.models import LoadedModel, ModelPair, View, load_model, make_pair
from dexviz.noise_records import NoiseTerm
from dexviz.probes.noise_terms import check_length, noise_term
from dexviz.recorder import capture
from dexviz.records import PROJECTIONS, Capture, CaptureRequest, HeadMap, Tokens, head_name
from dexviz.requests import (
    CaptureView,
    CheckClaims,
    DescribeNoise,
    DescribePair,
    MapHead,
    MeasureNoise,
    PairInfo,
    PairSpec,
    Prompt,
    Request,
    RunBattery,
    TokenizePrompt,
)
from dexviz.room import size_of
from dexviz.scores import LayerRecord
from dexviz.serving_claims import ClaimsHandler
from dexviz.serving_noise import NoiseHandlers
from dexviz.tasks import Task

MODELS_KEPT = 3

PassKey = tuple[PairSpec, Prompt, str]


@dataclass
class KeptPass:
    """Q, K and V of one pass, by layer: as many as `limit` bytes hold, the `wanted` layer and those beside it first."""

    limit: int
    wanted: int = 0
    layers: dict[int, LayerRecord] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(record.inputs.nbytes() for record in self.layers.values())

    def add(self, record: LayerRecord) -> None:
        """Take in the next layer, and let those go that are furthest from the wanted one, which always stays."""
        self.layers[record.layer] = record
        while self.nbytes > self.limit and (others := set(self.layers) - {self.wanted}):
            del self.layers[max(others, key=lambda layer: (abs(layer - self.wanted), layer))]


class Server:
    """Holds the models of this process and serves requests; safe to call from many threads."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, LoadedModel] = OrderedDict()
        self._pairs: OrderedDict[PairSpec, ModelPair] = OrderedDict()
        self._kept: OrderedDict[PassKey, KeptPass] = OrderedDict()
        self._state = threading.Lock()
        self._loading = threading.Lock()
        self._device = threading.Lock()
        noise = NoiseHandlers(self.pair, self._device)
        self._handlers: dict[type, Callable[[Any, Task], Any]] = {
            DescribePair: self._describe,
            TokenizePrompt: self._tokenize,
            CaptureView: self._capture,
            MapHead: self._map_head,
            DescribeNoise: self._describe_noise,
            MeasureNoise: noise.measure,
            RunBattery: noise.battery,
            CheckClaims: ClaimsHandler(self.pair, self._device).check,
        }

    def serve(self, request: Request, task: Task) -> Any:
        """The answer to a request.

        Raises:
            DexvizError: the request's fault, in one line.
            Cancelled: the task was asked to stop.
        """
        return self._handlers[type(request)](request, task)

    def unload(self, spec: PairSpec) -> None:
        """Forget the pair's models, with every pair that uses them; running requests finish with what they hold."""
        gone = {spec.base, spec.variant} - {None}
        with self._state:
            for pair in [pair for pair in self._pairs if {pair.base, pair.variant} & gone]:
                self._forget_pair(pair)
            self._drop_unused_models()

    def pair(self, spec: PairSpec, task: Task) -> ModelPair:
        """The pair, loaded on first use. Callers of one model wait for one load."""
        with self._state:
            found = self._pairs.get(spec)
            if found is not None:
                self._pairs.move_to_end(spec)
                return found
        with task.holding(self._loading, "loading the model"):
            with self._state:
                if spec in self._pairs:
                    return self._pairs[spec]
            try:
                loaded = self._model(spec.base, task)
                variant = self._model(spec.variant, task) if spec.variant is not None else None
                pair = make_pair(loaded, adapter=spec.adapter, variant=variant)
                with self._state:
                    self._pairs[spec] = pair
                    while len(self._pairs) > MODELS_KEPT:
                        self._forget_pair(next(iter(self._pairs)))
            finally:
                with self._state:
                    self._drop_unused_models()
            return pair

    def _model(self, name: str, task: Task) -> LoadedModel:
        with self._state:
            found = self._models.get(name)
        if found is None:
            found = load_model(name, progress=task.report)
            with self._state:
                self._models[name] = found
        return found

    def _forget_pair(self, spec: PairSpec) -> None:
        del self._pairs[spec]
        for key in [key for key in self._kept if key[0] == spec]:
            del self._kept[key]

    def _drop_unused_models(self) -> None:
        used = {name for pair in self._pairs for name in (pair.base, pair.variant)}
        for name in [name for name in self._models if name not in used]:
            del self._models[name]

    def _describe(self, request: DescribePair, task: Task) -> PairInfo:
        pair = self.pair(request.pair, task)
        base, variant = pair.base, pair.variant
        layout, model = base.layout, base.model
        heads = variant.adapter.config.heads if variant.adapter is not None else ((),) * layout.layers
        differential = variant.layout.differential
        trained = variant.adapter.trained if variant.adapter is not None else ()
        return PairInfo(
            pair=request.pair,
            base_name=base.title,
            variant_name=variant.title,
            layers=layout.layers,
            heads=layout.heads,
            kv_heads=layout.kv_heads,
            head_width=layout.value_width,
            max_tokens=min(base.loaded.max_tokens, variant.loaded.max_tokens),
            parameters=sum(p.numel() for p in model.parameters()),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            lam=tuple(None if math.isnan(lam) else lam for lam in variant.lambdas()),
            selected=heads,
            checks=dict(layout.checks),
            size=size_of(base),
            projections=tuple(part for part in trained if part in PROJECTIONS),
            spectra=variant.adapter.spectra() if variant.adapter is not None else (),
            variant_layers=variant.layout.layers,
            variant_heads=variant.layout.heads // 2 if differential else variant.layout.heads,
            pairing=differential.pairing if differential else None,
        )

    def _tokenize(self, request: TokenizePrompt, task: Task) -> Tokens:
        return self.pair(request.pair, task).tokenize(request.prompt.text, chat=request.prompt.chat)

    def _capture(self, request: CaptureView, task: Task) -> Capture:
        view, tokens = self._prepared(request.pair, request.prompt, request.view, task)
        key = (request.pair, request.prompt, request.view)
        return self._pass(view, tokens, request.capture, key, task, KeptPass(keep_bytes() // 2))

    def _map_head(self, request: MapHead, task: Task) -> HeadMap:
        record = self._layer(request, task)
        with task.holding(self._device, f"map of {head_name(request.layer, request.head)}"):
            return head_map(
                record, request.head, score=request.score, space=request.space, window=request.window, pool=request.pool
            )

    def _describe_noise(self, request: DescribeNoise, task: Task) -> NoiseTerm:
        check_length(len(self._prepared(request.pair, request.prompt, request.view, task)[1]))
        record = self._layer(request, task)
        with task.holding(self._device, f"noise term of {head_name(request.layer, request.head)}"):
            return noise_term(head_map(record, request.head, space=request.space))

    def _layer(self, request: MapHead | DescribeNoise, task: Task) -> LayerRecord:
        """Q, K and V of the layer that is asked for, held or from another pass."""
        view, tokens = self._prepared(request.pair, request.prompt, request.view, task)
        if not 0 <= request.layer < view.layout.layers:
            CaptureRequest(maps=((request.layer, request.head),)).check_against(
                view.layout.layers, view.layout.heads, len(tokens)
            )
        key = (request.pair, request.prompt, request.view)
        record = self._kept_layer(key, request.layer)
        if record is None:
            kept = KeptPass(keep_bytes() // 2, request.layer)
            self._pass(view, tokens, CaptureRequest(), key, task, kept)
            record = kept.layers.get(request.layer)
        if record is None:
            raise CaptureError("a layer with softmax attention", f"layer {request.layer}", "Choose another layer.")
        return record

    def _prepared(self, spec: PairSpec, prompt: Prompt, name: str, task: Task) -> tuple[View, Tokens]:
        pair = self.pair(spec, task)
        return (pair.base if name == "base" else pair.variant), pair.tokenize(prompt.text, chat=prompt.chat)

    def _pass(self, view: View, tokens: Tokens, request: CaptureRequest, key: PassKey, task: Task, kept: KeptPass) -> Capture:
        stage = f"{view.name}: {len(tokens):,} tokens"
        with task.holding(self._device, f"{stage}, waiting for the device"):
            task.report(stage, 0, view.layout.layers)
            result = capture(
                view,
                tokens,
                request,
                progress=lambda done, total: task.report(stage, done, total),
                cancel=task.cancelled,
                keep=kept.add,
                keep_bytes=kept.limit,
            )
        if kept.nbytes <= kept.limit:
            self._keep(key, kept)
        return result

    def _keep(self, key: PassKey, kept: KeptPass) -> None:
        """Put a pass into the store, and let the oldest go until the byte budget holds."""
        with self._state:
            self._kept.pop(key, None)
            self._kept[key] = kept
            while sum(each.nbytes for each in self._kept.values()) > keep_bytes():
                self._kept.popitem(last=False)

    def _kept_layer(self, key: PassKey, layer: int) -> LayerRecord | None:
        with self._state:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return kept.layers.get(layer)
