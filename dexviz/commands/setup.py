"""What is installed, and serving the app."""

from __future__ import annotations

import os
import socket
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from dexviz import catalogue, fetching
from dexviz.commands.common import Answer, note, note_progress, quiet_libraries
from dexviz.errors import DexvizError
from dexviz.requests import ModelInfo

ROOT = Path(__file__).resolve().parents[2]


def fetch(arguments: Namespace) -> Answer:
    """Install a known model."""
    if catalogue.installed_path(arguments.model) is None:
        quiet_libraries()
    path = str(fetching.fetch(arguments.model, progress=note_progress))
    return {"name": arguments.model, "path": path}, f"{arguments.model} is at {path}"


def models(arguments: Namespace) -> Answer:
    """List what has a name."""
    found = catalogue.models()
    rows = [f"{info.name:16} {info.kind:8} {info.parameters / 1e6:9.3f} M  {_state(info):12} {info.title}" for info in found]
    return {"models": [asdict(info) for info in found]}, "\n".join(rows)


def serve(arguments: Namespace) -> Answer:
    """Replace this process by the app's server."""
    page = ROOT / "app" / "main.py"
    if not page.is_file():
        raise DexvizError(f"the app at {page}", "no such file", "Serve from a checkout of the repository.")
    _check_port(arguments.address, arguments.port)
    url = f"http://{arguments.address}:{arguments.port}"
    note(f"serving {url} (Ctrl+C stops)")
    options = {"server.port": arguments.port, "server.address": arguments.address, "server.headless": "true"}
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(page), *flags])


def _check_port(address: str, port: int) -> None:
    todo = "Choose another --port or --address."
    if not 0 < port < 1 << 16:
        raise DexvizError("a port within 1..65535", str(port), todo)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except (OSError, UnicodeError) as error:
        raise DexvizError(f"a free port at {address}:{port}", str(error), todo) from None


def _state(info: ModelInfo) -> str:
    return "ready" if info.ready else "not fetched"
