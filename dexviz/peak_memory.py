"""Peak memory of a piece of work: the largest resident set of this process above what it held before.

The kernel's high-water mark is set back first where it can be (Linux), so that loading a model does not count. Standard library
alone: scripts of other environments use it, too.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def settle() -> int:
    """Give freed memory back, set the high-water mark to what is held now, and return that in bytes."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return _high_water()
    return _status("VmRSS")


def extra(before: int) -> int:
    """Bytes by which the resident set has risen above `before`, at most, since `settle` returned that."""
    return max(_high_water() - before, 0)


def _high_water() -> int:
    if _STATUS.is_file():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
