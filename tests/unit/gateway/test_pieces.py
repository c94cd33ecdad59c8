"""Text encoded by its pieces has the ids that the library gives it, or is left to the library."""

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
    """The demo's vocabulary, cut with `pattern`; some added tokens begin or hold others, and special tokens
    go around every text."""
    made = Tokenizer.from_str(json.dumps(json.loads(DEMO) | changes))
    if pattern == GPT2:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    made.add_special_tokens(["<|im_start|>!", "two words"])
    around = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=around)
    return made


def description_of(rust: Tokenizer) -> Mapping[str, Any]:
    description: Mapping[str, Any] = json.loads(rust.to_str())
    return description


def encoder_of(rust: Tokenizer) -> CachedBpeEncoder:
    made = CachedBpeEncoder.of(rust, description_of(rust))
    assert made is not None
    return made


RUST = {name: tokenizer(pattern) for name, pattern in PATTERNS.items()}
ENCODERS = {name: encoder_of(rust) for name, rust in RUST.items()}


@pytest.mark.parametrize("name", PATTERNS)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_the_ids_are_those_of_the_library(name: str, text: str, add_special_tokens: bool) -> None:
    ids = ENCODERS[name].encode(text, add_special_tokens=add_special_tokens)
    assert ids is not None
    assert ids.tolist() == RUST[name].encode(text, add_special_tokens=add_special_tokens).ids


def cut_by_the_library(rust: Tokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in rust.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PATTERNS)
@given(text=ASCII_TEXTS)
def test_text_is_cut_where_the_library_cuts_it(name: str, text: str) -> None:
    assert ENCODERS[name]._cut(text) == cut_by_the_library(RUST[name], text)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pair_of_characters_is_cut_where_the_library_cuts_it(name: str) -> None:
    for pair in product(map(chr, range(128)), repeat=2):
        text = "a{}{}b".format(*pair)
        assert ENCODERS[name]._cut(text) == cut_by_the_library(RUST[name], text)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_ends_a_word_before_a_space_if_it_is_none_itself(name: str) -> None:
    """What `WORD` relies on, of all characters."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and not chr(code).isspace()][
        :: sized(16, 1)
    ]
    begins = {
        begin for _, (begin, _) in RUST[name].pre_tokenizer.pre_tokenize_str("".join(f"{c} a\n" for c in characters))
    }
    assert [c for index, c in enumerate(characters) if 4 * index + 1 not in begins] == []


def test_a_normalizer_composes_what_stands_in_one_word() -> None:
    rust = tokenizer()
    rust.normalizer = normalizers.NFC()
    text = "cafe\u0301 e\u0301e\u0301 \u0301e caf\u00e9"
    assert list(encoder_of(rust).encode(text) or ()) == rust.encode(text).ids


def test_a_text_of_many_new_pieces_is_left_to_the_library_until_most_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_cache, "MAX_NEW_CHARACTERS", 50)
    rust = tokenizer()
    encoder = encoder_of(rust)
    text = "one two three four five six seven eight nine ten"
    assert [encoder.encode(text) is None for _ in range(4)] == [True, True, False, False]
    assert list(encoder.encode(text) or ()) == rust.encode(text).ids


@pytest.mark.parametrize("character", ["x", "\u4e2d"])
def test_a_long_piece_is_left_to_the_library(character: str) -> None:
    encoder = encoder_of(tokenizer())
    assert encoder.encode(character * bpe_cache.MAX_NEW_CHARACTERS) is None
    assert encoder.encode(character * 100) is not None


def test_memory_is_bounded_and_added_tokens_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_cache, "MAX_PIECES", 16)
    rust = tokenizer()
    encoder = encoder_of(rust)
    for number in range(100):
        text = f"<|im_start|>word{chr(97 + number % 26)} {'x' * (number % 80)}{number} two words<|im_end|>"
        assert list(encoder.encode(text) or ()) == rust.encode(text).ids
        assert len(encoder._pieces) <= 16


def test_long_pieces_are_encoded_but_not_remembered() -> None:
    rust = tokenizer()
    encoder = encoder_of(rust)
    num_known = len(encoder._pieces)
    text = "x" * (bpe_cache.MAX_PIECE_CHARACTERS + 1)
    assert list(encoder.encode(text) or ()) == rust.encode(text).ids
    assert len(encoder._pieces) == num_known


def demo() -> Tokenizer:
    return Tokenizer.from_str(DEMO)


def with_other_pattern() -> Tokenizer:
    return tokenizer(r"\p{L}+|\P{L}+")


def with_space_before() -> Tokenizer:
    made = demo()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def with_removed_pieces() -> Tokenizer:
    made = demo()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "removed"), byte_level])
    return made


def without_cuts() -> Tokenizer:
    made = demo()
    made.pre_tokenizer = None
    return made


def with_small_letters() -> Tokenizer:
    made = demo()
    made.normalizer = normalizers.Lowercase()
    return made


def with_greedy_token() -> Tokenizer:
    made = demo()
    made.add_tokens([AddedToken("<sep>", lstrip=True, normalized=False)])
    return made


def with_two_rounds() -> Tokenizer:
    made = demo()
    made.add_tokens([AddedToken("<sep>", normalized=True)])
    return made


def with_normalized_token() -> Tokenizer:
    made = Tokenizer.from_str(json.dumps(json.loads(DEMO) | {"added_tokens": []}))
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken("\u00e9", normalized=True)])
    return made


def with_dropout() -> Tokenizer:
    description = json.loads(DEMO)
    description["model"]["dropout"] = 0.1
    return Tokenizer.from_str(json.dumps(description))


UNKNOWN = (
    with_other_pattern,
    with_space_before,
    with_removed_pieces,
    without_cuts,
    with_small_letters,
    with_greedy_token,
    with_two_rounds,
    with_normalized_token,
    with_dropout,
)


@pytest.mark.parametrize("make", UNKNOWN)
def test_other_kinds_of_tokenizers_are_left_to_the_library(make: Callable[[], Tokenizer]) -> None:
    rust = make()
    assert CachedBpeEncoder.of(rust, description_of(rust)) is None


def test_the_demo_is_of_a_known_kind() -> None:
    assert CachedBpeEncoder.of(demo(), description_of(demo())) is not None
