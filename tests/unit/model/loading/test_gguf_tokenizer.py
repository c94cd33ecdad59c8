"""Tests tokenizers of GGUF files that are made of a few tokens: added tokens, whole words, and BOS."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.model.loading.gguf.gguf_metadata import GgufMetadata
from baton.model.loading.gguf.gguf_tokenizer import gguf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
TOKENS = {
    **dict.fromkeys(("a", "b", "c", "Ġ", "ab", "abc", "ĠĠ"), NORMAL),
    "<|end|>": CONTROL,
    "<｜User｜>": CONTROL,
    "<think>": USER_DEFINED,
    "  ": USER_DEFINED,
    "b ": USER_DEFINED,
    "[PAD12]": UNUSED,
}
IDS = {token: number for number, token in enumerate(TOKENS) if TOKENS[token] != UNUSED}


def tokenizer_of(tokens: dict[str, int], **values: Any) -> Tokenizer:
    metadata = {"model": "gpt2", "tokens": list(tokens), "token_type": list(tokens.values()), **values}
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return gguf_tokenizer(GgufMetadata(Path("m.gguf"), {"general.architecture": "llama", **named}))


def byte_level(pre: str) -> Tokenizer:
    merges = ["a b", "Ġ Ġ"]
    return tokenizer_of(TOKENS, pre=pre, merges=merges, bos_token_id=IDS["<|end|>"])


@pytest.mark.parametrize(
    ("pre", "expected"), [("qwen2", ["ab", "c"]), ("llama-bpe", ["<|end|>", "abc"]), ("gpt-2", ["ab", "c"])]
)
def test_whole_words_and_bos_are_those_of_the_pre_tokenizer(pre: str, expected: list[str]) -> None:
    """No merge makes `abc`; Llama 3 takes it whole, and begins with BOS."""
    assert byte_level(pre).encode("abc").tokens == expected


def test_added_tokens_are_found_whatever_their_characters() -> None:
    """As llama.cpp finds them. Those of DeepSeek's distilled models have characters that are no bytes."""
    tokenizer = byte_level("qwen2")
    found = tokenizer.encode("a<｜User｜>b<think>c  ab ").ids
    assert found == [IDS[token] for token in ("a", "<｜User｜>", "b", "<think>", "c", "  ", "a", "b ")]
    assert tokenizer.decode(found, skip_special_tokens=False) == "a<｜User｜>b<think>c  ab "
    assert tokenizer.decode(found, skip_special_tokens=True) == "ab<think>c  ab "
    assert tokenizer.get_vocab(with_added_tokens=True) == IDS, "each token has its own id, and there are no others"


def test_tokens_that_the_file_lacks_have_no_ids() -> None:
    """transformers' classes add some, with ids beyond those of the model."""
    kinds = {"<unk>": UNKNOWN, "▁": NORMAL, "a": NORMAL, "b": NORMAL, "ab": NORMAL, "▁ab": NORMAL}
    sentencepiece = tokenizer_of(kinds, model="llama", scores=[0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    for tokenizer, number in ((byte_level("qwen2"), len(IDS)), (sentencepiece, len(kinds))):
        for text in ("<|endoftext|>", "<s>ab</s>", "<unk>"):
            assert max(tokenizer.encode(text).ids, default=0) < number
        assert tokenizer.get_vocab_size(with_added_tokens=True) == number


def test_texts_of_added_tokens_that_merges_make_stay_so() -> None:
    """The tokenizer could not be loaded without a token that a merge produces."""
    tokens = {**dict.fromkeys(("a", "Ġ"), NORMAL), "  ": USER_DEFINED, "<|end|>": CONTROL}
    tokenizer = tokenizer_of(tokens, pre="gpt-2", merges=["Ġ Ġ"])
    assert tokenizer.encode("  ").ids == [2]
    assert Tokenizer.from_str(tokenizer.to_str()).encode("a<|end|>").ids == [0, 3]
