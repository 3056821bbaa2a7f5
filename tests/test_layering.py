"""DESIGN's import rules, read off the syntax trees of the code, and a proof that the reader notices what breaks them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

LAYERS = (
    {
        "__version__",
        "bootstrap",
        "budget",
        "claims_records",
        "claims_table",
        "dense_statistics",
        "errors",
        "files",
        "noise_records",
        "noise_table",
        "peak_memory",
        "records",
        "requests",
        "text_table",
    },
    {"kernels"},
    {"delta_weights", "dex", "diff", "projection"},
    {"attention", "context", "gates"},
    {"adapter", "catalogue", "corpora", "deltas", "fetching", "fingerprint", "merging", "models"}
    | {"needles", "parts", "provenance", "retrieval", "selfcheck", "tokens"},
    {"headmaps", "layer_records", "recorder", "room", "scores", "snapshot", "snapshot_layout", "stream"},
    {
        "bench_cases",
        "bench_process",
        "benchmark",
        "blocks",
        "checkpoints",
        "claims",
        "context_questions",
        "contradictions",
        "evaluation",
        "evaluation_table",
        "head_plan",
        "head_scores",
        "head_selection",
        "head_terms",
        "heldout",
        "incontext",
        "incontext_tasks",
        "lora",
        "modelcard",
        "battery",
        "needle_noise",
        "needle_scores",
        "outliers",
        "plan_file",
        "probes",
        "processes",
        "questions",
        "speed",
        "train_config",
        "trainee",
        "trainer",
        "training",
        "training_log",
    },
    {"engine", "serving", "serving_claims", "serving_noise", "tasks"},
    {"__main__", "cli", "commands", "options"},
)
"""Parts of dexviz from the bottom up: each imports only its own layer and those below it."""
FIGURES = ("bootstrap", "errors", "noise_records", "records", "requests", "figures")
"""All that figures may import of dexviz."""
HEAVY = ("torch", "triton", "transformers")
DOOR = "dexviz.engine"
"""Where pages leave torch behind: what the engine imports is its own affair."""
PARTNERS = (
    {"app.main", "app.routing"},  # a page that is opened on its own hands over to the router
)
"""Pairs that need each other; one of the two imports stands inside a function."""


def modules(root: Path) -> dict[str, Path]:
    """Dotted name → file of every module of dexviz and app."""
    found = {}
    for path in sorted([*root.glob("dexviz/**/*.py"), *root.glob("app/**/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Dotted names that a module imports anywhere, inside functions too; submodules and dexviz's lazy names in full."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names = set()
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names |= {full if (full := f"{source}.{a.name}") in known or source == "dexviz" else source for a in node.names}
    return names


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for what stands under `if TYPE_CHECKING:`, which never runs."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
        for part_of in child.orelse if for_types else [child]:
            yield part_of
            yield from executed(part_of)


def graph(root: Path) -> dict[str, set[str]]:
    """Module → what it imports."""
    known = modules(root)
    return {name: imported(name, path, known) for name, path in known.items()}


def top(name: str) -> str:
    return name.split(".")[0]


def part(name: str) -> str:
    """The part of dexviz that a module belongs to: dexviz.kernels.terms → kernels."""
    return name.split(".")[1] if "." in name else ""


def reach(start: str, edges: dict[str, set[str]], closed: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Everything that importing `start` brings along → the chain that leads there; what `closed` imports is left out."""
    chains, waiting = {start: [start]}, [start]
    while waiting:
        here = waiting.pop()
        for name in edges.get(here, set()) if here not in closed else set():
            if name not in chains:
                chains[name] = [*chains[here], name]
                waiting.append(name)
    return chains


def against_layers(edges: dict[str, set[str]]) -> Iterator[str]:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for module, targets in edges.items():
        if top(module) != "dexviz" or part(module) in ("", "figures"):
            continue
        if part(module) not in level:
            yield f"{module} has no place in LAYERS"
            continue
        for target in sorted(t for t in targets if top(t) in ("dexviz", "app")):
            if top(target) == "app":
                yield f"{module} imports {target}: dexviz knows no app"
            elif part(target) and level.get(part(target), len(LAYERS)) > level[part(module)]:
                yield f"{module} imports {target}, which lies above it"


def against_own_packages(edges: dict[str, set[str]]) -> Iterator[str]:
    """Streamlit stays in the app, triton in the kernels."""
    for module, targets in edges.items():
        for target in sorted(targets):
            if top(target) == "streamlit" and top(module) == "dexviz":
                yield f"{module} imports streamlit"
            if top(target) == "triton" and not module.startswith("dexviz.kernels"):
                yield f"{module} imports triton"


def against_figures(edges: dict[str, set[str]]) -> Iterator[str]:
    for module in edges:
        if not module.startswith("dexviz.figures"):
            continue
        for target, chain in reach(module, edges).items():
            if top(target) in ("torch", "triton", "transformers") or (
                top(target) == "dexviz" and part(target) not in ("", *FIGURES)
            ):
                yield f"figures reach {target}: {' → '.join(chain)}"


def against_pages(edges: dict[str, set[str]]) -> Iterator[str]:
    """Nothing in the app reaches torch but through the engine."""
    for module in edges:
        if top(module) == "app":
            for target, chain in reach(module, edges, closed=(DOOR, "dexviz")).items():
                if top(target) in HEAVY:
                    yield f"the app reaches {target}: {' → '.join(chain)}"


def against_cycles(edges: dict[str, set[str]]) -> Iterator[str]:
    """Within a layer, too, imports go one way."""
    own = {module: targets & set(edges) - {"dexviz"} for module, targets in edges.items()}
    for module, targets in own.items():
        back = {target for target in targets if module in reach(target, own) and {module, target} not in PARTNERS}
        if module != "dexviz" and back:
            yield f"{module} is part of a cycle through {', '.join(sorted(back))}"


def too_long(root: Path) -> Iterator[str]:
    for folder in ("dexviz", "app", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".js", ".css"):
                lines = len(path.read_text(encoding="utf-8").splitlines())
                if lines > MAX_LINES:
                    yield f"{path.relative_to(root)} has {lines} lines"


def complaints(root: Path) -> list[str]:
    """Everything in the tree that breaks a rule."""
    edges = graph(root)
    rules = (against_layers, against_own_packages, against_figures, against_pages, against_cycles)
    return [*(text for rule in rules for text in rule(edges)), *too_long(root)]


def test_the_code_keeps_to_its_layers() -> None:
    assert complaints(ROOT) == []


SOUND = {
    "dexviz/errors.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dexviz.models import View",
    "dexviz/__init__.py": "",
    "dexviz/engine.py": "import torch",
    "dexviz/models.py": "",
    "dexviz/training.py": "",
    "app/state.py": "import dexviz.engine",
}
VIOLATIONS: dict[str, dict[str, str]] = {
    "dexviz.records imports dexviz.models, which lies above it": {"dexviz/records.py": "from dexviz import models"},
    "dexviz.kernels.gram imports dexviz.engine, which lies above it": {"dexviz/kernels/gram.py": "from ..engine import run"},
    "dexviz.tokens imports dexviz.training, which lies above it": {"dexviz/tokens.py": "def f():\n    import dexviz.training"},
    "dexviz.probes.noise imports app.state: dexviz knows no app": {"dexviz/probes/noise.py": "import app.state"},
    "dexviz.helpers has no place in LAYERS": {"dexviz/helpers.py": ""},
    "dexviz.models imports streamlit": {"dexviz/models.py": "import streamlit as st"},
    "dexviz.dex imports triton": {"dexviz/dex.py": "from triton import language"},
    "dexviz.recorder imports dexviz.load_pair, which lies above it": {"dexviz/recorder.py": "from dexviz import load_pair"},
    "figures reach torch.nn: dexviz.figures.grid → torch.nn": {"dexviz/figures/grid.py": "import torch.nn"},
    "figures reach dexviz.models: dexviz.figures.grid → dexviz.models": {"dexviz/figures/grid.py": "import dexviz.models"},
    "the app reaches torch: app.pages.heads → app.deep → torch": {
        "app/pages/heads.py": "from app import deep",
        "app/deep.py": "import torch",
    },
    "dexviz.dex is part of a cycle through dexviz.diff": {
        "dexviz/dex.py": "import dexviz.diff",
        "dexviz/diff.py": "import dexviz.dex",
    },
    "app/style.css has 401 lines": {"app/style.css": "a {}\n" * 401},
}


@pytest.mark.parametrize("complaint", VIOLATIONS)
def test_the_checker_notices(tmp_path: Path, complaint: str) -> None:
    write(tmp_path, SOUND)
    assert complaints(tmp_path) == []
    write(tmp_path, VIOLATIONS[complaint])
    assert complaint in complaints(tmp_path)


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("statement", ["import dexviz", "import dexviz.catalogue, dexviz.fetching", "import dexviz.cli"])
def test_imports_are_light(statement: str) -> None:
    code = f"{statement}, sys; print(*{{'torch', 'triton', 'streamlit', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_public_names_resolve() -> None:
    import dexviz

    for name in dexviz.__all__:
        assert getattr(dexviz, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dexviz.no_such_name


def test_no_module_shares_a_public_name() -> None:
    import dexviz

    assert not {part(name) for name in modules(ROOT) if name.count(".") == 1 and top(name) == "dexviz"} & set(dexviz.__all__)


@pytest.mark.parametrize(
    "path", [ROOT / "app" / "main.py", *sorted((ROOT / "app" / "pages").glob("*.py"))], ids=lambda p: p.name
)
def test_no_page_shows_its_own_documentation(path: Path) -> None:
    """Streamlit shows every bare value of a script that it runs, but for its first string."""
    _, *statements = ast.parse(path.read_text(encoding="utf-8")).body
    bare = [node.lineno for node in statements if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)]
    assert not bare
