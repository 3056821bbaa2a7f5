"""Signal and noise on marked prompts: against dense float64 maps, by characters whatever the tokenizer, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dexviz
from dexviz.engine import LocalEngine
from dexviz.errors import Cancelled, CaptureError, ModelError, PromptError
from dexviz.layer_records import LayerCalls
from dexviz.models import ModelPair, load_pair, make_pair, wrap_model
from dexviz.needle_noise import find, heads_noise, measure
from dexviz.noise_records import MEASURES, HeadNoise, MarkedTokens, Marks
from dexviz.requests import MeasureNoise, PairSpec, Prompt, from_json, to_json
from tests import reference as ref, test_diff
from tests.adapters import random_adapter, tiny_model
from tests.families import WINDOW, build, prompt
from tests.readers import byte_pair, byte_tokenizer, log_probabilities
from tests.test_family_captures import TOKENS, calls_of, pair_of, tokens_of

NEEDLE, QUESTION, ROWS = ((3, 6), (8, 9)), (18, 21), (TOKENS - 1, 12, 15)
TEXT = "A cat lies on the red mat. A dog lies on the blue rug. Where is the cat? On the"


def plain_noise(s_SNN: np.ndarray, needle: Any, question: Any, rows: Any) -> dict[str, np.ndarray]:
    """The definition, head by head, row by row, token by token."""
    found: dict[str, list[list[float]]] = {name: [] for name in MEASURES}
    for s_NN in np.asarray(s_SNN, np.float64):
        per_row: dict[str, list[float]] = {name: [] for name in MEASURES}
        for row in rows:
            keys = list(range(row + 1))
            size = [abs(float(s_NN[row, j])) for j in keys]
            marked = [j for j in keys[1:] if any(a <= j < b for a, b in needle)]
            rest = [j for j in keys[1:] if j not in marked and not question[0] <= j < question[1]]
            per_row["signal"].append(sum(size[j] for j in marked) / len(marked) / sum(size))
            per_row["noise"].append(sum(size[j] for j in rest) / len(rest) / sum(size))
            per_row["sink"].append(size[0] / sum(size))
            per_row["negative"].append(sum(size[j] for j in keys if s_NN[row, j] < 0) / sum(size))
            per_row["net"].append(float(s_NN[row, : row + 1].sum()))
        for name in MEASURES:
            if name != "snr":
                found[name].append(np.mean(per_row[name]))
    result = {name: np.array(values) for name, values in found.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        result["snr"] = np.where(result["noise"] > 0, result["signal"] / result["noise"], np.nan)
    return result


def assert_heads(mine: HeadNoise, layer: int, s_SNN: np.ndarray, needle: Any = NEEDLE) -> None:
    for name, expected in plain_noise(s_SNN, needle, QUESTION, ROWS).items():
        np.testing.assert_allclose(getattr(mine, name)[layer], expected, atol=2e-6, rtol=2e-3, err_msg=name)


def read() -> MarkedTokens:
    return MarkedTokens(tokens_of(prompt(TOKENS)), NEEDLE, QUESTION, ROWS)


@pytest.mark.parametrize("score", ["attention", "signed", "contribution"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_every_head_equals_the_dense_reference(name, score):
    view = pair_of(name).variant
    mine = heads_noise(view, read(), score)
    for call in calls_of(view, prompt(TOKENS)):
        a_HNN, v_GNE = call.probabilities()[0].detach().double().numpy(), call.inputs.v_BGME[0].double().numpy()
        w_d, lam = call.operator.w_d.double().numpy(), float(call.operator.lam())
        selected = np.isin(np.arange(len(a_HNN)), call.operator.heads)
        if score == "attention":
            s_HNN = a_HNN
        elif score == "signed":
            s_HNN = ref.signed(a_HNN, ref.dex_gains(v_GNE, w_d, lam, selected)[0])
        else:
            s_HNN = ref.contribution(a_HNN, ref.dex_values(v_GNE, w_d, lam, selected))
        assert_heads(mine, call.layer, s_HNN)


@pytest.mark.parametrize("score", ["attention", "signed", "contribution"])
@pytest.mark.parametrize("name", test_diff.MODELS)
def test_logical_heads_of_diff_transformers_equal_the_formulas(name, score):
    view = test_diff.view_of(name)
    tokens = tokens_of(prompt(test_diff.TOKENS))
    mine = heads_noise(view, MarkedTokens(tokens, NEEDLE, QUESTION, ROWS), score)
    maps, seen = test_diff.stock(name)
    for layer, (a_HNN, notes) in enumerate(zip(maps, seen, strict=True)):
        s_PNN, v_PNE, _ = test_diff.expected(name, layer, a_HNN, notes)
        shown = {"attention": a_HNN, "signed": s_PNN, "contribution": ref.contribution(s_PNN, v_PNE)}[score]
        assert_heads(mine, layer, shown)
        if score == "signed":
            assert mine.negative[layer].max() > 0


def test_residual_space_gives_other_gains():
    view = pair_of("llama").variant
    value, residual = (heads_noise(view, read(), "signed", space) for space in ("value", "residual"))
    for call in calls_of(view, prompt(TOKENS)):
        w_o = view.layout.projections[call.layer].weight.T.detach().double().numpy().reshape(call.inputs.heads, 8, -1)
        a_HNN, v_GNE = call.probabilities()[0].detach().double().numpy(), call.inputs.v_BGME[0].double().numpy()
        selected = np.isin(np.arange(len(a_HNN)), call.operator.heads)
        rho, _ = ref.dex_gains(v_GNE, call.operator.w_d.double().numpy(), float(call.operator.lam()), selected, w_o)
        assert_heads(residual, call.layer, ref.signed(a_HNN, rho))
    assert np.abs(value.signal - residual.signal).max() > 1e-3


def test_the_first_token_is_the_sink_and_no_signal_even_where_the_needle_begins_there():
    view, needle = pair_of("llama").base, ((0, 3),)
    mine = heads_noise(view, MarkedTokens(tokens_of(prompt(TOKENS)), needle, QUESTION, ROWS))
    for call in calls_of(view, prompt(TOKENS)):
        assert_heads(mine, call.layer, call.probabilities()[0].detach().double().numpy(), needle)


def test_only_the_chosen_rows_are_made(monkeypatch):
    from dexviz import needle_noise

    made, original = [], needle_noise.score_rows
    monkeypatch.setattr(needle_noise, "score_rows", lambda score, a, b: made.append((a, b)) or original(score, a, b))
    view = pair_of("llama").variant
    heads_noise(view, read())
    assert made == [(row, row + 1) for row in ROWS] * 2


def test_a_window_that_hides_the_needle_leaves_no_signal():
    view = pair_of("gemma2").variant
    far = MarkedTokens(tokens_of(prompt(TOKENS)), ((1, 3),), None, (TOKENS - 1,))
    signal = heads_noise(view, far).signal
    assert (TOKENS - 1) - WINDOW > 3
    windowed = [layer for layer in range(2) if (signal[layer] == 0).all()]
    assert len(windowed) == 1


@pytest.fixture(scope="module")
def bytes_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return byte_pair("llama", tmp_path_factory.mktemp("adapter"))


def test_marks_are_found_in_the_text_and_answers_scored_after_it(bytes_pair):
    found = dexviz.noise(bytes_pair, TEXT, "red mat", question="Where is the cat? On the", answer=" red mat")
    start = TEXT.index("red mat")
    assert found.marks == Marks(((start, start + 7),), (TEXT.index("Where"), len(TEXT)))
    assert found.base_read.needle == ((start, start + 7),)
    assert found.base_read.rows == (len(TEXT) - 1,)
    ids = np.concatenate([found.base_read.tokens.ids, byte_tokenizer()(" red mat")["input_ids"]])
    with bytes_pair.base.active():
        log_NV = log_probabilities(bytes_pair.base.model, ids)
    expected = sum(log_NV[at - 1, ids[at]] for at in range(len(TEXT), len(ids)))
    assert found.answer_log_probability["base"] == pytest.approx(expected, abs=1e-3)
    assert found.answer_log_probability["variant"] != found.answer_log_probability["base"]
    assert found.same_heads
    assert np.abs(found.variant.signal - found.base.signal).max() > 1e-4
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["variant"]["heads"]["snr"][1][2] == pytest.approx(found.variant.snr[1, 2])
    means = found.base.over_heads()
    assert means["snr"] == pytest.approx(found.base.signal.mean() / found.base.noise.mean())


def test_several_needles_and_rows_from_the_end(bytes_pair):
    one = TEXT.index("red")
    found = dexviz.noise(bytes_pair, TEXT, ["blue rug", (one, one + 3)], rows=[-1, 70])
    assert found.marks.needle == ((TEXT.index("blue"), TEXT.index("blue") + 8), (one, one + 3))
    assert found.base_read.rows == (len(TEXT) - 1, 70)
    single = dexviz.noise(bytes_pair, TEXT, (one, one + 3))
    assert single.marks.needle == ((one, one + 3),)


def test_a_base_alone_has_no_variant(bytes_pair):
    found = dexviz.noise(make_pair(bytes_pair.base.loaded), TEXT, "red mat", answer=" red")
    assert found.variant is None
    assert not found.same_heads
    assert set(found.answer_log_probability) == {"base"}
    assert found.to_json()["variant"] is None


@pytest.mark.parametrize(
    ("needle", "settings", "message"),
    [
        ("green mat", {}, r"occurs once in the prompt, got 'green mat', which is not in it"),
        ("lies on the", {}, r"there 2 times, at characters 6, 33"),
        ("", {}, "nothing to look for"),
        ((5, 5), {}, r"not empty, got \[5, 5\)"),
        ((70, 400), {}, r"within the prompt's 79 characters, got \[70, 400\)"),
        ([], {}, "at least one needle"),
        ("red mat", {"rows": [5]}, "rows that see all of the needle, got row 5"),
        ("red mat", {"rows": [500]}, "within the prompt's 79 tokens"),
        ("red mat", {"rows": []}, "query rows within"),
        ((0, 1), {}, "beyond the first token, the sink, got that token alone"),
        ((1, 79), {}, "tokens beside needle, question and the first token"),
        ("red mat", {"answer": ""}, "answer of at least one token"),
    ],
)
def test_marks_that_mean_nothing_are_refused(bytes_pair, needle, settings, message):
    with pytest.raises(PromptError, match=message):
        dexviz.noise(bytes_pair, TEXT, needle, **settings)


def test_scores_that_are_not_there_are_refused(bytes_pair):
    with pytest.raises(CaptureError, match="a score out of signed"):
        dexviz.noise(bytes_pair, TEXT, "red mat", score="softmax")


def test_a_needle_cut_off_by_the_context_is_refused_with_the_limit(tmp_path):
    pair = byte_pair("llama", tmp_path, context=64)
    with pytest.raises(PromptError, match=r"at most 64 tokens, got 79.*by 15 tokens"):
        dexviz.noise(pair, TEXT, "red mat")


def test_cancelled_between_layers(bytes_pair):
    from threading import Event

    cancel = Event()
    cancel.set()
    with pytest.raises(Cancelled):
        dexviz.noise(bytes_pair, TEXT, "red mat", cancel=cancel)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of TEXT."""
    words = {
        "[UNK]": 0,
        **{word: i for i, word in enumerate(sorted(set(TEXT.replace(".", " .").replace("?", " ?").split())), 1)},
    }
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_models_with_different_tokenizers_are_compared_on_the_same_characters(bytes_pair):
    words = wrap_model(build("gpt2"), word_tokenizer(), name="words")
    pair = make_pair(bytes_pair.base.loaded, variant=words)
    row = TEXT.index("cat?") + 2
    found = dexviz.noise(pair, TEXT, "red mat", question="Where is the cat? On the", rows=[-1, row])
    labels = found.variant_read.tokens.labels
    assert [labels[i] for i in range(*found.variant_read.needle[0])] == ["red", "mat"]
    assert [labels[i] for i in found.variant_read.rows] == ["the", "cat"]
    assert found.base_read.rows == (len(TEXT) - 1, row)
    alone = dexviz.noise(make_pair(words), TEXT, "red mat", question="Where is the cat? On the", rows=found.variant_read.rows)
    np.testing.assert_array_equal(found.variant.signal, alone.base.signal)
    with pytest.raises(ModelError, match=r"same tokenizer.*words, which differ.*noise on a marked prompt"):
        pair.tokenize(TEXT)
    with pytest.raises(ModelError, match="same tokenizer"):
        dexviz.noise_battery(pair)
    with pytest.raises(ModelError, match="same tokenizer"):
        dexviz.evaluate(pair)


def test_the_chat_template_moves_the_marks(tmp_path):
    pair = byte_pair("llama", tmp_path)
    pair.base.loaded.tokenizer.chat_template = (
        "<s>{% for m in messages %}[{{ m['role'] }}] red mat: {{ m['content'] | trim }}{% endfor %}\n[assistant]"
    )
    text = f"  {TEXT} "
    found = dexviz.noise(pair, text, "red mat", chat=True)
    start, stop = found.base_read.needle[0]
    tokens = found.base_read.tokens
    assert tokens.text[tokens.offsets[start, 0] : tokens.offsets[stop - 1, 1]] == "red mat"
    assert tokens.text[: tokens.offsets[start, 0]].endswith(" lies on the ")
    pair.base.loaded.tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(PromptError, match="keeps the prompt as it is"):
        dexviz.noise(pair, text, "red mat", chat=True)


def test_the_engine_gives_the_same_numbers(tmp_path):
    base = tiny_model(tmp_path / "base", "llama")
    pair = load_pair(str(base))
    adapter = random_adapter(pair.base.loaded, tmp_path / "adapter", lam=0.8)
    text = " ".join(f"w{i}" for i in range(1, 30))
    marks = Marks((find(text, "w7 w8"),), find(text, "w28 w29"))
    request = MeasureNoise(PairSpec(str(base), str(adapter)), Prompt(text), marks, rows=(-1,), answer=" w7")
    assert from_json(json.loads(json.dumps(to_json(request)))) == request
    engine = LocalEngine()
    found = engine.run(request)
    engine.close()
    mine = measure(load_pair(str(base), adapter=str(adapter)), text, marks, answer=" w7")
    for name in MEASURES:
        np.testing.assert_array_equal(getattr(found.variant, name), getattr(mine.variant, name))
    assert found.answer_log_probability == mine.answer_log_probability
    assert asdict(found.marks)["needle"] == marks.needle


def test_layer_calls_leave_the_pass_alone():
    view, ids = pair_of("llama").variant, prompt(TOKENS)
    with torch.no_grad(), view.active(LayerCalls(view, lambda seen: None)):
        recorded = view.model(ids, use_cache=False).logits
    with torch.no_grad(), view.active():
        plain = view.model(ids, use_cache=False).logits
    assert torch.equal(recorded, plain)
