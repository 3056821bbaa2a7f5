"""Builds the ready examples of the Home page with the real model: `python -m benchmarks.gallery [NAME …]`.

Prompts are short enough for the maps of all heads to fit: tiles of one token each, in half precision.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from app.gallery import VIEWS, Recipe, picked_head, recipes, snapshot_path
from dexviz.engine import get_engine
from dexviz.errors import DexvizError, PromptError
from dexviz.records import Capture, CaptureRequest, head_name
from dexviz.requests import CaptureView, MapHead, PairSpec, Prompt, TokenizePrompt
from dexviz.snapshot import save_snapshot

MAX_TOKENS = 34


def build(recipe: Recipe, pair: PairSpec) -> str:
    """Capture both views of an example, save them, and say what came out."""
    engine, prompt = get_engine(), Prompt(recipe.prompt, recipe.chat)
    request = _request(recipe, pair)
    base, variant = (engine.run(CaptureView(pair, prompt, view, request)) for view in VIEWS)
    layer, head = picked_head(recipe.pick, base, variant)
    sizes = []
    for view, capture in zip(VIEWS, (base, variant), strict=True):
        exact = engine.run(MapHead(pair, prompt, view, layer, head, request.score, request.space))
        kept: Capture = replace(capture, maps={(layer, head): exact}, pooled_extreme=None)
        sizes.append(save_snapshot(kept, snapshot_path(recipe.name, view), compact=True).stat().st_size)
    return f"{recipe.name}: {head_name(layer, head)}, {len(base.tokens)} tokens, {sum(sizes):,} bytes"


def _request(recipe: Recipe, pair: PairSpec) -> CaptureRequest:
    tokens = get_engine().run(TokenizePrompt(pair, Prompt(recipe.prompt, recipe.chat)))
    if len(tokens) > MAX_TOKENS:
        raise PromptError(
            f"an example of at most {MAX_TOKENS} tokens", f"{len(tokens)} in {recipe.name!r}", "Shorten its prompt."
        )
    spans = {}
    for name, text in recipe.spans.items():
        start = tokens.text.rindex(text)
        spans[name] = tokens.span_of(start, start + len(text))
    return CaptureRequest(pool=len(tokens), spans=spans, score=recipe.score, space=recipe.space)


def main() -> int:
    """Exit status 2 with one line where an example cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="examples to build; all by default")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", default="default")
    options = parser.parse_args()
    try:
        for recipe in recipes():
            if not options.names or recipe.name in options.names:
                print(build(recipe, PairSpec(options.model, options.adapter)))
    except DexvizError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
