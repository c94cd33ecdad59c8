"""Drafts from recent responses of the same tenant: the token that mostly followed the last tokens there.

Responses to similar requests repeat each other: forms, code, calls of tools. Source of the idea:
SuffixDecoding (Oliaro et al., 2024). There a suffix tree counts all continuations; here a table keeps the
most frequent one of each context (majority vote, Boyer and Moore, 1981).

A client can choose as many cache salts as it likes, so tables are given with care: to a salt whose second
response is computed, small at first, and only from salts with far fewer recent tokens.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS, Draft
from baton.engine.speculation.token_hash import MAX_HASHED, hash_of

CONTEXT_TOKENS = 4
"""Tokens that select the next one."""
FIRST_BITS, MAX_BITS, BITS_OF_GROWTH = 9, 15, 2
"""Logarithms of the contexts of one tenant: of its first table, of its largest, and of the ratio of two
sizes."""
SLOT_BYTES = 13
MAX_BYTES = 8 << 20
"""Memory of all tables. A table has 6.5 KiB at first and 416 KiB at last."""
MAX_TABLES = 128
"""Tenants with a table."""
MAX_WAITING = 512
"""Tenants without a table of which something is remembered. The oldest is forgotten."""
LEAST_RATIO = 2
"""A tenant gets memory of another only if it has more than so many times its recent tokens."""
RECENT_TOKENS = 1 << 16
"""Tokens of all tenants after which the count of each is halved."""
_MAX_VOTES = 255
STRENGTHS = (2, 4)
"""Votes for the first token from which a draft is stronger by one."""
assert CONTEXT_TOKENS <= MAX_HASHED


class SuffixTable:
    """The most frequent next token of each context of `CONTEXT_TOKENS` tokens, with its majority in votes.

    A context takes the slot of another one when that one has no votes left, so rare ones make room.
    """

    def __init__(self, bits: int = FIRST_BITS, num_taken: int = 0) -> None:
        """bits: logarithm of the number of slots. num_taken: slots that the caller fills."""
        self.bits = bits
        self._shift = 64 - bits
        self._num_taken = num_taken
        self._hashes = array("Q", bytes(8 << bits))
        self._next = array("I", bytes(4 << bits))
        self._votes = bytearray(1 << bits)

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return SLOT_BYTES << self.bits

    @property
    def is_crowded(self) -> bool:
        """True if half of the slots are taken."""
        return self._num_taken << 1 >= 1 << self.bits

    def learn(self, context: TokenIds, token_id: int) -> None:
        """Count one vote for `token_id` after a context."""
        context_hash = hash_of(context)
        slot = context_hash >> self._shift
        votes = self._votes[slot]
        if votes and self._hashes[slot] == context_hash and self._next[slot] == token_id:
            self._votes[slot] = min(votes + 1, _MAX_VOTES)
        elif votes > 1:
            self._votes[slot] = votes - 1
        else:
            self._num_taken += not votes
            self._hashes[slot], self._next[slot], self._votes[slot] = context_hash, token_id, 1

    def next_of(self, context: TokenIds) -> tuple[int, int]:
        """Return (the most frequent token after a context, its votes); 0 votes if there is none."""
        context_hash = hash_of(context)
        slot = context_hash >> self._shift
        return (self._next[slot], self._votes[slot]) if self._hashes[slot] == context_hash else (0, 0)

    def grown(self, bits: int) -> "SuffixTable":
        """Return a larger table with the same content. Contexts of different slots keep different slots."""
        larger = SuffixTable(bits, self._num_taken)
        hashes, votes = np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._votes, np.uint8)
        taken = votes > 0
        slots = hashes[taken] >> np.uint64(64 - bits)
        np.frombuffer(larger._hashes, np.uint64)[slots] = hashes[taken]
        np.frombuffer(larger._next, np.uint32)[slots] = np.frombuffer(self._next, np.uint32)[taken]
        np.frombuffer(larger._votes, np.uint8)[slots] = votes[taken]
        return larger


class SuffixTenant:
    """The recent responses of one tenant: how many tokens, and its table.

    first_key: of the first sequence that was observed. num_recent: recent tokens.
    try_at: recent tokens from which it asks for memory again, because there was none.
    """

    __slots__ = ("first_key", "num_recent", "table", "try_at")

    def __init__(self, first_key: int) -> None:
        self.first_key = first_key
        self.num_recent = 0
        self.try_at = 0
        self.table: SuffixTable | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of its table."""
        return 0 if self.table is None else self.table.num_bytes


class SuffixDrafter:
    """Guesses that a response goes on as other responses of its tenant did."""

    name = "suffix"
    learns = True

    def __init__(self) -> None:
        self._tenants: dict[BlockHash, SuffixTenant] = {}  # those with a table
        self._waiting: OrderedDict[BlockHash, SuffixTenant] = OrderedDict()
        self._num_tokens = 0
        self.num_bytes = 0

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        own = self._tenants.get(tenant) or self._known(key, tenant)
        own.num_recent += num_new
        self._num_tokens += num_new
        if self._num_tokens >= RECENT_TOKENS:
            self._halve_counts()
        if own.table is None or own.table.is_crowded:
            self._ask_for_memory(own, key, tenant)
        if own.table is not None:
            for position in range(max(CONTEXT_TOKENS, len(token_ids) - num_new), len(token_ids)):
                own.table.learn(token_ids[position - CONTEXT_TOKENS : position], token_ids[position])

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        own = self._tenants.get(tenant)
        table = None if own is None else own.table
        context = token_ids[-CONTEXT_TOKENS:]
        if table is None or len(context) < CONTEXT_TOKENS:
            return None
        found: list[int] = []
        first_votes = 0
        while len(found) < MAX_DRAFT_TOKENS:
            token_id, votes = table.next_of(context)
            if not votes:
                break
            first_votes = first_votes or votes
            found.append(token_id)
            context = context[1:]
            context.append(token_id)
        return Draft(tuple(found), sum(first_votes >= least for least in STRENGTHS)) if found else None

    def forget(self, key: int) -> None:
        """Keep the table: it belongs to the tenant."""

    def __len__(self) -> int:
        return len(self._tenants)

    def _known(self, key: int, tenant: BlockHash) -> SuffixTenant:
        """Return what is remembered of a tenant without a table."""
        own = self._waiting.get(tenant)
        if own is None:
            own = self._waiting[tenant] = SuffixTenant(key)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
        return own

    def _ask_for_memory(self, own: SuffixTenant, key: int, tenant: BlockHash) -> None:
        """Give a tenant its first table or a larger one, if there is memory, or others use theirs less."""
        table = own.table
        if own.num_recent < own.try_at or (key == own.first_key if table is None else table.bits == MAX_BITS):
            return
        bits = FIRST_BITS if table is None else min(MAX_BITS, table.bits + BITS_OF_GROWTH)
        num_bytes = SLOT_BYTES << bits
        if not self._free_memory(num_bytes - own.num_bytes, own):
            own.try_at = LEAST_RATIO * own.num_recent
            return
        self.num_bytes += num_bytes - own.num_bytes
        own.table = SuffixTable(bits) if table is None else table.grown(bits)
        if table is None:
            del self._waiting[tenant]
            self._tenants[tenant] = own

    def _free_memory(self, num_bytes: int, own: SuffixTenant) -> bool:
        """Take tables of tenants with far fewer recent tokens than `own`. If these are not enough, take none
        and return False."""
        excess_bytes = self.num_bytes + num_bytes - MAX_BYTES
        num_excess = len(self._tenants) + 1 - MAX_TABLES if own.table is None else 0
        taken: list[BlockHash] = []
        for tenant, other in sorted(self._tenants.items(), key=lambda item: item[1].num_recent):
            if excess_bytes <= 0 and len(taken) >= num_excess:
                break
            if LEAST_RATIO * other.num_recent >= own.num_recent:
                return False
            excess_bytes -= other.num_bytes
            taken.append(tenant)
        if excess_bytes > 0 or len(taken) < num_excess:
            return False
        for tenant in taken:
            self.num_bytes -= self._tenants.pop(tenant).num_bytes
        return True

    def _halve_counts(self) -> None:
        self._num_tokens = 0
        known: Iterable[SuffixTenant] = (*self._tenants.values(), *self._waiting.values())
        for own in known:
            own.num_recent //= 2
            own.try_at //= 2
