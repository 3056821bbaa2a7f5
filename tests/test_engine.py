"""The engine: one load a model, right answers for sessions at once, progress, cancellation, and requests as JSON."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dexviz import serving
from dexviz.budget import KEEP_VARIABLE
from dexviz.engine import LocalEngine, share_cores
from dexviz.errors import AdapterError, Cancelled, CaptureError, DexvizError, ModelError, PromptError
from dexviz.models import load_pair
from dexviz.recorder import capture
from dexviz.records import CaptureRequest
from dexviz.requests import (
    CaptureView,
    DescribePair,
    MapHead,
    PairSpec,
    Prompt,
    Request,
    TokenizePrompt,
    from_json,
    to_json,
)
from tests.adapters import random_adapter, tiny_model

TEXTS = [" ".join(f"w{(i * step) % 97 + 1}" for i in range(40)) for step in (1, 2, 3, 5, 7, 11)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PairSpec:
    root = tmp_path_factory.mktemp("engine")
    base = tiny_model(root / "base", "llama")
    adapter = random_adapter(load_pair(str(base)).base.loaded, root / "adapter", lam=0.8)
    return PairSpec(str(base), str(adapter))


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "make",
    [
        DescribePair,
        lambda pair: TokenizePrompt(pair, Prompt("hé <b>", chat=True)),
        lambda pair: CaptureView(
            pair, Prompt("a"), "base", CaptureRequest(maps=((1, 2),), spans={"n": (0, 1)}, similarity=("js",), pool=4)
        ),
        lambda pair: MapHead(pair, Prompt("a"), "variant", 1, 2, "contribution", "residual", (0, 4, 1, 3), 2),
    ],
)
def test_requests_survive_json(make, spec: PairSpec) -> None:
    request: Request = make(spec)
    assert from_json(json.loads(json.dumps(to_json(request)))) == request


def test_answers_equal_a_direct_capture(engine: LocalEngine, spec: PairSpec) -> None:
    pair = load_pair(spec.base, adapter=spec.adapter)
    for view in ("base", "variant"):
        expected = capture(getattr(pair, view), pair.tokenize(TEXTS[0]), CaptureRequest(maps=((1, 3),), similarity=True))
        got = engine.run(CaptureView(spec, Prompt(TEXTS[0]), view, CaptureRequest(maps=((1, 3),), similarity=True)))
        for name, values in expected.stats.items():
            np.testing.assert_array_equal(got.stats[name], values)
        np.testing.assert_array_equal(got.maps[1, 3].scores, expected.maps[1, 3].scores)
        head = engine.run(MapHead(spec, Prompt(TEXTS[0]), view, 1, 3))
        np.testing.assert_allclose(head.scores, expected.maps[1, 3].scores, atol=1e-6)


def test_sessions_at_once_get_their_own_answers_from_one_load(
    engine: LocalEngine, spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    real = serving.load_model
    monkeypatch.setattr(serving, "load_model", lambda name, **options: loads.append(name) or real(name, **options))
    pair = load_pair(spec.base, adapter=spec.adapter)
    jobs = [(text, view) for text in TEXTS for view in ("base", "variant")]
    expected = {job: capture(getattr(pair, job[1]), pair.tokenize(job[0])).stats["entropy"] for job in jobs}
    wrong: list[tuple[str, str]] = []

    def session(start: int) -> None:
        for step in range(len(jobs)):
            text, view = jobs[(start + step) % len(jobs)]
            got = engine.run(CaptureView(spec, Prompt(text), view)).stats["entropy"]
            if not np.array_equal(got, expected[text, view]):
                wrong.append((text, view))

    threads = [threading.Thread(target=session, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert loads == [spec.base]


def test_a_map_without_a_capture_makes_its_own_pass_and_then_none(
    engine: LocalEngine, spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    real = serving.capture
    monkeypatch.setattr(serving, "capture", lambda *args, **options: passes.append(1) or real(*args, **options))
    prompt = Prompt(TEXTS[1])
    whole = engine.run(MapHead(spec, prompt, "variant", 0, 2))
    window = engine.run(MapHead(spec, prompt, "variant", 0, 2, window=(10, 20, 3, 12)))
    np.testing.assert_allclose(window.scores, whole.scores[10:20, 3:12], atol=1e-6)
    assert window.row_edges.tolist() == list(range(10, 21))
    tiled = engine.run(MapHead(spec, prompt, "variant", 0, 2, pool=8))
    assert tiled.scores.shape == (8, 8)
    assert not tiled.exact
    assert len(passes) == 1


def test_the_oldest_passes_go_when_the_budget_is_full(
    engine: LocalEngine, spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.run(CaptureView(spec, Prompt(TEXTS[0])))
    server = engine._get_server()
    size = next(iter(server._kept.values())).nbytes
    monkeypatch.setenv(KEEP_VARIABLE, str(2 * size))
    for text in TEXTS[:4]:
        engine.run(CaptureView(spec, Prompt(text)))
    assert [key[1].text for key in server._kept] == TEXTS[2:4]
    whole = engine.run(MapHead(spec, Prompt(TEXTS[3]), "base", 1, 2))
    monkeypatch.setenv(KEEP_VARIABLE, "0")
    fresh = engine.run(MapHead(spec, Prompt(TEXTS[3]), "base", 1, 2))
    np.testing.assert_array_equal(fresh.scores, whole.scores)
    engine.run(CaptureView(spec, Prompt(TEXTS[4])))
    assert TEXTS[4] not in [key[1].text for key in server._kept], "nothing is kept that breaks the budget"


def test_progress_and_cancellation(engine: LocalEngine, spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.run(DescribePair(spec))
    gate, reached = threading.Event(), threading.Event()
    real = serving.capture

    def slow(*args, progress, **options):
        def step(done: int, total: int) -> None:
            reached.set()
            gate.wait(20)
            progress(done, total)

        return real(*args, progress=step, **options)

    monkeypatch.setattr(serving, "capture", slow)
    ticket = engine.submit(CaptureView(spec, Prompt(TEXTS[2])))
    assert reached.wait(20)
    assert engine.progress(ticket).state == "running"
    with pytest.raises(TimeoutError):
        engine.result(ticket, timeout=0.01)
    engine.cancel(ticket)
    gate.set()
    with pytest.raises(Cancelled):
        engine.result(ticket, timeout=20)
    assert engine.progress(ticket).state == "cancelled"
    monkeypatch.setattr(serving, "capture", real)
    assert engine.run(CaptureView(spec, Prompt(TEXTS[2]))).layers == 2, "the engine goes on after a cancelled request"


def test_a_delivered_answer_is_let_go(engine: LocalEngine, spec: PairSpec) -> None:
    ticket = engine.submit(CaptureView(spec, Prompt(TEXTS[0])))
    answer = engine.result(ticket, timeout=60)
    alive = weakref.ref(answer)
    del answer
    gc.collect()
    assert alive() is None
    assert engine.progress(ticket).state == "done"
    with pytest.raises(DexvizError, match="not fetched yet"):
        engine.result(ticket)


def test_waiting_requests_can_be_cancelled_and_hold_nobody_up(engine: LocalEngine, spec: PairSpec) -> None:
    engine.run(DescribePair(spec))
    server = engine._get_server()
    with server._device:
        waiting = [engine.submit(CaptureView(spec, Prompt(text))) for text in TEXTS]
        assert len(engine.result(engine.submit(TokenizePrompt(spec, Prompt(TEXTS[0]))), timeout=20)) == 40
        for ticket in waiting:
            engine.cancel(ticket)
        for ticket in waiting:
            with pytest.raises(Cancelled):
                engine.result(ticket, timeout=20)
            assert engine.progress(ticket).state == "cancelled"
    assert engine.run(CaptureView(spec, Prompt(TEXTS[0]))).layers == 2


def test_a_pair_that_cannot_be_made_leaves_no_model_behind(engine: LocalEngine, spec: PairSpec) -> None:
    with pytest.raises(AdapterError):
        engine.run(DescribePair(PairSpec(spec.base, "no-such-adapter")))
    assert not engine._get_server()._models
    with pytest.raises(ModelError, match="an adapter or a variant"):
        engine.run(DescribePair(PairSpec(spec.base, spec.adapter, spec.base)))


def test_unloading_a_pair_frees_its_siblings_too(engine: LocalEngine, spec: PairSpec) -> None:
    alone = PairSpec(spec.base)
    for pair in (spec, alone):
        engine.run(CaptureView(pair, Prompt(TEXTS[0]), "base"))
    engine.unload(alone)
    server = engine._get_server()
    assert (len(server._pairs), len(server._models), len(server._kept)) == (0, 0, 0)


def test_run_reports_progress(engine: LocalEngine, spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    real = serving.capture
    monkeypatch.setattr(serving, "capture", lambda *args, **options: time.sleep(0.3) or real(*args, **options))
    seen: list = []
    engine.run(CaptureView(spec, Prompt(TEXTS[0])), seen.append)
    assert seen
    assert {p.state for p in seen} <= {"queued", "running"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda s: CaptureView(s, Prompt("")), PromptError, "prompt"),
        (lambda s: CaptureView(s, Prompt("w1 " * 5000)), PromptError, "token"),
        (lambda s: CaptureView(s, Prompt("w1"), "base", CaptureRequest(maps=((9, 0),))), CaptureError, "L9·H0"),
        (lambda s: MapHead(s, Prompt("w1 w2"), "base", -1, 0), CaptureError, "L-1·H0"),
        (lambda s: MapHead(s, Prompt("w1 w2"), "base", 0, 99), CaptureError, "99"),
        (lambda s: MapHead(s, Prompt("w1 w2"), "base", 0, 0, window=(0, 9, 0, 1)), CaptureError, "window"),
        (lambda s: DescribePair(PairSpec("no-such-model")), ModelError, "known model"),
        (lambda s: DescribePair(PairSpec(s.base, "no-such-adapter")), AdapterError, "adapter|folder"),
    ],
)
def test_bad_requests_end_in_one_clear_error(engine: LocalEngine, spec: PairSpec, make, error, message: str) -> None:
    ticket = engine.submit(make(spec))
    with pytest.raises(error, match=message) as caught:
        engine.result(ticket, timeout=60)
    assert "\n" not in str(caught.value)
    assert engine.progress(ticket).state == "failed"


def test_unload_frees_the_pair(engine: LocalEngine, spec: PairSpec) -> None:
    engine.run(CaptureView(spec, Prompt(TEXTS[0])))
    engine.unload(spec)
    server = engine._get_server()
    assert not server._pairs
    assert not server._models
    assert not server._kept
    assert engine.run(DescribePair(spec)).layers == 2


def test_cores_are_shared_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_unknown_tickets_are_refused(engine: LocalEngine) -> None:
    with pytest.raises(DexvizError, match="ticket"):
        engine.progress("nonsense")


def test_models_are_listed_without_loading_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys; from dexviz.engine import get_engine; assert get_engine().models(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent, timeout=120)
