"""Token ids of a text from its pieces, most of which were seen before.

A byte-level BPE tokenizer cuts text with a regular expression and encodes each piece by itself, so a piece
has the same ids wherever it stands. Cutting with `re` and remembering the pieces takes a sixth of the time
that `tokenizers` takes for the text. It is the same only where both understand the expression alike: that of
a known tokenizer, on ASCII, where no version of Unicode differs from another in what a letter is. Words that
are not ASCII are remembered, too, but cut and encoded by the library.
"""

import re
from array import array
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from baton.core.kv.block_hash import TokenIds

MAX_PIECES = 32 * 1024
MAX_PIECE_CHARACTERS = 32
"""Longer pieces are not remembered. All that are take 4 MB as a rule, and never more than 25."""
MAX_NEW_CHARACTERS = 2048
"""Of new pieces in one text, which are encoded one by one in about a millisecond. The library is faster for a
text that has more."""
NEW_PIECE_CHARACTERS = 8
"""A new piece counts as so many more than it has: what encoding it by itself costs."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

IN_ASCII: Mapping[str, str] = {
    GPT2: r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    LLAMA3: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    QWEN2: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The expressions of known tokenizers, and what they are on ASCII, for `re`."""

WORD = re.compile(r"\s*+\S++(?:[^\S ]\s*+\S++)*+(?:[^\S ]\s*+)?|\s++")
"""From one space after a word to the next one. In all these expressions a piece that has begun a word ends
before a space, and the next one does not look back; so what stands between has the same pieces by itself."""

Description = Mapping[str, Any]
"""A `tokenizer.json`."""


class CachedBpeEncoder:
    """For one thread. `of` makes it."""

    def __init__(self, rust: RustTokenizer, pattern: str) -> None:
        """`pattern`: how `rust` cuts ASCII, for `re`."""
        added = {token.content: id_ for id_, token in rust.get_added_tokens_decoder().items()}
        self._pieces = _KnownPieces(rust, {content: _bytes_of([id_]) for content, id_ in added.items()})
        self._cut_ascii = re.compile(pattern, re.ASCII).findall
        self._added = (
            re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})") if added else None
        )
        self._added_begin = {content[0] for content in added}
        self._special = _special_tokens_around(rust)

    @staticmethod
    def of(rust: RustTokenizer, description: Description) -> "CachedBpeEncoder | None":
        """None for a tokenizer of a kind that is not known here."""
        pattern = IN_ASCII.get(_pattern_of(description))
        return CachedBpeEncoder(rust, pattern) if pattern is not None and _is_plain(description) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "TokenIds | None":
        """None for a text that is better left to the library: too much of it is new."""
        pieces = self._pieces_of(text)
        self._pieces.allowed_characters = MAX_NEW_CHARACTERS
        try:
            ids = b"".join(map(self._pieces.__getitem__, pieces))
        except _TooMuchIsNew:
            return None
        before, after = self._special if add_special_tokens else (b"", b"")
        made = array("I")
        made.frombytes(b"".join((before, ids, after)))
        return made

    def _pieces_of(self, text: str) -> list[str]:
        """Added tokens are found first, wherever they stand, and then what lies between them is cut."""
        if self._added is None or not any(begin in text for begin in self._added_begin):
            return self._cut(text)
        pieces: list[str] = []
        for index, part in enumerate(self._added.split(text)):
            pieces += (part,) if index % 2 else self._cut(part)
        return pieces

    def _cut(self, text: str) -> list[str]:
        if text.isascii():
            return self._cut_ascii(text)
        pieces: list[str] = []
        for is_ascii, group in groupby(WORD.findall(text), str.isascii):
            words = list(group)
            pieces += self._cut_ascii("".join(words)) if is_ascii else words
        return pieces


class _TooMuchIsNew(Exception):
    """The text has more that was not seen before than is worth encoding piece by piece."""


class _KnownPieces(dict[str, bytes]):
    """Piece → its ids as bytes; learns what it is asked for. It forgets everything when it is full, and knows
    the usual again soon."""

    def __init__(self, rust: RustTokenizer, added: Mapping[str, bytes]) -> None:
        super().__init__(added)
        self._added = added
        self._rust = rust
        self._model = rust.model
        self._alphabet = byte_level_alphabet()
        self.allowed_characters = 0
        """What may still be new; then `_TooMuchIsNew`."""

    def __missing__(self, piece: str) -> bytes:
        self.allowed_characters -= NEW_PIECE_CHARACTERS + len(piece)
        if self.allowed_characters < 0:
            raise _TooMuchIsNew
        ids = self._encoded(piece)
        if len(piece) <= MAX_PIECE_CHARACTERS:
            if len(self) >= MAX_PIECES:
                self.clear()
                self.update(self._added)
            self[piece] = ids
        return ids

    def _encoded(self, piece: str) -> bytes:
        if piece.isascii():
            return _bytes_of([token.id for token in self._model.tokenize(piece.translate(self._alphabet))])
        return _bytes_of(self._rust.encode_batch_fast([piece], add_special_tokens=False)[0].ids)


def byte_level_alphabet() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _bytes_of(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def _pattern_of(description: Description) -> str:
    """The expression that a byte-level tokenizer cuts text with; empty for any other."""
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
    """Nothing moves what `WORD` goes by, a piece's ids are always the same, and added tokens are found in one
    round, by themselves."""
    normalizer, model, added = description["normalizer"], description["model"], description["added_tokens"]
    return (
        (normalizer is None or (normalizer["type"] == "NFC" and not any(token["normalized"] for token in added)))
        and (model["type"] == "BPE" and model["dropout"] is None)
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        and len({token["normalized"] for token in added}) < 2
    )


def _special_tokens_around(rust: RustTokenizer) -> tuple[bytes, bytes]:
    """What the tokenizer puts before and after every text."""
    plain, whole = (rust.encode("a", add_special_tokens=wanted).ids for wanted in (False, True))
    begin = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return _bytes_of(whole[:begin]), _bytes_of(whole[begin + len(plain) :])
