"""The term that a head subtracts: rank, size and correlations against plain float64, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dexviz.engine import LocalEngine
from dexviz.errors import CaptureError
from dexviz.models import load_pair, make_pair, wrap_model
from dexviz.probes import noise_terms
from dexviz.probes.noise_terms import effective_rank, noise_term
from dexviz.recorder import capture
from dexviz.records import CaptureRequest
from dexviz.requests import DescribeNoise, PairSpec, Prompt, from_json, to_json
from tests.adapters import random_adapter, tiny_model
from tests.families import build, prompt
from tests.test_family_captures import pair_of, tokens_of

N = 64


def maps_of(view, heads: int, score: str = "signed"):
    request = CaptureRequest(maps=tuple((1, head) for head in range(heads)), score=score)
    return [capture(view, tokens_of(prompt(N)), request).maps[(1, head)] for head in range(heads)]


def rank_of(matrix: np.ndarray) -> float:
    """By the eigenvalues of the Gram matrix, in longdouble from there on."""
    sizes = np.sqrt(np.clip(np.linalg.eigvalsh(matrix @ matrix.T), 0, None)).astype(np.longdouble)
    shares = sizes[sizes > 0] / sizes.sum()
    return float(np.prod(shares**-shares))


def test_ranks_of_known_matrices():
    assert effective_rank(np.eye(7)) == pytest.approx(7)
    assert effective_rank(np.outer(np.arange(1, 6), np.ones(5))) == pytest.approx(1)
    assert effective_rank(np.zeros((3, 3))) == 0
    assert effective_rank(np.diag([3.0, 1.0])) == pytest.approx(np.exp(-0.75 * np.log(0.75) - 0.25 * np.log(0.25)))


def test_diff_terms_equal_the_definition():
    view = make_pair(wrap_model(build("diffllama"), name="diffllama")).base
    for head in maps_of(view, 3):
        found = noise_term(head)
        first, second = (term.astype(np.float64) for term in head.terms)
        lam = view.lambdas()[1]
        assert found.kind == "diff"
        assert found.rank == pytest.approx(rank_of(lam * second), rel=1e-4)
        assert found.attention_rank == pytest.approx(rank_of(first), rel=1e-4)
        assert found.energy == pytest.approx(lam * np.linalg.norm(second) / np.linalg.norm(first), rel=1e-4)
        salient, rest = [], []
        for row in range(29, N):
            keys = sorted(range(row + 1), key=lambda j, row=row: -first[row, j])
            cut = (row + 1) // 10
            salient.append(np.corrcoef(first[row, keys[:cut]], second[row, keys[:cut]])[0, 1])
            rest.append(np.corrcoef(first[row, keys[cut:]], second[row, keys[cut:]])[0, 1])
        assert found.rows == N - 29
        assert found.correlation_salient == pytest.approx(np.mean(salient), abs=1e-6)
        assert found.correlation_rest == pytest.approx(np.mean(rest), abs=1e-6)


def test_dex_terms_are_those_of_the_gains():
    view = pair_of("llama").variant
    chosen = view.adapter.config.heads[1]
    for head in maps_of(view, 6):
        found = noise_term(head)
        if head.head not in chosen:
            assert (found.kind, found.rank, found.energy) == ("none", None, 0.0)
            continue
        noise = head.attention.astype(np.float64) * (1 - head.gain.astype(np.float64))[None]
        assert found.kind == "dex"
        assert found.rank == pytest.approx(rank_of(noise), rel=1e-3)
        assert found.energy == pytest.approx(np.linalg.norm(noise) / np.linalg.norm(head.attention), rel=1e-4)
        assert (found.correlation_salient, found.rows) == (None, 0)


def test_short_prompts_have_no_correlation():
    view = make_pair(wrap_model(build("diffllama"), name="diffllama")).base
    request = CaptureRequest(maps=((0, 0),))
    found = noise_term(capture(view, tokens_of(prompt(20)), request).maps[(0, 0)])
    assert (found.correlation_salient, found.correlation_rest, found.rows) == (None, None, 0)
    assert found.rank > 1


def test_maps_that_are_not_whole_or_not_signed_are_refused(monkeypatch):
    view = pair_of("llama").variant
    (other,) = maps_of(view, 1, "contribution")
    with pytest.raises(CaptureError, match="exact map of signed scores, got contribution"):
        noise_term(other)
    (head,) = maps_of(view, 1)
    with pytest.raises(CaptureError, match="exact map"):
        noise_term(replace(head, extreme=head.scores))
    monkeypatch.setattr(noise_terms, "MOST_TOKENS", N - 1)
    with pytest.raises(CaptureError, match="at most 63 tokens for the rank of a noise term, got 64"):
        noise_term(head)


def test_the_engine_describes_a_head_and_refuses_long_prompts_before_any_pass(tmp_path, monkeypatch):
    base = tiny_model(tmp_path / "base", "llama")
    adapter = random_adapter(load_pair(str(base)).base.loaded, tmp_path / "adapter", lam=0.8)
    text = " ".join(f"w{i}" for i in range(1, 40))
    request = DescribeNoise(PairSpec(str(base), str(adapter)), Prompt(text), "variant", 1, 2)
    assert from_json(json.loads(json.dumps(to_json(request)))) == request
    engine = LocalEngine()
    found = engine.run(request)
    pair = load_pair(str(base), adapter=str(adapter))
    mine = noise_term(capture(pair.variant, pair.tokenize(text), CaptureRequest(maps=((1, 2),))).maps[(1, 2)])
    assert found.rank == pytest.approx(mine.rank, rel=1e-5)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["kind"] == "dex"
    monkeypatch.setattr(noise_terms, "MOST_TOKENS", 30)
    monkeypatch.setattr("dexviz.serving.capture", lambda *a, **k: pytest.fail("a pass was made"))
    with pytest.raises(CaptureError, match="at most 30 tokens"):
        engine.run(request)
    with pytest.raises(CaptureError):
        engine.run(replace(request, layer=9))
    engine.close()
