"""Recognizes tokenizers that encode each pre-token of a text separately.

A byte-level BPE tokenizer splits text into pre-tokens with a regular expression. For the expressions below it
is known where a pre-token always ends, so a long text can be encoded in pieces.
"""

from collections.abc import Mapping
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Description = Mapping[str, Any]
"""Content of a `tokenizer.json`."""


def has_known_pre_tokens(description: Description) -> bool:
    """True if the tokenizer splits text with one of the expressions above, and encodes each part separately.

    No normalizer may change word boundaries, BPE must be deterministic, and all added tokens must be found in
    one pass without consuming the space around them.
    """
    normalizer, model, added = description["normalizer"], description["model"], description["added_tokens"]
    return (
        _pattern_of(description) in (GPT2, LLAMA3, QWEN2)
        and (normalizer is None or (normalizer["type"] == "NFC" and not any(token["normalized"] for token in added)))
        and (model["type"] == "BPE" and model["dropout"] is None)
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        and len({token["normalized"] for token in added}) < 2
    )


def byte_level_alphabet() -> dict[int, str]:
    """Return byte → character of a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _pattern_of(description: Description) -> str:
    """Return the expression with which a byte-level tokenizer splits text; empty for other tokenizers."""
    match description["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return ""
