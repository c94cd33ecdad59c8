"""Encodes text to token ids: with `fastokens`, or with `tokenizers` where the former is not proven equal.

`fastokens` is 4 to 12 times as fast for new words, and 60 times for words that it has seen. It does not
support every tokenizer, so both encode the texts of `encoder_check` when a model is loaded, and `tokenizers`
is used unless all ids are equal. Its caches take up to about 100 MB in each thread that encodes.
"""

import os
from array import array
from typing import Protocol

from tokenizers import Tokenizer as RustTokenizer

from baton.core.kv.block_hash import TokenIds
from baton.gateway.text.encoder_check import check_texts
from baton.runtime.logging import get_logger
from baton.runtime.process import loop_time

try:
    from fastokens import Tokenizer as FastTokenizer
except ImportError:  # no wheel for this platform
    FastTokenizer = None

log = get_logger(__name__)


class TextEncoder(Protocol):
    """Converts text to token ids. May be used by several threads."""

    library: str
    """Name of the library that encodes."""
    loop_characters: int
    """Characters of a text that may be encoded on the event loop."""
    num_threads: int
    """Number of threads that should encode longer texts."""

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Return the token ids of a text."""
        ...


class LibraryEncoder(TextEncoder):
    """Encoder that uses `tokenizers`, which defines the ids of a text."""

    library = "tokenizers"
    loop_characters = loop_time.LIBRARY_CHARACTERS
    num_threads = 2

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        # encode() holds the GIL all the time; encode_batch_fast() releases it.
        return array("I", self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


class FastEncoder(TextEncoder):
    """Encoder that uses `fastokens`, which releases the GIL while it encodes."""

    library = "fastokens"
    loop_characters = loop_time.TOKENIZED_CHARACTERS
    num_threads = 1

    def __init__(self, rust: RustTokenizer, serialized: str) -> None:
        """Create an encoder of the tokenizer `rust`, which is also given as JSON.

        Raises ValueError or NotImplementedError if the library does not support it.
        """
        # By default the library encodes a long text with many threads, which wait actively for more.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        self._fast = FastTokenizer.from_json_str(serialized)
        self._library = LibraryEncoder(rust)

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        try:
            ids_of_all, _ = self._fast.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        except ValueError:  # its engine for regular expressions has limits
            return self._library.encode(text, add_special_tokens=add_special_tokens)
        ids = array("I")
        ids.frombytes(ids_of_all)
        return ids


def text_encoder(rust: RustTokenizer, serialized: str) -> TextEncoder:
    """Return the fastest encoder that gives the ids of the tokenizer `rust`, which is also given as JSON.

    Takes up to about a second.
    """
    encoder, reason = _checked(rust, serialized)
    log.info("text_encoder_chosen", library=encoder.library, reason=reason)
    return encoder


def _checked(rust: RustTokenizer, serialized: str) -> tuple[TextEncoder, str]:
    """Return the encoder, and the reason for the choice."""
    library = LibraryEncoder(rust)
    if FastTokenizer is None:
        return library, "fastokens is not installed"
    try:
        fast = FastEncoder(rust, serialized)
    except (ValueError, NotImplementedError) as error:
        return library, f"fastokens does not support this tokenizer: {str(error)[:200]}"
    for text in check_texts(token.content for token in rust.get_added_tokens_decoder().values()):
        for special in (False, True):
            if fast.encode(text, add_special_tokens=special) != library.encode(text, add_special_tokens=special):
                return library, f"fastokens encodes {ascii(text)[:200]} differently"
    return fast, "fastokens encodes all texts of the check like tokenizers"
