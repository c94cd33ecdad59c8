"""Owners of content: a client's session, a single request, or all requests that begin with one block."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.engine.retention.announced_turns import AnnouncedTurns, end_of_turn_s
from baton.engine.retention.return_chance import EDGES_S, NUM_BINS, bin_of

NUM_PAUSES = 8
"""Last pauses of an owner that are remembered."""
NOT_COUNTED = NUM_BINS + 1
"""Value of `counted_bins` for a pause that says nothing about others of its kind."""


class OwnerKind(Enum):
    """Kinds of owners whose pauses are counted together until an owner has enough of its own.

    FIRST_TURN: session after its first turn. LATER_TURN: session after later turns. UNNAMED: request without
    a session. SHARED: requests that begin with the same block.
    """

    FIRST_TURN = "first_turn"
    LATER_TURN = "later_turn"
    UNNAMED = "unnamed"
    SHARED = "shared"


class ContentOwner:
    """The user of some content, and when it will probably use it again.

    pauses: bins of its last pauses
    num_running: its requests that run now
    num_retaining: those of them that ask for retention
    idle_since_s: when its last request ended; None if none has ended since it has moved
    counted_bins: bins of the present pause that are counted, or `NOT_COUNTED`
    retained_until_s: its content is retained until then
    next_bin: bin of the pause that its client has announced; None if it has announced none
    next_in_s: pause that the client announces with the request that runs; None if it announces none
    has_announced_turn: it does so, and its tenant's budget allows it
    chain: if so, hashes of the blocks of its last request that the budget allows. tenant_root: as in that
        `SequenceRequest`.
    shared: owner of the content that it shares with others; None if that is itself
    has_moved: another worker has read all of its content for its next request
    num_blocks: length of the longest chain that its requests have left, since it has moved
    """

    __slots__ = (
        "chain",
        "clock",
        "counted_bins",
        "has_announced_turn",
        "has_moved",
        "idle_since_s",
        "kind",
        "next_bin",
        "next_in_s",
        "num_blocks",
        "num_retaining",
        "num_running",
        "on_reuse",
        "pauses",
        "retained_until_s",
        "shared",
        "tenant",
        "tenant_root",
        "turns",
    )

    def __init__(
        self,
        kind: OwnerKind,
        tenant: str,
        *,
        clock: Callable[[], float],
        shared: "ContentOwner | None" = None,
        on_reuse: "Callable[[ContentOwner], None]" = lambda _: None,
        turns: AnnouncedTurns | None = None,
    ) -> None:
        """on_reuse: called when another owner uses its content. turns: budgets; None allows no turn."""
        self.kind, self.tenant, self.shared = kind, tenant, shared
        self.clock, self.on_reuse = clock, on_reuse
        self.pauses: tuple[int, ...] = ()
        self.num_running = self.num_retaining = 0
        self.idle_since_s: float | None = None
        self.counted_bins = NOT_COUNTED
        self.retained_until_s = 0.0
        self.next_bin: int | None = None
        self.turns = turns
        self.next_in_s: float | None = None
        self.has_announced_turn = self.has_moved = False
        self.chain: tuple[BlockHash, ...] = ()
        self.tenant_root = NO_HASH
        self.num_blocks = 0

    @property
    def age_s(self) -> float:
        """Time since its last request ended; 0 while one runs."""
        return 0.0 if self.num_running or self.idle_since_s is None else max(0.0, self.clock() - self.idle_since_s)

    @property
    def present_bin(self) -> int:
        """The bin that its pause has reached, by the same sums as the times below; 0 while it runs."""
        reached = bin_of(self.age_s)
        if self.num_running or self.idle_since_s is None or reached >= NUM_BINS:
            return reached
        return reached + (self.idle_since_s + EDGES_S[reached + 1] <= self.clock())

    @property
    def next_bin_at_s(self) -> float | None:
        """Time when its pause reaches the next bin that is to be counted; None if it has none, or runs."""
        if self.num_running or self.idle_since_s is None or self.counted_bins >= NUM_BINS:
            return None
        return self.idle_since_s + EDGES_S[self.counted_bins]

    @property
    def is_retained(self) -> bool:
        """True if its content is to be retained now, as far as the tenant's budget goes."""
        return self.num_retaining > 0 or self.clock() < self.retained_until_s

    @property
    def end_of_bin_s(self) -> float | None:
        """Time of its pause's next bin, counted or not; None if there is none, or while it runs."""
        reached = self.present_bin
        if self.num_running or self.idle_since_s is None or reached >= NUM_BINS:
            return None
        return self.idle_since_s + EDGES_S[reached + 1]

    def leave(self, chain: Sequence[BlockHash], tenant_root: BlockHash) -> None:
        """Keep the chain of a request that ends, if the next turn is announced and the budget allows it."""
        if not self.has_announced_turn or self.next_in_s is None or self.turns is None:
            return
        num_blocks = self.turns.take(self.tenant, self, len(chain), end_of_turn_s(self.clock(), self.next_in_s))
        self.chain, self.tenant_root = tuple(chain[:num_blocks]), tenant_root
        self.has_announced_turn = num_blocks > 0

    def add_pause(self, pause_s: float) -> None:
        """Remember a pause that has ended."""
        self.pauses = (*self.pauses[1 - NUM_PAUSES :], min(bin_of(pause_s), NUM_BINS))

    def owner_with(self, before: "ContentOwner | None", position: int) -> "ContentOwner":
        """Record a use of content that `before` owned until then, and return its owner from now on.

        position: number of blocks before it in the chain
        Retention goes first, because a prefix is lost with its first block.
        """
        self.num_blocks = max(self.num_blocks, position + 1)
        if before is None or before is self or self.num_retaining:
            return self
        if before.is_retained and not before.has_moved:
            return before
        before.on_reuse(before)
        return self.shared or self


class ContentUse(NamedTuple):
    """The last use of the content of one block.

    owner: None if it is unknown
    position: number of blocks before it in the chain
    is_reused: a second request has used it
    """

    owner: ContentOwner | None = None
    position: int = 0
    is_reused: bool = False


NO_USE = ContentUse()
