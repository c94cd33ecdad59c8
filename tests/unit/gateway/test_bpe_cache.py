"""The BPE cache returns the same ids as the library, or lets the library encode the text."""

import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from baton.gateway.text import bpe_cache
from baton.gateway.text.bpe_cache import GPT2, LLAMA3, QWEN2, CachedBpeEncoder
from baton.model.loading.model_source import DEMO_DIR
from tests.scale import sized

DEMO = (DEMO_DIR / "tokenizer.json").read_text()
PATTERNS = {"gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2}
SNIPPETS = [
    "'s",
    "'RE",
    "'ll",
    "don't",
    " the",
    " return",
    "__init__",
    "12",
    "345",
    "6789",
    "\r\n",
    "\t",
    "  ",
    "--",
    "<|im_start|>",
]
SNIPPETS += ["<|im_end|>", "<|im_start|>!", "<|", "two words", " two", "words ", " ", " ", "\n"]
OTHERS = [
    "na\u00efve",
    " \u043c\u0438\u0440,",
    "\u4e2d\u6587",
    "e\u0301",
    " \u0301",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x85",
    "it\u2019s ",
    "'\u017f",
    "\u0663",
]
ASCII_TEXTS = st.lists(
    st.sampled_from(SNIPPETS) | st.text(st.characters(max_codepoint=127), max_size=4), max_size=12
).map("".join)
TEXTS = st.lists(st.sampled_from([*SNIPPETS, *OTHERS]) | st.text(max_size=4), max_size=12).map("".join)


def tokenizer(pattern: str = QWEN2, **changes: Any) -> Tokenizer:
    """The demo model's tokenizer with another split pattern.

    Some added tokens are a prefix of others or contain them, and every text gets special tokens around it.
    """
    result = Tokenizer.from_str(json.dumps(json.loads(DEMO) | changes))
    if pattern == GPT2:
        result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        result.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    result.add_special_tokens(["<|im_start|>!", "two words"])
    around = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    result.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=around)
    return result


def description_of(rust: Tokenizer) -> Mapping[str, Any]:
    description: Mapping[str, Any] = json.loads(rust.to_str())
    return description


def encoder_of(rust: Tokenizer, **limits: int) -> CachedBpeEncoder:
    encoder = CachedBpeEncoder.of(rust, description_of(rust), **limits)
    assert encoder is not None
    return encoder


RUST = {name: tokenizer(pattern) for name, pattern in PATTERNS.items()}
ENCODERS = {name: encoder_of(rust) for name, rust in RUST.items()}


@pytest.mark.parametrize("name", PATTERNS)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_ids_equal_those_of_the_library(name: str, text: str, add_special_tokens: bool) -> None:
    ids = ENCODERS[name].encode(text, add_special_tokens=add_special_tokens)
    assert ids is not None
    assert ids.tolist() == RUST[name].encode(text, add_special_tokens=add_special_tokens).ids


def split_by_the_library(rust: Tokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in rust.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PATTERNS)
@given(text=ASCII_TEXTS)
def test_ascii_text_is_split_where_the_library_splits_it(name: str, text: str) -> None:
    assert ENCODERS[name]._split(text) == split_by_the_library(RUST[name], text)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pair_of_ascii_characters_is_split_where_the_library_splits_it(name: str) -> None:
    for pair in product(map(chr, range(128)), repeat=2):
        text = "a{}{}b".format(*pair)
        assert ENCODERS[name]._split(text) == split_by_the_library(RUST[name], text)


@pytest.mark.parametrize("name", PATTERNS)
def test_word_ends_before_a_space_after_every_character(name: str) -> None:
    """`WORD` relies on this property of all characters that are not space themselves."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and not chr(code).isspace()][
        :: sized(16, 1)
    ]
    begins = {
        begin for _, (begin, _) in RUST[name].pre_tokenizer.pre_tokenize_str("".join(f"{c} a\n" for c in characters))
    }
    assert [c for index, c in enumerate(characters) if 4 * index + 1 not in begins] == []


def test_nfc_normalizer_composes_characters_within_a_word() -> None:
    rust = tokenizer()
    rust.normalizer = normalizers.NFC()
    text = "cafe\u0301 e\u0301e\u0301 \u0301e caf\u00e9"
    assert list(encoder_of(rust).encode(text) or ()) == rust.encode(text).ids


def test_text_with_many_uncached_pre_tokens_is_encoded_by_the_library() -> None:
    rust = tokenizer()
    encoder = encoder_of(rust, max_new_characters=50)
    text = "one two three four five six seven eight nine ten"
    assert [encoder.encode(text) is None for _ in range(4)] == [True, True, False, False]
    assert list(encoder.encode(text) or ()) == rust.encode(text).ids


@pytest.mark.parametrize("character", ["x", "\u4e2d"])
def test_long_uncached_pre_token_is_encoded_by_the_library(character: str) -> None:
    encoder = encoder_of(tokenizer())
    assert encoder.encode(character * bpe_cache.MAX_NEW_CHARACTERS) is None
    assert encoder.encode(character * 100) is not None


def test_cache_size_is_bounded_and_added_tokens_stay_cached() -> None:
    rust = tokenizer()
    encoder = encoder_of(rust, max_pre_tokens=16)
    for number in range(100):
        text = f"<|im_start|>word{chr(97 + number % 26)} {'x' * (number % 80)}{number} two words<|im_end|>"
        assert list(encoder.encode(text) or ()) == rust.encode(text).ids
        assert len(encoder._cache) <= 16


def test_long_pre_tokens_are_encoded_but_not_cached() -> None:
    rust = tokenizer()
    encoder = encoder_of(rust)
    num_cached = len(encoder._cache)
    text = "x" * (bpe_cache.MAX_PRE_TOKEN_CHARACTERS + 1)
    assert list(encoder.encode(text) or ()) == rust.encode(text).ids
    assert len(encoder._cache) == num_cached


def demo() -> Tokenizer:
    return Tokenizer.from_str(DEMO)


def with_other_pattern() -> Tokenizer:
    return tokenizer(r"\p{L}+|\P{L}+")


def with_space_before() -> Tokenizer:
    result = demo()
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return result


def with_removed_separators() -> Tokenizer:
    result = demo()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "removed"), byte_level])
    return result


def without_pre_tokenizer() -> Tokenizer:
    result = demo()
    result.pre_tokenizer = None
    return result


def with_small_letters() -> Tokenizer:
    result = demo()
    result.normalizer = normalizers.Lowercase()
    return result


def with_greedy_token() -> Tokenizer:
    result = demo()
    result.add_tokens([AddedToken("<sep>", lstrip=True, normalized=False)])
    return result


def with_two_passes() -> Tokenizer:
    result = demo()
    result.add_tokens([AddedToken("<sep>", normalized=True)])
    return result


def with_normalized_token() -> Tokenizer:
    result = Tokenizer.from_str(json.dumps(json.loads(DEMO) | {"added_tokens": []}))
    result.normalizer = normalizers.NFC()
    result.add_tokens([AddedToken("\u00e9", normalized=True)])
    return result


def with_dropout() -> Tokenizer:
    description = json.loads(DEMO)
    description["model"]["dropout"] = 0.1
    return Tokenizer.from_str(json.dumps(description))


UNSUPPORTED = (
    with_other_pattern,
    with_space_before,
    with_removed_separators,
    without_pre_tokenizer,
    with_small_letters,
    with_greedy_token,
    with_two_passes,
    with_normalized_token,
    with_dropout,
)


@pytest.mark.parametrize("make", UNSUPPORTED)
def test_unsupported_tokenizers_use_the_library(make: Callable[[], Tokenizer]) -> None:
    rust = make()
    assert CachedBpeEncoder.of(rust, description_of(rust)) is None


def test_demo_tokenizer_is_supported() -> None:
    assert CachedBpeEncoder.of(demo(), description_of(demo())) is not None
