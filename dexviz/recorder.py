"""One pass over one view on one prompt: statistics, tiles, similarity and chosen maps of every head, layer by layer.

Each layer is worked through in blocks of query rows (`dexviz.stream`) in place of its attention: what recomputes probabilities
makes the attention output too, so that nothing is computed twice. Axes: see `dexviz.records`.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from dexviz import diff, fingerprint
from dexviz.attention import AttentionCall
from dexviz.dex import DexAdapter, DexOperator, select
from dexviz.errors import BudgetError, CaptureError, PromptError
from dexviz.headmaps import MapWriter
from dexviz.kernels.backend import chosen
from dexviz.kernels.operators import Operators, with_operators
from dexviz.kernels.similarity import linear_cka
from dexviz.kernels.softmax import AttentionInputs
from dexviz.kernels.terms import ScoreMap
from dexviz.layer_records import LayerCalls, SeenLayer, record_of
from dexviz.models import View
from dexviz.records import Capture, CaptureRequest, HeadMap, Tokens, TopTokens
from dexviz.room import estimate
from dexviz.scores import LayerRecord, score_map
from dexviz.stream import Streamed, stream

OnLayer = Callable[[int, int], None]
"""Called after each layer with (layers done, layers in all)."""

_TOP = 10


def capture(
    view: View,
    tokens: Tokens,
    request: CaptureRequest | None = None,
    *,
    progress: OnLayer | None = None,
    cancel: Event | None = None,
    keep: Callable[[LayerRecord], None] | None = None,
    keep_bytes: int = 0,
) -> Capture:
    """Run the view once and measure every head.

    Args:
        view: base or variant of a pair.
        tokens: from `pair.tokenize`.
        request: what to compute; by default the statistics alone.
        progress: called after each layer.
        cancel: set it from another thread to stop at the next row block.
        keep: receives each layer's Q, K and V, for `dexviz.headmaps.head_map` without another forward pass.
        keep_bytes: how much of that its owner holds on to, for the estimate of the memory that is needed.

    Raises:
        PromptError: no tokens, more than the model reads, or ids that it does not know.
        CaptureError: maps or spans outside the model or the prompt; a score that the view does not have.
        BudgetError: the pass does not fit into the memory that is free; nothing was run, unless the device ran full.
        Cancelled: `cancel` was set.
    """
    request = request or CaptureRequest()
    check_tokens(view, tokens)
    estimate(view, len(tokens), request, keep_bytes=keep_bytes).check()
    recording = _Recording(view, len(tokens), request, progress or _silent, cancel or Event(), keep or _dropped)
    request.check_against(view.layout.layers, recording.heads, len(tokens))
    ids = torch.from_numpy(tokens.ids)[None].to(view.model.device)
    try:
        with torch.inference_mode(), view.active(recording):
            logits = view.model(input_ids=ids, use_cache=False, **last_only(view)).logits[0, -1]
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"room for {len(tokens):,} tokens on {view.model.device}", str(error), "Shorten the prompt."
        ) from error
    recording.finish()
    return recording.result(tokens, _top_tokens(view, logits))


def _silent(done: int, total: int) -> None:
    pass


def _dropped(record: LayerRecord) -> None:
    pass


def last_only(view: View) -> dict[str, int]:
    """Keeps the model from computing logits at every position, where it can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(view.model.forward).parameters else {}


def _top_tokens(view: View, logits_V: Tensor) -> TopTokens:
    from dexviz.tokens import label_ids

    prob, ids = torch.softmax(logits_V.float(), dim=-1).topk(min(_TOP, len(logits_V)))
    tokenizer = view.loaded.tokenizer
    labels = label_ids(tokenizer, ids.tolist()) if tokenizer is not None else tuple(map(str, ids.tolist()))
    return TopTokens(ids.cpu().numpy().astype(np.int64), tuple(labels), prob.cpu().numpy().astype(np.float32))


@dataclass(frozen=True)
class _LayerResult:
    """What one layer contributes to a Capture; axes without L."""

    streamed: Streamed
    similarity: dict[str, Tensor]
    delta: tuple[Tensor, Tensor] | None


class _Recording:
    """The recorder of one pass."""

    def __init__(
        self,
        view: View,
        n: int,
        request: CaptureRequest,
        progress: OnLayer,
        cancel: Event,
        keep: Callable[[LayerRecord], None],
    ) -> None:
        self.view, self.n, self.request = view, n, request
        self.progress, self.cancel, self.keep = progress, cancel, keep
        self.logical = view.layout.differential is not None and request.score != "attention"
        self.heads = view.layout.heads // 2 if self.logical else view.layout.heads
        self.layers: dict[int, _LayerResult] = {}
        self.maps: dict[tuple[int, int], HeadMap] = {}
        self.lam: dict[int, float] = {}
        self._calls = LayerCalls(view, self._take_differential)
        self._streamed: tuple[LayerRecord, Streamed] | None = None

    def output(self, module: nn.Module, layer: int, inputs: AttentionInputs, operator: DexOperator | None) -> Tensor | None:
        """See `dexviz.attention.Attending`. DIFF may call attention twice a layer: the seam makes those outputs."""
        if self.view.layout.differential:
            return None
        record = record_of(self.view, module, layer, inputs, operator)
        out_HNE = inputs.v_BGME.new_empty(inputs.heads, self.n, inputs.v_BGME.shape[-1])
        score = score_map(record, self.request.score, self.request.space, fused=True)
        self._streamed = record, self._stream(record, score, out_HNE)
        return out_HNE[None]

    def __call__(self, call: AttentionCall) -> None:
        if self.view.layout.differential:
            self._calls(call)
            return
        assert self._streamed is not None, "output was asked for first"
        record, streamed = self._streamed
        self._streamed = None
        self._take(call, record, streamed, call.adapted_BHNE[0])

    def gate(self, layer: int, gate_BNP: Tensor) -> None:
        """See `dexviz.gates.Gated`."""
        self._calls.gate(layer, gate_BNP)

    def _take_differential(self, seen: SeenLayer) -> None:
        record, o_HNE = seen.record, seen.o_HNE
        assert record.differential is not None
        self.lam[record.layer] = float(record.lam.mean()) if isinstance(record.lam, Tensor) else record.lam
        score = score_map(record, self.request.score, self.request.space, o_HNE)
        output = diff.logical_output(record.differential, o_HNE, record.lam) if self.logical else o_HNE
        self._take(seen.call, record, self._stream(record, score, None), output)

    def _stream(self, record: LayerRecord, score: ScoreMap, out_HNE: Tensor | None) -> Streamed:
        request = self.request

        def streamed(ops: Operators) -> Streamed:
            writers = [
                MapWriter(record, request.score, request.space, head, self.n, len(score.terms))
                for layer, head in request.maps
                if layer == record.layer
            ]
            return stream(score, request, ops, writers, self.cancel, out_HNE)

        return with_operators(score.inputs.q_BHND.device, streamed)

    def _take(self, call: AttentionCall, record: LayerRecord, streamed: Streamed, output_SNE: Tensor) -> None:
        self.maps.update({(record.layer, writer.head): writer.finish() for writer in streamed.writers})
        cka = {"cka": linear_cka(output_SNE)} if "cka" in self.request.similarities else {}
        delta = _change(call.o_BHNE[0], call.adapted_BHNE[0]) if call.operator is not None else None
        self.layers[record.layer] = _LayerResult(streamed, {**streamed.similarity, **cka}, delta)
        self.keep(record)
        self.progress(len(self.layers), len(self.view.layout.modules))

    def finish(self) -> None:
        """Raise unless every layer that has attention was seen, and every map was made."""
        missing = set(self.view.layout.modules) - set(self.layers)
        if missing or not self._calls.complete:
            raise CaptureError("every attention layer in the pass", f"none of {sorted(missing)}", "Report this model.")
        if lost := set(self.request.maps) - set(self.maps):
            raise CaptureError("maps of layers that have softmax attention", str(sorted(lost)), "Choose other layers.")

    def result(self, tokens: Tokens, top: TopTokens) -> Capture:
        """The capture, on the CPU."""
        adapter, layout = self.view.adapter, self.view.layout
        heads = adapter.config.heads if adapter is not None else ()
        deltas = {layer: r.delta for layer, r in self.layers.items() if r.delta is not None}
        first = next(iter(self.layers.values()))
        return Capture(
            tokens=tokens,
            request=self.request,
            stats={
                name: self._stacked({la: r.streamed.stats[name] for la, r in self.layers.items()})
                for name in first.streamed.stats
            },
            strongest=self._stacked({la: r.streamed.strongest for la, r in self.layers.items()}, fill=-1).astype(np.int32),
            lam=np.asarray(self._lambdas(), dtype=np.float32),
            selected=select(heads, layout.layers, self.heads).numpy(),
            logits_top=top,
            provenance=self._provenance(),
            maps={key: self.maps[key] for key in self.request.maps},
            pooled=self._stacked({la: r.streamed.pooled for la, r in self.layers.items()}),
            pooled_extreme=self._stacked({la: r.streamed.extreme for la, r in self.layers.items()}),
            similarity={
                name: self._stacked({la: r.similarity[name] for la, r in self.layers.items()}) for name in first.similarity
            },
            delta_norm=self._stacked({la: d[0] for la, d in deltas.items()}, fill=0.0),
            delta_cosine=self._stacked({la: d[1] for la, d in deltas.items()}, fill=1.0),
        )

    def _lambdas(self) -> list[float]:
        """λ per layer; the mean over tokens and heads in DIFF V2."""
        return [self.lam[layer] for layer in range(self.view.layout.layers)] if self.lam else self.view.lambdas()

    def _stacked(self, parts: Mapping[int, Tensor | None], fill: float = float("nan")) -> Any:
        """One array over all layers, float32 [L, …], layers without a part filled; None where no layer has one."""
        known = {layer: part.float().cpu().numpy() for layer, part in parts.items() if part is not None}
        if not known:
            return None
        shape = next(iter(known.values())).shape
        stacked = np.full((self.view.layout.layers, *shape), fill, dtype=np.float32)
        for layer, part in known.items():
            stacked[layer] = part
        return stacked

    def _provenance(self) -> Mapping[str, Any]:
        loaded, model, adapter = self.view.loaded, self.view.model, self.view.adapter
        kernels, differential = chosen(model.device), self.view.layout.differential
        return {
            "model": loaded.name,
            "view": self.view.name,
            "variant": self.view.title,
            "fingerprint": loaded.fingerprint,
            "adapter": None if adapter is None else _adapter_facts(adapter),
            "pairing": differential.pairing if differential else None,
            "convention": differential.name if differential else None,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "kernels": kernels.name,
            "kernels_note": kernels.note,
            "checks": dict(self.view.layout.checks),
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _adapter_facts(adapter: DexAdapter) -> dict[str, Any]:
    facts = {"method": adapter.method, "trained": list(adapter.trained), "step": adapter.annealing.step}
    return {**adapter.config.to_json(), **facts, "fingerprint": fingerprint.of_module(adapter)}


def check_tokens(view: View, tokens: Tokens) -> None:
    """Raise a PromptError for no tokens, more than the model reads, or ids that it does not know."""
    vocabulary = int(view.model.config.get_text_config().vocab_size)
    limit = view.loaded.max_tokens
    if not 1 <= len(tokens) <= limit:
        raise PromptError(f"1 to {limit:,} tokens", f"{len(tokens):,}", "Shorten the prompt.")
    if not (int(tokens.ids.min()) >= 0 and int(tokens.ids.max()) < vocabulary):
        raise PromptError(f"token ids within 0..{vocabulary - 1}", "others", "Tokenise the prompt with this model's tokenizer.")


def _change(o_HNE: Tensor, adapted_HNE: Tensor) -> tuple[Tensor, Tensor]:
    """‖O' − O‖ / ‖O‖ and cos(O, O') per head, Frobenius over tokens, each [H]; 0 and 1 for an output of length zero."""
    o, adapted = o_HNE.float().flatten(1), adapted_HNE.float().flatten(1)
    norm, other = o.norm(dim=-1), adapted.norm(dim=-1)
    both = norm * other
    ratio = torch.where(norm > 0, (adapted - o).norm(dim=-1) / norm.where(norm > 0, 1.0), 0.0)
    cosine = torch.where(both > 0, (o * adapted).sum(dim=-1) / both.where(both > 0, 1.0), 1.0)
    return ratio, cosine
