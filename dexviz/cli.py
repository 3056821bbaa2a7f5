"""The command line: what can be asked, and how errors come back. What the commands do is in `commands`.

Results go to standard output, as text or with --json as one JSON object; progress and notes go to standard error. Bad input
ends with exit status 2 and one line. Characters that a stream cannot encode come out as escapes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from dexviz import __version__, commands, processes
from dexviz.catalogue import DEFAULT_MODEL
from dexviz.claims_records import CLAIMS
from dexviz.corpora import SOTU
from dexviz.engine import share_cores
from dexviz.errors import Cancelled, DexvizError
from dexviz.options import base_option, integer, integers, name_or_path, pair_options, prompt_options, run_options
from dexviz.records import SCORES, SPACES, VIEWS
from dexviz.train_config import METHODS, MODES, PRECISIONS, PRESETS, TrainConfig

_CORPUS = "sotu, or some years of it, sotu:1990-2024; text file or folder, .jsonl file, or data set owner/name"
_COLUMN = "where JSONL lines and data sets keep the text"
BAD_INPUT = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = build_parser().parse_args(argv)
    share_cores()
    try:
        answer, text = arguments.run(arguments)
        if processes.index() == 0:
            print(_as_json(answer) if arguments.json else text, flush=True)
    except DexvizError as error:
        whose = f" (process {processes.index()})" if processes.index() else ""
        print(f"dexviz: error{whose}: {error}", file=sys.stderr)
        return BAD_INPUT
    except (KeyboardInterrupt, Cancelled):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _as_json(answer: dict[str, Any]) -> str:
    """JSON with readable characters where standard output can show them all, and with JSON's own escapes elsewhere."""
    readable = (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(answer, ensure_ascii=not readable, allow_nan=False)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` in its result is the function that carries the command out."""
    parser = _Parser(prog="dexviz", description="Attention heads of a language model and of its differential (DEX) variant.")
    parser.add_argument("--version", action="version", version=f"dexviz {__version__}")
    chosen = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    fetch = _command(chosen, "fetch", commands.fetch, "install a known model on this machine")
    fetch.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="its name (default: %(default)s)")
    _command(chosen, "models", commands.models, "list the models and adapters that have a name")
    _capture(_command(chosen, "capture", commands.capture, "measure every head of one view on a prompt"))
    _noise(_command(chosen, "noise", commands.noise, "measure how much noise is cancelled, and what the papers claim of it"))
    _select_heads(_command(chosen, "select-heads", commands.select_heads, "choose the heads that DEX adapts"))
    _train(_command(chosen, "train", commands.train, "train a DEX adapter, or a control of one"))
    _eval(_command(chosen, "eval", commands.evaluate, "measure a variant against its base"))
    _bench(_command(chosen, "bench", commands.bench, "time captures against plain forward passes"))
    _merge(_command(chosen, "merge", commands.merge, "fold a DEX adapter into a plain checkpoint"))
    serve = _command(chosen, "serve", commands.serve, "serve the app")
    serve.add_argument("--port", type=integer, default=8501, help="TCP port (default: %(default)s)")
    serve.add_argument(
        "--address", type=name_or_path, default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)"
    )
    return parser


def _command(chosen: Any, name: str, run: commands.Command, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = chosen.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def _capture(parser: argparse.ArgumentParser) -> None:
    prompt_options(parser)
    pair_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument("--view", choices=VIEWS, default="variant", help="default: %(default)s")
    group.add_argument("--score", choices=SCORES, default="signed", help="what a map shows (default: %(default)s)")
    group.add_argument("--space", choices=SPACES, default="value", help="where DEX gains are measured (default: %(default)s)")
    group.add_argument("--maps", metavar="L12H3", nargs="+", action="extend", default=[], help="heads whose full map is wanted")
    group.add_argument("--pool", type=integer, metavar="P", help="tile means of all heads, at most P × P")
    between = "cosine,cka,js between heads (alone: cosine,cka)"
    group.add_argument("--similarity", type=name_or_path, metavar="NAMES", nargs="?", const="cosine,cka", help=between)
    spans = "share of the scores on these tokens"
    group.add_argument("--span", metavar="NAME=START:STOP", nargs="+", action="extend", default=[], help=spans)
    group.add_argument(
        "--sink", type=integer, default=1, metavar="N", help="first tokens that are the sink (default: %(default)s)"
    )
    group.add_argument(
        "--local", type=integer, default=8, metavar="N", help="last tokens that are local (default: %(default)s)"
    )
    group.add_argument("--threshold", type=float, default=1e-3, help="scores below count as sparse (default: %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=name_or_path, metavar="FILE", help="snapshot file to write")
    output.add_argument("--dry-run", action="store_true", help="say what it would cost in time and memory, and run nothing")
    output.add_argument("--compact", action="store_true", help="store maps and statistics in half precision")


def _noise(parser: argparse.ArgumentParser) -> None:
    """What is not given stays None: its default is that of what it belongs to, and for the rest it is refused."""
    source = parser.add_argument_group("what to measure").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="signal and noise of every head on this prompt")
    source.add_argument("--prompt-file", metavar="FILE", help="the same; UTF-8 text, - for standard input")
    source.add_argument("--battery", action="store_true", help="the same on made-up needle prompts, by length and depth")
    claims = "in-context,contradiction,outliers: the papers' other claims (alone: all three)"
    source.add_argument("--claims", type=name_or_path, metavar="NAMES", nargs="?", const=",".join(CLAIMS), help=claims)
    group = parser.add_argument_group("marked prompt")
    group.add_argument("--chat", action="store_true", help="put the model's chat template around the prompt")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    group.add_argument("--needle", metavar="TEXT", help="what the answer depends on; it occurs once in the prompt", **several)
    group.add_argument("--needle-at", metavar="START:STOP", help="the same by characters, half-open", **several)
    question = group.add_mutually_exclusive_group()
    question.add_argument("--question", metavar="TEXT", help="text that is left out of the noise; it occurs once")
    question.add_argument("--question-at", metavar="START:STOP", help="the same by characters")
    group.add_argument("--answer", metavar="TEXT", help="answer whose log-probability after the prompt is wanted")
    group.add_argument("--rows", type=integer, metavar="N", nargs="+", help="query rows, negative from the end (default: -1)")
    terms = "heads whose noise term is described: rank, size, and in DIFF how alike A1 and A2 are"
    group.add_argument("--terms", metavar="L12H3", help=terms, **several)
    group = parser.add_argument_group("battery")
    group.add_argument("--lengths", type=integer, metavar="N", nargs="+", help="tokens of the prompts (default: 256 512)")
    depths = "where the needle is hidden, from 0 to 1 (default: 0 0.25 0.5 0.75 1)"
    group.add_argument("--depths", type=float, metavar="X", nargs="+", help=depths)
    group.add_argument("--per-cell", type=integer, metavar="N", help="prompts of each length and depth (default: 4)")
    group = parser.add_argument_group("claims")
    group.add_argument("--orders", type=integer, metavar="N", help="orders of the examples in context (default: 8)")
    group.add_argument("--prompts", type=integer, metavar="N", help="prompts whose activations are read (default: 8)")
    group.add_argument("--tokens", type=integer, metavar="N", help="tokens of such a prompt (default: 256)")
    pair_options(parser)
    group = parser.add_argument_group("scores, intervals, output")
    group.add_argument("--score", choices=SCORES, help="what counts as mass (default: signed)")
    group.add_argument("--space", choices=SPACES, help="where DEX gains are measured (default: value)")
    group.add_argument("--resamples", type=integer, metavar="N", help="bootstrap resamples (default: 2000)")
    group.add_argument("--level", type=float, metavar="X", help="coverage of the intervals (default: 0.95)")
    group.add_argument("--heads", type=integer, metavar="N", help="heads that the text lists (default: 10); --json has all")
    group.add_argument("--out", type=name_or_path, metavar="FILE", help="JSON file to write; a file there is replaced")


def _train(parser: argparse.ArgumentParser) -> None:
    """Options carry the names and defaults of `TrainConfig`'s fields; what is not given stays None, for preset or default."""
    out = "the adapter's folder; an adapter there is replaced"
    parser.add_argument("--out", type=name_or_path, metavar="DIR", required=True, help=out)
    base_option(parser)
    run_options(parser)
    parser.set_defaults(model=None, seed=None)  # not given: the stopped run's with --resume
    group = parser.add_argument_group("training")
    presets = 'settings by name: "quick" for a laptop\'s CPU, "paper" for a GPU; other options change them'
    group.add_argument("--preset", choices=tuple(PRESETS), help=presets)
    goes_on = "go on with the stopped run that would have written --out, with its settings; refuse where others are given"
    group.add_argument("--resume", action="store_true", help=goes_on)
    default = {field.name: field.default for field in fields(TrainConfig)}

    def add(option: str, kind: Callable[[str], Any], text: str, **more: Any) -> None:
        value = default[option[2:].replace("-", "_")]
        group.add_argument(option, type=kind, help=text if value is None else f"{text} (default: {value})", **more)

    methods = "; ".join(f"{name}: {what}" for name, what in METHODS.items())
    add("--method", str, methods, choices=tuple(METHODS))
    add("--mode", str, "adapter: what the method adds; full: W_K, W_V and W_O too", choices=MODES)
    add("--data", name_or_path, _CORPUS)
    add("--column", name_or_path, _COLUMN)
    add("--steps", integer, "optimiser steps")
    add("--anneal", integer, "annealing length of λ in steps (default: half of --steps)", metavar="T")
    add("--block", integer, "tokens a training block")
    add("--batch", integer, "blocks that a process reads at a time")
    add("--accumulate", integer, "batches a step, whose gradients are averaged", metavar="N")
    add("--learning-rate", float, "peak learning rate of W_D and λ or of LoRA (default: the method's own)", metavar="RATE")
    add("--weight-learning-rate", float, "peak learning rate of W_K, W_V and W_O", metavar="RATE")
    add("--precision", str, "arithmetic; auto: bf16 where the device has it in hardware", choices=PRECISIONS)
    add("--lambda-init", float, "λ_init of every layer (default: 0.8 − 0.6 · exp(−0.3 · layer))", metavar="VALUE")
    add("--heads", name_or_path, "plan of select-heads (default: heads of highest attention entropy)", metavar="PLAN")
    add("--heads-per-layer", integer, "heads adapted in each layer (default: half of them)", metavar="N")
    add("--calibration-blocks", integer, "blocks on which heads are selected")
    add("--validation-blocks", integer, "blocks of the corpus that are kept to decide when to stop")
    add("--evaluate-every", integer, "steps between validation and held-out losses; 0: none but that of the result")
    add("--patience", integer, "stop after so many of them without a lower validation loss, keep the best; 0: never")
    add("--save-every", integer, "steps between checkpoints")


def _select_heads(parser: argparse.ArgumentParser) -> None:
    """Options carry the names of `SelectionConfig`'s fields."""
    parser.add_argument(
        "--out", type=name_or_path, metavar="FILE", required=True, help="plan to write; a plan there is replaced"
    )
    base_option(parser)
    run_options(parser)
    group = parser.add_argument_group("selection")
    group.add_argument(
        "--criterion",
        type=name_or_path,
        default="entropy",
        help="entropy (highest), importance (lowest), all, or a list such as L0H1,L3H2 (default: %(default)s)",
    )
    group.add_argument("--per-layer", type=integer, metavar="N", help="heads of each layer (default: half of them)")
    group.add_argument("--data", type=name_or_path, default=SOTU, help=f"{_CORPUS} (default: %(default)s)")
    group.add_argument("--column", type=name_or_path, default="text", help=_COLUMN)
    group.add_argument("--block", type=integer, default=256, help="tokens a calibration block (default: %(default)s)")
    group.add_argument("--blocks", type=integer, default=8, help="calibration blocks (default: %(default)s)")
    measures = ("entropy", "importance")
    group.add_argument("--measure", nargs="+", choices=measures, default=measures, help="what the plan reports (default: both)")


def _eval(parser: argparse.ArgumentParser) -> None:
    """Options carry the names of `EvalConfig`'s fields."""
    pair_options(parser)
    group = parser.add_argument_group("held-out text")
    group.add_argument("--data", type=name_or_path, help=f"{_CORPUS} (default: the whole 2026 address)")
    group.add_argument("--column", type=name_or_path, default="text", help=_COLUMN)
    group.add_argument("--split", type=name_or_path, default="train", help="part of a data set (default: %(default)s)")
    group.add_argument("--documents", type=integer, metavar="N", help="read at most so many documents of --data (default: all)")
    group.add_argument("--block", type=integer, default=256, help="tokens a block (default: %(default)s)")
    group = parser.add_argument_group("needle task")
    each = "needle prompts for each length and depth; 0 leaves the task out (default: %(default)s)"
    group.add_argument("--needles", type=integer, default=4, metavar="N", help=each)
    lengths, depths = "tokens of the prompts", "where the needle is hidden, from 0 to 1"
    group.add_argument(
        "--lengths", type=integer, nargs="+", default=(256, 512, 1024), help=f"{lengths} (default: 256 512 1024)"
    )
    spread = (0.1, 0.3, 0.5, 0.7, 0.9)
    group.add_argument("--depths", type=float, nargs="+", default=spread, help=f"{depths} (default: 0.1 0.3 0.5 0.7 0.9)")
    group = parser.add_argument_group("speed and intervals")
    group.add_argument("--no-speed", dest="speed", action="store_false", help="do not time forward passes")
    group.add_argument("--rounds", type=integer, default=7, help="rounds of timing (default: %(default)s)")
    group.add_argument("--resamples", type=integer, default=2000, help="bootstrap resamples (default: %(default)s)")
    group.add_argument("--level", type=float, default=0.95, help="coverage of the intervals (default: %(default)s)")


def _bench(parser: argparse.ArgumentParser) -> None:
    """Options carry the names of `BenchConfig`'s fields."""
    pair_options(parser)
    group = parser.add_argument_group("what to measure")
    lengths = "tokens of the prompts, with commas between (default: 128,512,2048)"
    group.add_argument("--lengths", type=integers, default=(128, 512, 2048), metavar="N,…", help=lengths)
    group.add_argument("--rounds", type=integer, default=5, help="rounds of timing (default: %(default)s)")
    memory = "run each case once more in a process of its own, for its peak memory (default: yes)"
    group.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help=memory)


def _merge(parser: argparse.ArgumentParser) -> None:
    pair_options(parser)
    out = "folder of the new checkpoint; must not exist yet"
    parser.add_argument("--out", type=name_or_path, metavar="DIR", required=True, help=out)
