"""The fast encoder returns the ids of the library, or the library encodes the text."""

import json
from array import array
from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from baton.gateway.text import text_encoder as module
from baton.gateway.text.pre_tokens import QWEN2, has_known_pre_tokens
from baton.gateway.text.text_encoder import TextEncoder, text_encoder
from baton.gateway.text.tokenizer import HfTokenizer
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.process import loop_time
from tests.scale import sized
from tests.unit.gateway.tokenizers import DEMO, OTHERS, PATTERNS, RUST, SNIPPETS, tokenizer

TEXTS = st.lists(st.sampled_from([*SNIPPETS, *OTHERS]) | st.text(max_size=4), max_size=12).map("".join)


def encoder_of(rust: Tokenizer) -> TextEncoder:
    return text_encoder(rust, rust.to_str())


ENCODERS = {name: encoder_of(rust) for name, rust in RUST.items()}


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=sized(100, 6_000), deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_ids_equal_those_of_the_library(name: str, text: str, special: bool) -> None:
    assert ENCODERS[name].library == "fastokens"
    ids = ENCODERS[name].encode(text, add_special_tokens=special)
    assert ids.tolist() == RUST[name].encode(text, add_special_tokens=special).ids


@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_has_the_ids_of_the_library(name: str) -> None:
    """Libraries differ in their versions of Unicode, which give characters another category."""
    codes = [code for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000][:: sized(64, 1)]
    for begin in range(0, len(codes), 64):
        text = "".join(f"a{c}b {c}1{c}! {c}{c}\n" for c in map(chr, codes[begin : begin + 64]))
        ids = ENCODERS[name].encode(text, add_special_tokens=False)
        assert ids.tolist() == RUST[name].encode(text, add_special_tokens=False).ids, hex(codes[begin])


def of_model(model: models.Model) -> Callable[[], Tokenizer]:
    return lambda: Tokenizer(model)


def changed(**changes: Any) -> Callable[[], Tokenizer]:
    """The demo model's tokenizer with other attributes."""

    def make() -> Tokenizer:
        result = Tokenizer.from_str(DEMO)
        for name, value in changes.items():
            setattr(result, name, value)
        return result

    return make


def with_tokens(*tokens: AddedToken) -> Callable[[], Tokenizer]:
    """The demo model's tokenizer with further added tokens."""

    def make() -> Tokenizer:
        result = Tokenizer.from_str(DEMO)
        result.add_tokens(list(tokens))
        return result

    return make


def with_dropout() -> Tokenizer:
    description = json.loads(DEMO)
    description["model"]["dropout"] = 0.1
    return Tokenizer.from_str(json.dumps(description))


OTHER_TOKENIZERS = {
    "words": (of_model(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), "does not support"),
    "unigram": (of_model(models.Unigram([("?", 0.0), ("a", -1.0)], 0, True)), ""),
    "no pre-tokenizer": (changed(pre_tokenizer=None), ""),
    "whole words": (
        with_tokens(AddedToken("<sep>", single_word=True), AddedToken("two words", normalized=False)),
        "differently",
    ),
    "dropout": (with_dropout, ""),
}


@pytest.mark.parametrize("name", OTHER_TOKENIZERS)
def test_library_encodes_what_the_fast_encoder_does_not_support(name: str) -> None:
    make, reason = OTHER_TOKENIZERS[name]
    rust = make()
    encoder, found = module._checked(rust, rust.to_str())
    assert encoder.library == "tokenizers"
    assert reason in found


class WrongAtOneText:
    """Encodes like the library, but for one text."""

    wrong = ""

    def __init__(self, serialized: str) -> None:
        self._rust = Tokenizer.from_str(serialized)

    from_json_str = classmethod(lambda cls, serialized: cls(serialized))

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        if self.wrong and self.wrong in texts[0]:
            return b"", b""
        return array("I", self._rust.encode(texts[0], add_special_tokens=add_special_tokens).ids).tobytes(), b""


@pytest.mark.parametrize("wrong", ["", "<|im_end|>", "'LL", "345", "\u3000", "\u4e2d", "\r\n", "  ", "\U0001f642"])
def test_check_finds_a_difference_at_each_seam(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FastTokenizer", WrongAtOneText)
    monkeypatch.setattr(WrongAtOneText, "wrong", wrong)
    assert encoder_of(RUST["qwen2"]).library == ("tokenizers" if wrong else "fastokens")


def test_library_encodes_if_the_fast_one_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FastTokenizer", None)
    encoder = encoder_of(RUST["qwen2"])
    assert encoder.library == "tokenizers"
    assert encoder.encode("two words", add_special_tokens=True).tolist() == RUST["qwen2"].encode("two words").ids


def test_library_encodes_a_text_that_the_fast_encoder_rejects() -> None:
    encoder = encoder_of(RUST["qwen2"])
    assert isinstance(encoder, module.FastEncoder)

    class Rejecting:
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            raise ValueError("match limit exceeded")

    encoder._fast = Rejecting()
    assert encoder.encode("a b", add_special_tokens=True).tolist() == RUST["qwen2"].encode("a b").ids


async def test_description_names_the_library_that_encodes() -> None:
    demo = HfTokenizer(DEMO_DIR)
    assert json.loads(demo.info)["text_encoder"] == "fastokens"
    demo.close()


@pytest.mark.parametrize("unit", ["x", "\u4e2d", "1", " ", "\U0001f600", "e\u0301"])
@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
def test_text_on_the_event_loop_costs_little(library: str, unit: str) -> None:
    encoder = ENCODERS["qwen2"] if library == "fastokens" else module.LibraryEncoder(RUST["qwen2"])
    text = (unit * encoder.loop_characters)[: encoder.loop_characters]
    costs = []
    for _ in range(5):
        begin = thread_time()
        encoder.encode(text, add_special_tokens=False)
        costs.append(thread_time() - begin)
    assert min(costs) < 3 * 0.005
    assert loop_time.LIBRARY_CHARACTERS < loop_time.TOKENIZED_CHARACTERS


UNKNOWN_PRE_TOKENS = {
    "other pattern": lambda: tokenizer(r"\p{L}+|\P{L}+"),
    "space before": changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "removed separators": changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2), "removed"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "no pre-tokenizer": changed(pre_tokenizer=None),
    "small letters": changed(normalizer=normalizers.Lowercase()),
    "greedy token": with_tokens(AddedToken("<sep>", lstrip=True, normalized=False)),
    "two passes": with_tokens(AddedToken("<sep>", normalized=True)),
    "dropout": with_dropout,
}


@pytest.mark.parametrize("name", UNKNOWN_PRE_TOKENS)
def test_texts_of_other_tokenizers_are_not_cut(name: str) -> None:
    assert not has_known_pre_tokens(json.loads(UNKNOWN_PRE_TOKENS[name]().to_str()))


def test_texts_of_known_tokenizers_are_cut() -> None:
    assert all(has_known_pre_tokens(json.loads(rust.to_str())) for rust in RUST.values())
    composed = changed(normalizer=normalizers.NFC())()
    assert has_known_pre_tokens(json.loads(composed.to_str()))
    composed.add_tokens([AddedToken("\u00e9", normalized=True)])
    assert not has_known_pre_tokens(json.loads(composed.to_str()))
