"""Errors that a user can act on: what was expected, what came, what to do next."""

from __future__ import annotations


class DexvizError(ValueError):
    """Base of every error that is the input's fault. Its text is one line, fit for a terminal and for the app.

    `expected` and `got` complete the sentence "expected …, got …"; `todo` is a full sentence.
    """

    def __init__(self, expected: str, got: str, todo: str) -> None:
        self.expected, self.got, self.todo = expected, got, todo
        super().__init__(" ".join(f"Expected {expected}, got {got}. {todo}".split()))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.expected, self.got, self.todo)


class ModelError(DexvizError):
    """A model that is unknown, damaged, or outside what dexviz can capture."""


class PromptError(DexvizError):
    """A prompt that is empty, too long, or whose spans do not fit it."""


class CaptureError(DexvizError):
    """A capture request that does not fit the model or the prompt."""


class AdapterError(DexvizError):
    """A DEX adapter that is damaged, of another model, or cannot be merged."""


class SnapshotError(DexvizError):
    """A snapshot file that cannot be read or written."""


class TrainingError(DexvizError):
    """A corpus or a training run that cannot go on."""


class EvaluationError(DexvizError):
    """An evaluation whose settings or measurements make no sense."""


class BudgetError(DexvizError):
    """A request that does not fit into memory; the text carries the numbers."""


class Cancelled(Exception):
    """The caller asked for a running request to stop. Not an error of the input."""
