"""Triton kernels compile for GPUs that are not there, within their shared memory.

`python -m benchmarks.gpu_compile --all` does the same for every type, score and width.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {"_sweep", "_statistics", "_tiles", "_gram", "_middle", "_map", "_dex"}


@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_of_the_largest_operands_fit_the_shared_memory(capability):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.gpu_compile", "--target", capability]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[1] for line in lines} == KERNELS
    assert all(0 < float(line[2]) <= 99 for line in lines), "99 KB is what the smallest of today's GPUs have"


def test_a_kernel_that_does_not_fit_is_reported():
    code = (
        "from benchmarks import gpu_compile as g; import sys; sys.argv = ['gpu_compile', '--target', '80'];"
        "g.SHARED_KB[80] = 60; sys.exit(g.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "exceeds 60 KB" in done.stdout
