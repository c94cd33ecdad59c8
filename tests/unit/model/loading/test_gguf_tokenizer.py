"""Tests tokenizers of GGUF files that are made of a few tokens: added tokens, whole words, and BOS."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from baton.model.loading.gguf.gguf_metadata import GgufMetadata
from baton.model.loading.gguf.gguf_tokenizer import gguf_tokenizer
from baton.model.loading.gguf.gguf_tokens import end_token_ids, mistyped_tokens, token_types

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


def metadata_of(tokens: dict[str, int], **values: Any) -> GgufMetadata:
    metadata = {"model": "gpt2", "tokens": list(tokens), "token_type": list(tokens.values()), **values}
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return GgufMetadata(Path("m.gguf"), {"general.architecture": "llama", **named})


def tokenizer_of(tokens: dict[str, int], **values: Any) -> Tokenizer:
    return gguf_tokenizer(metadata_of(tokens, **values))


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


PIECES = "▁ a b h i [ ] I N S T / ▁a ▁b hi ▁hi ▁[ IN ST INST ▁▁".split(" ")


def sentencepiece(**values: Any) -> Tokenizer:
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | dict.fromkeys(PIECES, NORMAL)
    scores = [-float(number) for number in range(len(kinds))]
    return tokenizer_of(kinds, model="llama", scores=scores, bos_token_id=1, eos_token_id=2, **values)


@pytest.mark.parametrize(
    "text", ["<s>[INST] hi [/INST] a</s><s>[INST] b", "a  b", " a", "", "<s>a</s>", "<s> a </s>", "</s>b</s>b", "<s>  "]
)
def test_each_text_between_added_tokens_begins_with_a_space(text: str) -> None:
    """As in the original tokenizers of Llama 2 and Mistral, whose normalizer adds it."""
    found, right = sentencepiece(), sentencepiece()
    right.pre_tokenizer = None
    right.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    expected = right.encode(text, add_special_tokens=False)
    assert found.encode(text, add_special_tokens=False).ids == expected.ids
    for skips in (False, True):
        decoded = found.decode(expected.ids, skip_special_tokens=skips)
        assert decoded == right.decode(expected.ids, skip_special_tokens=skips)


def test_a_space_follows_each_added_token() -> None:
    """The tokens are those of llama.cpp."""
    text = "<s>[INST] hi [/INST] a</s><s>[INST] b"
    with_space, without = sentencepiece(), sentencepiece(add_space_prefix=False)
    encoded = with_space.encode(text, add_special_tokens=False)
    assert encoded.tokens == "<s> ▁[ INST ] ▁hi ▁[ / INST ] ▁a </s> <s> ▁[ INST ] ▁b".split()
    assert with_space.decode(encoded.ids) == "[INST] hi [/INST] a [INST] b"
    encoded = without.encode(text, add_special_tokens=False)
    assert encoded.tokens == "<s> [ INST ] ▁hi ▁[ / INST ] ▁a </s> <s> [ INST ] ▁b".split()
    assert without.decode(encoded.ids) == "[INST] hi [/INST] a[INST] b"


def test_known_texts_are_control_tokens_whatever_their_type() -> None:
    """Published files have wrong types, which llama.cpp overrides, too."""
    kinds = {"<pad>": CONTROL, "<eos>": CONTROL, "a": NORMAL, "<end_of_turn>": NORMAL, "<|im_end|>": USER_DEFINED}
    kinds |= {"<start_of_turn>": NORMAL, "<think>": NORMAL}
    metadata = metadata_of(kinds, eos_token_id=1, eot_token_id=0)
    assert token_types(metadata) == [CONTROL, CONTROL, NORMAL, CONTROL, CONTROL, CONTROL, NORMAL]
    assert mistyped_tokens(metadata) == ["<end_of_turn>", "<|im_end|>", "<start_of_turn>"]
    assert end_token_ids(metadata) == [1, 0, 3, 4]
    assert token_types(metadata_of({"a": NORMAL, "<|im_end|>": NORMAL}, token_type=[])) == [NORMAL, CONTROL]


def test_messages_of_harmony_do_not_end_a_response() -> None:
    """The end tokens are those of gpt-oss's generation_config.json. Other vocabularies end with `<|end|>`."""
    kinds = dict.fromkeys(("<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|call|>"), CONTROL)
    assert end_token_ids(metadata_of(kinds, eos_token_id=1)) == [1, 0, 4]
    del kinds["<|call|>"]
    assert end_token_ids(metadata_of(kinds, eos_token_id=1)) == [1, 0, 3]


def test_texts_of_gpt_oss_are_split_as_its_vocabulary_was_learned() -> None:
    """A word ends before a capital and keeps its ending; numbers have at most three digits."""
    pieces = tokenizer_of(TOKENS, pre="gpt-4o", merges=["a b"]).pre_tokenizer
    found = [piece for piece, _ in pieces.pre_tokenize_str("camelCase ISN'T 1234567, a/b\n\n  x")]
    assert found == "camel Case ĠISN'T Ġ 123 456 7 , Ġa /b ĊĊ Ġ Ġx".split(" ")


@pytest.mark.parametrize(("model", "end"), [("llama", "<end_of_turn>"), ("gpt2", "<|im_end|>")])
def test_known_texts_of_a_wrong_type_are_found_whole(model: str, end: str) -> None:
    kinds = {**dict.fromkeys(("a", "b", "ab", *end), NORMAL), end: NORMAL, "<unk>": UNKNOWN}
    scores = [-float(number) for number in range(len(kinds))]
    tokenizer = tokenizer_of(
        kinds, model=model, pre="gpt-2", scores=scores, merges=["a b"], add_space_prefix=False, add_bos_token=False
    )
    encoded = tokenizer.encode(f"ab{end}")
    assert encoded.tokens == ["ab", end]
    assert tokenizer.decode(encoded.ids) == "ab"
