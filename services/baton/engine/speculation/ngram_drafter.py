"""Drafts from the prompt and the response itself: what followed the last tokens when they occurred before.

Source: prompt lookup decoding (Saxena, 2023). There the prompt is searched at each step; here an index of all
n-grams makes the search independent of the length.
"""

from array import array

import numpy as np

from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS, Draft
from baton.engine.speculation.token_hash import hash_of, hashes_of

NGRAM_TOKENS = 3
"""Length of the n-grams. Shorter ones occur by chance, longer ones find little in short texts."""
MAX_INDEX_SLOTS = 1 << 17
"""Slots of the largest index, of 4 bytes each."""
MAX_INDEXED_TOKENS = (1 << 32) - 1
"""Positions that a slot can hold."""
MAX_BYTES = 32 << 20
"""Memory of the indexes of all sequences."""
MANY_TOKENS = 32
"""New tokens from which they are indexed all at once."""
_SLOT_BYTES = 4
_MIN_INDEX_SLOTS = 1 << 10
_SLOTS_PER_TOKEN = 4
"""Least number of slots for a token, until the index has its largest size. Of n-grams with one slot only the
newest is found: with 4, at most a fifth of the oldest are lost."""
STRENGTHS = (4, 8, 16)
"""Lengths of the match from which a draft is stronger by one."""


class NgramIndex:
    """Finds where the last n-gram of a growing text occurred before.

    A hash table without chains: each slot has the position after one n-gram, and the newest n-gram wins.

    max_tokens: longest text for which the table is large enough.
    """

    def __init__(self, token_ids: TokenIds) -> None:
        """Index a text. It may have any length, also none."""
        self._build(token_ids)

    @staticmethod
    def bytes_for(num_tokens: int) -> int:
        """Return the memory of the table for a text of this length."""
        num_slots = _MIN_INDEX_SLOTS
        while num_slots < min(_SLOTS_PER_TOKEN * num_tokens, MAX_INDEX_SLOTS):
            num_slots *= 2
        return _SLOT_BYTES * num_slots

    def _build(self, token_ids: TokenIds) -> None:
        self._num_slots = self.bytes_for(len(token_ids)) // _SLOT_BYTES
        self._shift = 65 - self._num_slots.bit_length()
        is_largest = self._num_slots == MAX_INDEX_SLOTS
        self.max_tokens = MAX_INDEXED_TOKENS if is_largest else self._num_slots // _SLOTS_PER_TOKEN
        self._slots = array("I", bytes(_SLOT_BYTES * self._num_slots))
        self._num_indexed = NGRAM_TOKENS  # positions below are in the index
        self._asked = 0, 0  # (end of the n-gram that was asked for last, its slot), which is indexed next
        if len(token_ids) > NGRAM_TOKENS:
            # The last n-gram is not in the index yet: what follows it is what the index is asked for.
            self._index_many(token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return _SLOT_BYTES * self._num_slots

    def extend(self, token_ids: TokenIds, *, may_grow: bool = True) -> None:
        """Index the tokens of the text that are new."""
        if may_grow and len(token_ids) > self.max_tokens:
            self._build(token_ids)
            return
        if len(token_ids) - self._num_indexed > MANY_TOKENS:
            self._index_many(token_ids)
            return
        asked, asked_slot = self._asked
        for position in range(self._num_indexed, len(token_ids)):
            self._slots[asked_slot if position == asked else self._slot_of(token_ids, position)] = position
        self._num_indexed = max(self._num_indexed, len(token_ids))

    def _index_many(self, token_ids: TokenIds) -> None:
        """Index all tokens that are not in the index yet, but not the last n-gram."""
        begin = self._num_indexed
        tokens = np.array(token_ids[begin - NGRAM_TOKENS : -1], dtype=np.uint64)
        found = hashes_of(tokens, NGRAM_TOKENS) >> np.uint64(self._shift)
        slots = np.frombuffer(self._slots, dtype=np.uint32)
        slots[found] = np.arange(begin, len(token_ids), dtype=np.uint32)  # of equal ones, the last stays
        self._num_indexed = len(token_ids)

    def find(self, token_ids: TokenIds) -> int | None:
        """Return the position after an earlier occurrence of the last n-gram of the text, or None."""
        end = len(token_ids)
        if end < NGRAM_TOKENS:
            return None
        slot = self._slot_of(token_ids, end)
        self._asked = end, slot
        position = self._slots[slot]
        is_found = position and token_ids[position - NGRAM_TOKENS : position] == token_ids[end - NGRAM_TOKENS :]
        return position if is_found else None

    def _slot_of(self, token_ids: TokenIds, end: int) -> int:
        return hash_of(token_ids[end - NGRAM_TOKENS : end]) >> self._shift


class NgramDrafter:
    """Guesses that a response goes on as its prompt or itself did after the same tokens.

    Memory: 4 KiB or at most 32 bytes a token for each decoding sequence, up to `MAX_INDEX_SLOTS` slots, and
    `MAX_BYTES` for all. A sequence that would exceed it has no drafts until others have ended.
    """

    name = "ngram"
    learns = False

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}
        self._copies: dict[int, tuple[int, int, int]] = {}  # (position copied from, position to, length of the match)
        self.num_bytes = 0

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        index = self._indexes.get(key)
        if index is not None and len(token_ids) <= index.max_tokens:
            return  # `draft` extends it, if it is needed
        before = 0 if index is None else index.num_bytes
        fits = self.num_bytes - before + NgramIndex.bytes_for(len(token_ids)) <= MAX_BYTES
        if index is not None:
            index.extend(token_ids, may_grow=fits)
        elif fits:
            index = self._indexes[key] = NgramIndex(token_ids)
        self.num_bytes += (0 if index is None else index.num_bytes) - before

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        index = self._indexes.get(key)
        if index is None:
            return None
        begin, end, length = self._copies.get(key, (0, 0, 0))
        num_new = len(token_ids) - end
        if length and token_ids[begin : begin + num_new] == token_ids[end:]:  # it goes on as it was drafted
            position, length = begin + num_new, length + num_new
        else:
            index.extend(token_ids, may_grow=False)
            found = index.find(token_ids)
            if found is None:
                self._copies.pop(key, None)
                return None
            position, length = found, _match_length(token_ids, found)
        self._copies[key] = position, len(token_ids), length
        return Draft(_copied(token_ids, position), sum(length >= least for least in STRENGTHS))

    def forget(self, key: int) -> None:
        self._copies.pop(key, None)
        if (index := self._indexes.pop(key, None)) is not None:
            self.num_bytes -= index.num_bytes

    def __len__(self) -> int:
        return len(self._indexes)


def _match_length(token_ids: TokenIds, position: int) -> int:
    """Return how many tokens before `position` equal the last ones, at most the longest of `STRENGTHS`."""
    end, length = len(token_ids), NGRAM_TOKENS
    most = min(position, STRENGTHS[-1])
    while length < most and token_ids[position - length - 1] == token_ids[end - length - 1]:
        length += 1
    return length


def _copied(token_ids: TokenIds, position: int) -> tuple[int, ...]:
    """Return the tokens from `position` on. At the end of the text they repeat, so a period continues."""
    found = token_ids[position : position + MAX_DRAFT_TOKENS].tolist()
    period = len(found)
    while len(found) < MAX_DRAFT_TOKENS:
        found.append(found[-period])
    return tuple(found)
