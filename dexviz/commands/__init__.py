"""What the commands do. Each takes the parsed arguments and returns its answer twice: as JSON-ready data, and as text."""

from dexviz.commands.adapters import evaluate, merge, select_heads, train
from dexviz.commands.bench import bench
from dexviz.commands.capture import capture
from dexviz.commands.common import Answer, Command
from dexviz.commands.noise import noise
from dexviz.commands.setup import fetch, models, serve

__all__ = [
    "Answer",
    "Command",
    "bench",
    "capture",
    "evaluate",
    "fetch",
    "merge",
    "models",
    "noise",
    "select_heads",
    "serve",
    "train",
]
