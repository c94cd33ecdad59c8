"""Drafts from recent responses of the same tenant: the token that mostly followed the last tokens there.

Responses to similar requests repeat each other: forms, code, calls of tools. Source of the idea:
SuffixDecoding (Oliaro et al., 2024). There a suffix tree counts all continuations; here a table of fixed size
keeps the most frequent one of each context (majority vote, Boyer and Moore, 1981).
"""

from array import array
from collections import OrderedDict

from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS, Draft
from baton.engine.speculation.token_hash import MAX_HASHED, hash_of

CONTEXT_TOKENS = 4
"""Tokens that select the next one."""
SLOT_BITS = 15
"""Logarithm of the contexts of one tenant."""
MAX_TENANTS = 16
"""Tenants with a table; the least recently active one loses its table. A slot takes 13 bytes, so 16
tables take 6.8 MB."""
_MAX_VOTES = 255
STRENGTHS = (2, 4)
"""Votes for the first token from which a draft is stronger by one."""
assert CONTEXT_TOKENS <= MAX_HASHED


class SuffixTable:
    """The most frequent next token of each context of `CONTEXT_TOKENS` tokens, with its majority in votes.

    A context takes the slot of another one when that one has no votes left, so rare ones make room.
    """

    def __init__(self) -> None:
        num_slots = 1 << SLOT_BITS
        self._hashes = array("Q", bytes(8 * num_slots))
        self._next = array("I", bytes(4 * num_slots))
        self._votes = bytearray(num_slots)

    def learn(self, context: TokenIds, token_id: int) -> None:
        """Count one vote for `token_id` after a context."""
        context_hash = hash_of(context)
        slot = context_hash >> (64 - SLOT_BITS)
        votes = self._votes[slot]
        if votes and self._hashes[slot] == context_hash and self._next[slot] == token_id:
            self._votes[slot] = min(votes + 1, _MAX_VOTES)
        elif votes > 1:
            self._votes[slot] = votes - 1
        else:
            self._hashes[slot], self._next[slot], self._votes[slot] = context_hash, token_id, 1

    def next_of(self, context: TokenIds) -> tuple[int, int]:
        """Return (the most frequent token after a context, its votes); 0 votes if there is none."""
        context_hash = hash_of(context)
        slot = context_hash >> (64 - SLOT_BITS)
        return (self._next[slot], self._votes[slot]) if self._hashes[slot] == context_hash else (0, 0)


class SuffixDrafter:
    """Guesses that a response goes on as other responses of its tenant did."""

    name = "suffix"
    learns = True

    def __init__(self) -> None:
        self._tables: OrderedDict[BlockHash, SuffixTable] = OrderedDict()

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        table = self._tables.get(tenant)
        if table is None:
            table = self._tables[tenant] = SuffixTable()
            if len(self._tables) > MAX_TENANTS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(tenant)
        for position in range(max(CONTEXT_TOKENS, len(token_ids) - num_new), len(token_ids)):
            table.learn(token_ids[position - CONTEXT_TOKENS : position], token_ids[position])

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        table = self._tables.get(tenant)
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
        return len(self._tables)
