"""Makes a `tokenizers` tokenizer and its configuration from the metadata of a GGUF file.

transformers converts vocabulary and merges. This module adds what llama.cpp knows of a pre-tokenizer by its
name: how it splits, whether whole words take precedence over merges, and whether texts begin with BOS.
"""

import json
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_metadata import GgufMetadata
from baton.model.loading.gguf.gguf_tokens import CONTROL, UNUSED, USER_DEFINED, token_types

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""Kinds of vocabularies, in `tokenizer.ggml.model`."""
GPT2_SPLITS = frozenset({"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "phi-2"})
"""Pre-tokenizers that split as GPT-2's."""
DIGIT_SPLITS = frozenset({"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"})
"""Pre-tokenizers that split each digit off, then as GPT-2's."""
WHOLE_WORDS = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split())
"""Pre-tokenizers whose words become one token if the vocabulary has them. Texts begin with BOS by default."""
_PREPEND_SPACE = {"type": "Prepend", "prepend": "▁"}
_REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """Return the tokenizer. Raises ModelError if the file has none that is supported."""
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise ModelError(
            f"{metadata.path} has a tokenizer of type {kind!r}; must be {BYTE_LEVEL} or {SENTENCEPIECE}. "
            "Give the model's Hugging Face checkpoint instead"
        )
    pre = metadata.optional_text("tokenizer.ggml.pre") or ""
    known = GPT2_SPLITS | DIGIT_SPLITS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if kind == BYTE_LEVEL and pre not in known:
        raise ModelError(
            f"{metadata.path} has a tokenizer that splits text as {pre!r} (tokenizer.ggml.pre), which is not known. "
            "Give the model's Hugging Face checkpoint instead"
        )
    try:
        tokenizer, _ = convert_gguf_tokenizer(metadata.architecture, _content(metadata))
        tokenizer = _with_own_added_tokens(tokenizer, metadata, kind)
    except Exception as error:  # a damaged vocabulary makes the libraries raise many kinds, some plain Exceptions
        raise ModelError(f"{metadata.path}: its tokenizer cannot be converted: {error}") from error
    if kind == BYTE_LEVEL:
        _split_as(tokenizer, pre)
        tokenizer.model.ignore_merges = pre in WHOLE_WORDS
    else:
        tokenizer = _with_spaces(tokenizer, begins=metadata.flag("tokenizer.ggml.add_space_prefix", True))
    _add_special_tokens_around(tokenizer, metadata, pre)
    return tokenizer


def tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special tokens, and named chat templates."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL.items():
        token_id = metadata.token_id(key)
        if token_id is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    pre = metadata.optional_text("tokenizer.ggml.pre") or ""
    return config | {
        "add_bos_token": _begins_with_bos(metadata, pre),
        "add_eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
        "model_max_length": metadata.optional_integer("context_length"),
    }


def chat_templates(metadata: GgufMetadata) -> dict[str, str]:
    """Return the chat templates of the file by name; the main one is `default`."""
    found = {}
    if (main := metadata.optional_text("tokenizer.chat_template")) is not None:
        found["default"] = main
    for name in metadata.optional_texts("tokenizer.chat_templates"):
        if name.isidentifier() and (text := metadata.optional_text(f"tokenizer.chat_template.{name}")) is not None:
            found[name] = text
    return found


def _content(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the part of the metadata that transformers converts, under its names."""
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    stored = {name: metadata.any(f"tokenizer.{key}") for key, name in names.items() if metadata.has(f"tokenizer.{key}")}
    return stored | {names["ggml.token_type"]: token_types(metadata)}


def _with_own_added_tokens(tokenizer: Tokenizer, metadata: GgufMetadata, kind: str) -> Tokenizer:
    """Return the tokenizer with the added tokens of the file only, and all of them.

    transformers adds defaults of its classes, such as `<|endoftext|>`, with ids beyond the model's if the
    vocabulary lacks them. It leaves out tokens of characters that no byte stands for, such as `<｜User｜>`.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    description = json.loads(tokenizer.to_str())
    added = [token for token in description["added_tokens"] if token["id"] < len(tokens)]
    if kind == BYTE_LEVEL:
        added = _take_added_tokens(description["model"], tokens, metadata)
    return Tokenizer.from_str(json.dumps(description | {"added_tokens": added}))


def _take_added_tokens(model: dict[str, Any], tokens: list[str], metadata: GgufMetadata) -> list[dict[str, Any]]:
    """Return the added tokens of a byte-level file, and give each its own text in the model's vocabulary.

    In the vocabulary transformers spells their bytes. A spelling that merges produce stays, and is no added
    token. Spellings of ordinary tokens are given back to them. Unused tokens are left out, as in the original
    tokenizer: models of one family have different numbers of them.
    """
    byte_names = bytes_to_unicode()
    alphabet, vocabulary = set(byte_names.values()), model["vocab"]
    in_merges = {part for pair in model["merges"] for part in (*pair, "".join(pair))}
    kinds = token_types(metadata)
    numbers = [number for number, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED) and tokens[number]]
    ordinary = set(range(len(tokens))).difference(numbers)
    vocabulary |= {tokens[number]: number for number in ordinary if alphabet.issuperset(tokens[number])}
    for text in (tokens[number] for number, kind in enumerate(kinds) if kind == UNUSED):
        if text not in in_merges:
            vocabulary.pop(text, None)
    added: list[dict[str, Any]] = []
    for number in numbers:
        text = tokens[number]
        spelled = text if alphabet.issuperset(text) else "".join(byte_names[byte] for byte in text.encode())
        if spelled != text and vocabulary.get(spelled) == number:
            if spelled in in_merges:
                continue
            del vocabulary[spelled]
        vocabulary[text] = number
        rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": number, "content": text, "special": kinds[number] == CONTROL, **rules})
    return added


def _split_as(tokenizer: Tokenizer, pre: str) -> None:
    if pre not in GPT2_SPLITS | DIGIT_SPLITS:
        return  # transformers has set it
    splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre in DIGIT_SPLITS:
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)


def _with_spaces(tokenizer: Tokenizer, *, begins: bool) -> Tokenizer:
    """Return a sentencepiece tokenizer whose texts begin with a space or not, as the file says.

    A text here is what lies between two added tokens, as in llama.cpp and in the original tokenizers of Llama
    2 and Mistral. transformers' pre-tokenizer (Metaspace) gives a space to the first text of an input only. A
    normalizer runs on each, so it takes the place of the pre-tokenizer. The decoder removes the first space.
    """
    description = json.loads(tokenizer.to_str())
    if (before := description["pre_tokenizer"]) and before["type"] == "Metaspace":
        description["pre_tokenizer"] = None
        description["normalizer"] = {"type": "Sequence", "normalizers": [_PREPEND_SPACE, _REPLACE_SPACES]}
    if not begins:
        for part, steps, removed in (("normalizer", "normalizers", "Prepend"), ("decoder", "decoders", "Strip")):
            if (content := description[part]) and steps in content:
                content[steps] = [step for step in content[steps] if step["type"] != removed]
    return Tokenizer.from_str(json.dumps(description))


def _begins_with_bos(metadata: GgufMetadata, pre: str) -> bool:
    is_default = metadata.text("tokenizer.ggml.model") == SENTENCEPIECE or pre in WHOLE_WORDS
    return metadata.flag("tokenizer.ggml.add_bos_token", is_default)


def _add_special_tokens_around(tokenizer: Tokenizer, metadata: GgufMetadata, pre: str) -> None:
    """Let texts begin with BOS and end with EOS as the file says."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    bos = metadata.token_id("bos") if _begins_with_bos(metadata, pre) else None
    eos = metadata.token_id("eos") if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    around = {}
    for name, token_id in (("bos", bos), ("eos", eos)):
        if token_id is not None and token_id >= len(tokens):
            raise metadata.problem(f"tokenizer.ggml.{name}_token_id", token_id, f"below {len(tokens)}")
        if token_id is not None:
            around[name] = (tokens[token_id], token_id)
    parts = [*([around["bos"][0]] if "bos" in around else []), "$A", *([around["eos"][0]] if "eos" in around else [])]
    tokenizer.post_processor = (
        processors.TemplateProcessing(
            single=parts, pair=[*parts, *parts[:-1], "$B"], special_tokens=list(around.values())
        )
        if around
        else processors.ByteLevel(trim_offsets=False)
    )
