"""A bounded store of what the engine has answered, shared by all sessions: the key is the whole request and nothing else."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


class Answers:
    """Least recently used answers go first when entries or bytes exceed their bound."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Any | None:
        """The answer to exactly this request, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: str, value: Any) -> None:
        """Keep an answer, even one that alone exceeds the bound on bytes, and drop the oldest others."""
        with self._lock:
            self._kept[key] = (value, size_of(value))
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and (len(self._kept) > self._max_entries or self._bytes() > self._max_bytes):
                self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)

    def _bytes(self) -> int:
        return sum(size for _, size in self._kept.values())


def size_of(value: Any) -> int:
    """Bytes of the arrays inside plain data."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(size_of(getattr(value, field.name)) for field in fields(value))
    return 0
