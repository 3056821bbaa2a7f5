"""Files that are written whole or not at all: beside their place, then renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; what was there is replaced, and nothing half-written stays.

    Raises:
        OSError, ValueError: the path cannot be, or there is no room.
    """
    beside = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)
