"""docs/results.md and the table of the shipped adapter's card, from the runs of `benchmarks.results`."""

from __future__ import annotations

from pathlib import Path

SEEDS = (0, 1, 2)
METHODS: dict[str, dict] = {
    "adapter": {"method": "dex", "mode": "adapter"},
    "full": {"method": "dex", "mode": "full"},
    "attention-only": {"method": "attention-only"},
    "dex-plus": {"method": "dex-plus", "mode": "adapter"},
    "lora": {"method": "lora"},
}


def write_page(runs: Path, root: Path) -> None:
    """Placeholder until runs exist."""
