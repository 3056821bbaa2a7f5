"""What the commands' options have in common: how names and numbers are read, and groups that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dexviz.catalogue import DEFAULT_MODEL


def name_or_path(text: str) -> str:
    """A name or a path. An empty one is refused: it would stand for a default that the user did not mean."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a name or a path, got an empty text")
    return text


def whole(low: int, high: int) -> Callable[[str], int]:
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


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    return tuple(integer(part) for part in text.split(","))


integer = whole(1 - (1 << 31), (1 << 31) - 1)
seed = whole(0, (1 << 32) - 1)


def pair_options(parser: argparse.ArgumentParser) -> None:
    """Which models, where and how they run."""
    group = parser.add_argument_group("models")
    base = f"base: known name, hub id or folder (default: the adapter's base, or {DEFAULT_MODEL})"
    group.add_argument("--model", type=name_or_path, metavar="NAME", help=base)
    group.add_argument("--adapter", type=name_or_path, metavar="NAME", help='DEX adapter: "default", hub id or folder')
    second = "a second model with the same tokenizer, in place of an adapter"
    group.add_argument("--variant", type=name_or_path, metavar="NAME", help=second)
    group.add_argument("--force", action="store_true", help="accept an adapter whose base has another fingerprint")
    run_options(group)


def run_options(group: argparse._ActionsContainer) -> None:
    """Device, type and seed."""
    group.add_argument(
        "--device", type=name_or_path, help="cpu, cuda, … (default: DEXVIZ_DEVICE, else CUDA where there is one)"
    )
    types = "float32, bfloat16 or float16 (default: bfloat16 on CUDA, float32 on the CPU)"
    group.add_argument("--dtype", type=name_or_path, help=types)
    group.add_argument("--seed", type=seed, default=0, help="seed of everything random (default: 0)")


def prompt_options(parser: argparse.ArgumentParser) -> None:
    """A prompt, which is required."""
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text, - for standard input; a last line break is dropped")
    group.add_argument("--chat", action="store_true", help="put the model's chat template around the prompt")


def base_option(parser: argparse.ArgumentParser) -> None:
    """A base alone."""
    default = f"base model (default: {DEFAULT_MODEL})"
    parser.add_argument("--model", type=name_or_path, metavar="NAME", default=DEFAULT_MODEL, help=default)
