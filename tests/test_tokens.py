"""Labels and offsets of real and purpose-built tokenizers, on the inputs that break other tools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dexviz.catalogue import DEFAULT_MODEL
from dexviz.errors import ModelError, PromptError
from dexviz.fetching import fetch
from dexviz.tokens import label_ids, special_ids, tokenize

pytestmark = pytest.mark.model
CODE = "def f(x):\n\treturn x ** 2  # ok\r\n"
AWKWARD = {
    "emoji": "a 😀 family 👨\u200d👩\u200d👧 flag 🇫🇷",
    "accents": "Ça déjà vu, naïve e\u0301clair",
    "greek": "Ελληνικά κείμενα",
    "devanagari": "नमस्ते दुनिया",
    "chinese": "今天天气很好，我们去公园。",
    "arabic": "مرحبا بالعالم",
    "code": CODE,
    "long word": "Donaudampfschifffahrtsgesellschaftskapitän" * 40,
    "spaces": "      ",
    "html": '<script>alert("x")</script> <b>&amp;</b>',
    "controls": "\x00\x07\x1b[31m\u202eevil\u2028",
    "one token": "a",
    "repeated": "the cat the dog",
}


@pytest.fixture(scope="module")
def smollm() -> Any:
    return AutoTokenizer.from_pretrained(fetch(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def wordpiece() -> Any:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "the", "cat", "play", "##ing", "##s", "a", "<", ">", "b"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "▁x", "▁▁▁▁"]
    scores = [(piece, -2.0 if len(piece) > 1 else -5.0) for piece in pieces]
    backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def check_aligned(tokens: Any) -> None:
    """Every column has one label and one span; spans are in order and lie in the text."""
    count = len(tokens.ids)
    assert count == len(tokens.labels) == len(tokens.special) == len(tokens)
    assert tokens.ids.dtype == tokens.offsets.dtype == np.int64
    assert tokens.offsets.shape == (count, 2)
    assert all(tokens.labels)
    assert (np.diff(tokens.offsets, axis=0) >= 0).all()
    assert (tokens.offsets[:, 0] <= tokens.offsets[:, 1]).all()
    assert tokens.offsets.min() >= 0
    assert tokens.offsets.max() <= len(tokens.text)


def check_harmless(tokens: Any) -> None:
    """No label holds a character that a page would act on: controls, bidirectional overrides, line separators."""
    dangerous = {*map(chr, range(32)), "\x7f", "\u202e", "\u2028", "\u2029"}
    assert not dangerous & set("".join(tokens.labels))


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_prompts_keep_their_columns(smollm: Any, name: str) -> None:
    tokens = tokenize(smollm, AWKWARD[name])
    check_aligned(tokens)
    check_harmless(tokens)
    assert smollm.decode(tokens.ids.tolist()) == AWKWARD[name]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("the cat the dog", ("the", "␣cat", "␣the", "␣dog")),
        ("日本", ("日 1/2", "日 2/2", "本")),
        (" 😀", ("␣😀 1/2", "😀 2/2")),
        ("a\n\tb", ("a", "⏎", "⇥", "b")),
        ("café", ("c", "af", "é")),
        ("\x07", ("\\x07",)),
        ("\u202e", ("\\u202e 1/2", "\\u202e 2/2")),
        ("    ", ("␣␣␣␣",)),
        ("<b>", ("<", "b", ">")),
        ("2024", ("2", "0", "2", "4")),
    ],
)
def test_labels_show_the_characters(smollm: Any, text: str, labels: tuple[str, ...]) -> None:
    assert tokenize(smollm, text).labels == labels


def test_right_to_left_letters_stay_in_order(smollm: Any) -> None:
    text = AWKWARD["arabic"]
    assert "".join(tokenize(smollm, text).labels).replace("␣", " ") == text


def test_lone_combining_marks_sit_on_a_circle(smollm: Any) -> None:
    assert "◌े" in tokenize(smollm, AWKWARD["devanagari"]).labels


def test_three_thousand_tokens(smollm: Any) -> None:
    tokens = tokenize(smollm, "word " * 2999 + "end")
    assert len(tokens) == 3000
    check_aligned(tokens)


def test_special_tokens_are_marked(smollm: Any) -> None:
    tokens = tokenize(smollm, "x<|im_start|>y")
    assert tokens.labels == ("x", "<|im_start|>", "y")
    assert tokens.special.tolist() == [False, True, False]
    assert {0, 1, 2, 3} <= special_ids(smollm)


def test_chat_template_is_applied_and_recorded(smollm: Any) -> None:
    tokens = tokenize(smollm, "hi", chat=True)
    assert tokens.text.startswith("<|im_start|>system")
    assert tokens.text.endswith("<|im_start|>assistant\n")
    start, stop = tokens.span_of(tokens.text.index("hi"), tokens.text.index("hi") + 2)
    assert tokens.labels[start:stop] == ("hi",)
    check_aligned(tokens)


def test_next_token_labels_stand_alone(smollm: Any) -> None:
    first, second, _ = tokenize(smollm, "日本").ids.tolist()
    assert label_ids(smollm, [second, first, 1]) == ("\\xa5", "\\xe6\\x97", "<|im_start|>")


@settings(max_examples=150, deadline=None)
@given(text=st.text(min_size=1, max_size=60))
def test_any_text_is_aligned_and_harmless(smollm: Any, text: str) -> None:
    assume(smollm(text)["input_ids"])  # the vocabulary lacks some control characters
    tokens = tokenize(smollm, text)
    check_aligned(tokens)
    check_harmless(tokens)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("the catsx日é😀\n\u0301<>"), min_size=1, max_size=40))
@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_other_families_are_aligned(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    check_aligned(tokenize(request.getfixturevalue(kind), text))


def test_wordpiece_keeps_its_continuation_sign(wordpiece: Any) -> None:
    tokens = tokenize(wordpiece, "The cats playing")
    assert tokens.labels == ("[CLS]", "the", "cat", "##s", "play", "##ing", "[SEP]")
    assert tokens.offsets.tolist() == [[0, 0], [0, 3], [4, 7], [7, 8], [9, 13], [13, 16], [16, 16]]
    assert tokens.special.tolist() == [True, False, False, False, False, False, True]


def test_sentencepiece_spaces_and_bytes(sentencepiece: Any) -> None:
    tokens = tokenize(sentencepiece, "the cats日\n")
    assert tokens.labels == ("<s>", "␣the", "␣cat", "s", "日 1/3", "日 2/3", "日 3/3", "⏎")
    assert tokens.special.tolist() == [True] + [False] * 7


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "Expected a prompt, got an empty text"),
        ("a b c d", {"max_tokens": 2}, "Expected at most 2 tokens, got 4. Shorten the prompt by 2 tokens."),
        ("\x16", {}, "which this tokenizer drops"),
        ("\ud800", {}, "a lone surrogate at character 0"),
    ],
)
def test_refused_prompts(smollm: Any, text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        tokenize(smollm, text, **options)


def test_no_truncation_even_where_the_tokenizer_asks_for_it(smollm: Any) -> None:
    smollm.backend_tokenizer.enable_truncation(4)
    assert len(tokenize(smollm, "one two three four five six seven")) == 7


def test_model_without_chat_template(wordpiece: Any) -> None:
    with pytest.raises(PromptError, match="chat template"):
        tokenize(wordpiece, "hi", chat=True)


def test_tokenizer_without_offsets_is_refused() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenize(ByT5Tokenizer(), "hi")
