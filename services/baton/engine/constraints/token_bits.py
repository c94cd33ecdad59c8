"""Sets of token ids as packed bits: bit `i % 32` of word `i // 32` stands for id `i`, as in llguidance."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]
"""[num_words], or [rows, num_words] for several sets."""


def num_words(vocab_size: int) -> int:
    """Return the number of words of a set of ids below `vocab_size`."""
    return -(-vocab_size // 32)


def bits_of(token_ids: Collection[int], vocab_size: int) -> Bits:
    """Return the set of `token_ids`, all below `vocab_size`."""
    flags = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    flags[np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def flags_of(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return bool [vocab_size], or [rows, vocab_size]: True for the ids that are in the set."""
    flags = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little", count=vocab_size)
    return flags.view(np.bool_)


def ids_of(bits: Bits) -> npt.NDArray[np.intp]:
    """Return the ids in one set, ascending. Fast for few ids in a large vocabulary, too."""
    words = np.flatnonzero(bits)
    if len(words) * 8 > len(bits):
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_))
    flags = np.unpackbits(bits[words].view(np.uint8), bitorder="little").view(np.bool_)
    places = np.flatnonzero(flags)
    found: npt.NDArray[np.intp] = words[places >> 5] * 32 + (places & 31)
    return found


def has(bits: Bits, token_id: int) -> bool:
    """Return True if an id is in one set; False for one that does not exist."""
    word = token_id >> 5
    return word < len(bits) and bool(bits[word] >> np.uint32(token_id & 31) & 1)


def clear(bits: Bits, token_ids: Collection[int]) -> None:
    """Remove ids from one set."""
    for token_id in token_ids:
        bits[token_id >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token_id & 31)))
