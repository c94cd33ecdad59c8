"""Encodes text with a cache of pre-tokens, for byte-level BPE tokenizers.

A byte-level BPE tokenizer splits text into pre-tokens with a regular expression and encodes each one
separately, so a pre-token always has the same ids. Splitting with `re` and caching the ids takes a sixth of
the time that `tokenizers` needs. The result is equal only if `re` and the library interpret the expression in
the same way. Therefore `re` is used only for the expressions of known tokenizers and only on ASCII, where
Unicode versions do not differ. Words that are not ASCII are cached too, but split and encoded by the library.
"""

import re
from array import array
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from baton.core.kv.block_hash import TokenIds

MAX_PRE_TOKENS = 32 * 1024
"""Size of the cache. A full cache takes about 4 MB, and at most 25 MB."""
MAX_PRE_TOKEN_CHARACTERS = 32
"""Longer pre-tokens are not cached."""
MAX_NEW_CHARACTERS = 2048
"""Maximum number of uncached characters in one text. Encoding them takes about a millisecond. The library is
faster for texts with more."""
NEW_PRE_TOKEN_COST = 8
"""Characters added to the length of an uncached pre-token, for the fixed cost of encoding it."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

ASCII_PATTERNS: Mapping[str, str] = {
    GPT2: r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    LLAMA3: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    QWEN2: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Expressions of known tokenizers → equivalent expressions on ASCII, for `re`."""

WORD = re.compile(r"\s*+\S++(?:[^\S ]\s*+\S++)*+(?:[^\S ]\s*+)?|\s++")
"""Matches text from the space after one word up to the space after the next one.

In all of the expressions above, a pre-token that contains a word ends before a space, and the next one does
not look back. Each match therefore has the same pre-tokens when it is split alone.
"""

Description = Mapping[str, Any]
"""Content of a `tokenizer.json`."""


class CachedBpeEncoder:
    """Encoder with a cache of pre-tokens. Create it with `of`. Not safe for concurrent use by threads."""

    def __init__(
        self,
        rust: RustTokenizer,
        pattern: str,
        *,
        max_pre_tokens: int = MAX_PRE_TOKENS,
        max_new_characters: int = MAX_NEW_CHARACTERS,
    ) -> None:
        """Create an encoder. `pattern` is the expression for `re` that splits ASCII as `rust` does."""
        added = {token.content: id_ for id_, token in rust.get_added_tokens_decoder().items()}
        self._max_new_characters = max_new_characters
        self._cache = _PreTokenCache(
            rust, {content: _bytes_of([id_]) for content, id_ in added.items()}, max_pre_tokens
        )
        self._split_ascii = re.compile(pattern, re.ASCII).findall
        self._added = (
            re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})") if added else None
        )
        self._added_begin = {content[0] for content in added}
        self.special_tokens = _special_tokens_around(rust)
        """Ids that the tokenizer adds before and after every text, as the bytes of an array."""

    @staticmethod
    def of(
        rust: RustTokenizer,
        description: Description,
        *,
        max_pre_tokens: int = MAX_PRE_TOKENS,
        max_new_characters: int = MAX_NEW_CHARACTERS,
    ) -> "CachedBpeEncoder | None":
        """Create an encoder for a tokenizer; None if its kind is not supported.

        max_pre_tokens: size of the cache.
        max_new_characters: `encode` returns None for texts with more uncached characters.
        """
        pattern = ASCII_PATTERNS.get(_pattern_of(description))
        if pattern is None or not _is_plain(description):
            return None
        return CachedBpeEncoder(rust, pattern, max_pre_tokens=max_pre_tokens, max_new_characters=max_new_characters)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "TokenIds | None":
        """Return the token ids of a text; None if so much of it is uncached that the library is faster."""
        pre_tokens = self._pre_tokens(text)
        self._cache.allowed_characters = self._max_new_characters
        try:
            ids = b"".join(map(self._cache.__getitem__, pre_tokens))
        except _TooManyNewPreTokens:
            return None
        before, after = self.special_tokens if add_special_tokens else (b"", b"")
        result = array("I")
        result.frombytes(b"".join((before, ids, after)))
        return result

    def _pre_tokens(self, text: str) -> list[str]:
        """Split a text into added tokens, and the pre-tokens of the text between them."""
        if self._added is None or not any(begin in text for begin in self._added_begin):
            return self._split(text)
        pre_tokens: list[str] = []
        for index, part in enumerate(self._added.split(text)):
            pre_tokens += (part,) if index % 2 else self._split(part)
        return pre_tokens

    def _split(self, text: str) -> list[str]:
        """Split a text without added tokens: ASCII into pre-tokens, and other text into words for the
        library."""
        if text.isascii():
            return self._split_ascii(text)
        pre_tokens: list[str] = []
        for is_ascii, group in groupby(WORD.findall(text), str.isascii):
            words = list(group)
            pre_tokens += self._split_ascii("".join(words)) if is_ascii else words
        return pre_tokens


class _TooManyNewPreTokens(Exception):
    """The text has more uncached characters than allowed."""


class _PreTokenCache(dict[str, bytes]):
    """Pre-token → its ids as bytes. Encodes and adds missing entries, and starts empty again when it is
    full."""

    def __init__(self, rust: RustTokenizer, added: Mapping[str, bytes], max_pre_tokens: int) -> None:
        super().__init__(added)
        self._max_pre_tokens = max_pre_tokens
        self._added = added
        self._rust = rust
        self._model = rust.model
        self._alphabet = byte_level_alphabet()
        self.allowed_characters = 0
        """Number of uncached characters that may still be encoded; then `_TooManyNewPreTokens` is raised."""

    def __missing__(self, pre_token: str) -> bytes:
        self.allowed_characters -= NEW_PRE_TOKEN_COST + len(pre_token)
        if self.allowed_characters < 0:
            raise _TooManyNewPreTokens
        ids = self._encode(pre_token)
        if len(pre_token) <= MAX_PRE_TOKEN_CHARACTERS:
            if len(self) >= self._max_pre_tokens:
                self.clear()
                self.update(self._added)
            self[pre_token] = ids
        return ids

    def _encode(self, pre_token: str) -> bytes:
        if pre_token.isascii():
            return _bytes_of([token.id for token in self._model.tokenize(pre_token.translate(self._alphabet))])
        return _bytes_of(self._rust.encode_batch_fast([pre_token], add_special_tokens=False)[0].ids)


def byte_level_alphabet() -> dict[int, str]:
    """Return byte → character of a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _bytes_of(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


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


def _is_plain(description: Description) -> bool:
    """True if caching pre-tokens gives the same ids as the library.

    No normalizer may change word boundaries, BPE must be deterministic, and all added tokens must be found in
    one pass without consuming the space around them.
    """
    normalizer, model, added = description["normalizer"], description["model"], description["added_tokens"]
    return (
        (normalizer is None or (normalizer["type"] == "NFC" and not any(token["normalized"] for token in added)))
        and (model["type"] == "BPE" and model["dropout"] is None)
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        and len({token["normalized"] for token in added}) < 2
    )


def _special_tokens_around(rust: RustTokenizer) -> tuple[bytes, bytes]:
    """Return the ids of the special tokens that the tokenizer adds before and after every text."""
    plain, full = (rust.encode("a", add_special_tokens=wanted).ids for wanted in (False, True))
    begin = next(at for at in range(len(full)) if full[at : at + len(plain)] == plain)
    return _bytes_of(full[:begin]), _bytes_of(full[begin + len(plain) :])
