"""The owners of a worker's content: it learns from their pauses when content is used again.

The pauses are those between two uses of the content on this worker, because they decide what its copy is
worth.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from sys import getsizeof

from baton.core.kv.block_hash import BlockHash
from baton.core.request import SessionHints, SessionKey
from baton.engine.retention.announced_turns import AnnouncedTurns
from baton.engine.retention.content_owner import NOT_COUNTED, ContentOwner, OwnerKind
from baton.engine.retention.return_chance import (
    NUM_BINS,
    PauseCounts,
    bin_of,
    return_rate,
    with_own_pauses,
)

MAX_OWNERS_BYTES = 8 * 2**20
"""Upper bound for the memory of sessions, and for that of first blocks."""
OWNER_BYTES = 1024
"""Memory of one owner without its name, and without the hashes of an announced request."""
INITIAL_HAZARDS = {
    OwnerKind.FIRST_TURN: 0.05,
    OwnerKind.LATER_TURN: 0.1,
    OwnerKind.UNNAMED: 0.01,
    OwnerKind.SHARED: 0.1,
}
"""Before a pause was seen. A session is taken to return in 7 of 10 cases, after later turns in 9."""
KIND_WEIGHT = 3.0
"""The pauses of the kind count as so many of an owner's own ones."""
UNKNOWN_AGE_S = 60.0
"""Content without an owner counts as that of a single request after this time."""
ANNOUNCED_WEIGHT = 8.0
"""The pause that a client has announced counts as so many of its owner's own ones, in place of these."""

MOVED_SHARE = 0.5
"""A session has moved if another worker has this share of its longest chain. The rest may be evicted."""

OwnerKey = SessionKey | BlockHash
"""A session, or the first block's hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRequest:
    """A request that runs.

    owner: of what it leaves. shared: owner of what it shares with others; None if it has no full block.
    """

    hints: SessionHints
    owner: ContentOwner
    shared: ContentOwner | None


class ContentOwners:
    """Sessions, and first blocks that requests share. The longest unused are forgotten beyond the bytes.

    Owners that are forgotten, or that cannot return because they are single requests, exist as long as blocks
    refer to them.
    """

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_OWNERS_BYTES, *, turn_blocks: int = 0) -> None:
        """clock: returns the time in seconds by which pauses are counted.

        turn_blocks: device blocks that the announced turns of one tenant may take
        """
        self._clock = clock
        self.turns = AnnouncedTurns(turn_blocks, clock)
        self._sessions, self._first_blocks = (_OwnerTable(max_bytes, self.turns) for _ in range(2))
        self._counts = {kind: PauseCounts(hazard) for kind, hazard in INITIAL_HAZARDS.items()}
        self._next_bins: list[tuple[float, int, ContentOwner]] = []  # a heap: end of a pause's present bin
        self._numbers = count()
        self._on_change: list[Callable[[ContentOwner], None]] = []

    @property
    def num_bytes(self) -> int:
        """Memory of the owners that can return."""
        return self._sessions.num_bytes + self._first_blocks.num_bytes

    def on_change(self, callback: Callable[[ContentOwner], None]) -> None:
        """Call `callback` when the chance of an owner's return, or its retention, has changed."""
        self._on_change.append(callback)

    def arrived(self, hints: SessionHints, first_block: BlockHash | None) -> OwnedRequest:
        """Record that a request has arrived. `ended` must follow.

        first_block: hash of its first block; None if it has no full one
        """
        self._count_pauses()
        shared = None
        if first_block is not None:
            shared = self._first_blocks.get(first_block, OwnerKind.SHARED, hints.tenant, self._clock)
            self._begin(shared)
        if (key := hints.key) is not None:
            owner = self._sessions.get(key, OwnerKind.FIRST_TURN, hints.tenant, self._clock)
        else:
            owner = ContentOwner(
                OwnerKind.UNNAMED, hints.tenant, clock=self._clock, on_reuse=self._reused, turns=self.turns
            )
        owner.shared = shared
        self._begin(owner)
        owner.num_retaining += bool(hints.retain_s)
        owner.next_in_s, owner.has_announced_turn = hints.next_in_s, hints.next_in_s is not None
        request = OwnedRequest(hints=hints, owner=owner, shared=shared)
        self._changed(request)
        return request

    def ended(self, request: OwnedRequest) -> None:
        """Record that a request has ended."""
        now_s, owner, hints = self._clock(), request.owner, request.hints
        owner.num_retaining -= bool(hints.retain_s)
        if hints.retain_s is not None:
            owner.retained_until_s = now_s + hints.retain_s if hints.retain_s else 0.0
        owner.has_announced_turn = owner.has_announced_turn and bool(owner.chain)
        if owner.has_announced_turn and hints.next_in_s is not None:
            owner.next_bin = bin_of(hints.next_in_s)
        for each in (owner, request.shared):
            if each is not None:
                each.num_running -= 1
                if not each.num_running:
                    self._begin_pause(each, now_s)
        self._changed(request)

    def find(self, session: SessionKey) -> ContentOwner | None:
        """Return a session; None if it is unknown or forgotten."""
        return self._sessions.find(session)

    def moved(self, session: SessionKey, num_blocks: int) -> None:
        """Record that another worker has read the leading blocks of a session, which goes on there.

        The read was a use of the content, and the last one: the next turn finds more at the other worker.
        Nothing changes if a request of the session runs here, or if these blocks are less than `MOVED_SHARE`
        of the longest chain that its requests have left: it may be another branch that goes on elsewhere.
        """
        owner = self.find(session)
        if owner is None or owner.num_running or num_blocks < MOVED_SHARE * owner.num_blocks:
            return
        self._leave_pause(owner)
        owner.idle_since_s, owner.has_moved, owner.num_blocks = None, True, 0
        self._notify(owner)

    def retain_until(self, request: OwnedRequest, until_s: float) -> None:
        """Retain what a request has left until this time, if it is not retained for longer."""
        request.owner.retained_until_s = max(request.owner.retained_until_s, until_s)
        self._changed(request)

    def return_rate(self, owner: ContentOwner | None) -> float:
        """Return how likely an owner uses its content again, per second for which it is kept.

        None: the owner is unknown, as of blocks that only earlier tokens of a sequence have seen.
        0 if the owner goes on at another worker.
        """
        if owner is None:
            return return_rate(self._counts[OwnerKind.UNNAMED].hazards(), UNKNOWN_AGE_S)
        if owner.has_moved:
            return 0.0
        if owner.kind is OwnerKind.UNNAMED:
            self._count_age(owner)
        own = [(index, 1.0) for index in owner.pauses]
        if owner.next_bin is not None:
            own = [(owner.next_bin, ANNOUNCED_WEIGHT)]
        hazards = self._counts[owner.kind].hazards()
        return return_rate(with_own_pauses(hazards, own, KIND_WEIGHT), owner.age_s)

    # -- inside ------------------------------------------------------------------------------------------------

    def _begin(self, owner: ContentOwner) -> None:
        """Record that an owner's request begins. Its pause ends with that."""
        self._leave_pause(owner)
        owner.num_running += 1
        owner.has_moved = False

    def _leave_pause(self, owner: ContentOwner) -> None:
        """End the pause of an owner, if it has one, and what its client has announced for the end of it."""
        if not owner.num_running and owner.idle_since_s is not None:
            self._end_pause(owner)
            if owner.kind is OwnerKind.FIRST_TURN:
                owner.kind = OwnerKind.LATER_TURN
        owner.next_bin, owner.has_announced_turn, owner.chain = None, False, ()
        self.turns.release(owner.tenant, owner)

    def _begin_pause(self, owner: ContentOwner, now_s: float) -> None:
        owner.idle_since_s, owner.counted_bins = now_s, 0
        if owner.kind is OwnerKind.SHARED and not owner.pauses:
            owner.counted_bins = NOT_COUNTED  # most first blocks are never shared
            return
        self._count_age(owner)
        if owner.kind is not OwnerKind.UNNAMED:  # its age is counted only while it has content
            self._count_later(owner)

    def _end_pause(self, owner: ContentOwner) -> None:
        age_s = owner.age_s
        if owner.counted_bins != NOT_COUNTED:
            self._count_age(owner)
            self._counts[owner.kind].end(owner.present_bin)
        owner.add_pause(age_s)
        owner.counted_bins = NOT_COUNTED

    def _reused(self, owner: ContentOwner) -> None:
        """Record that another request has used the content of a request without a session. Once is enough."""
        if not owner.num_running and owner.counted_bins != NOT_COUNTED:
            self._end_pause(owner)

    def _count_age(self, owner: ContentOwner) -> None:
        """Count the bins that a pause has reached."""
        if owner.num_running or owner.counted_bins == NOT_COUNTED:
            return
        present = min(owner.present_bin, NUM_BINS - 1)
        if present >= owner.counted_bins:
            self._counts[owner.kind].begin(owner.counted_bins, present)
            owner.counted_bins = present + 1

    def _count_later(self, owner: ContentOwner) -> None:
        if (at_s := owner.next_bin_at_s) is not None:
            heappush(self._next_bins, (at_s, next(self._numbers), owner))

    def _count_pauses(self) -> None:
        """Count the bins that the pauses of all owners have reached."""
        now_s = self._clock()
        if len(self._next_bins) > 2 * (len(self._sessions) + len(self._first_blocks)) + NUM_BINS:
            valid = {each[2]: each for each in self._next_bins if each[0] == each[2].next_bin_at_s}
            self._next_bins = list(valid.values())
            heapify(self._next_bins)
        while self._next_bins and self._next_bins[0][0] <= now_s:
            at_s, _, owner = heappop(self._next_bins)
            if at_s == owner.next_bin_at_s:  # else it has run since
                self._count_age(owner)
                self._count_later(owner)

    def _changed(self, request: OwnedRequest) -> None:
        self._notify(request.owner)
        if request.shared is not None:
            self._notify(request.shared)

    def _notify(self, owner: ContentOwner) -> None:
        for callback in self._on_change:
            callback(owner)


class _OwnerTable:
    """Owners by key, in bounded memory."""

    def __init__(self, max_bytes: int, turns: AnnouncedTurns) -> None:
        self.num_bytes = 0
        self._max_bytes, self._turns = max_bytes, turns
        self._owners: OrderedDict[OwnerKey, ContentOwner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, key: OwnerKey) -> ContentOwner | None:
        """Return the owner if it is known."""
        return self._owners.get(key)

    def get(self, key: OwnerKey, kind: OwnerKind, tenant: str, clock: Callable[[], float]) -> ContentOwner:
        """Return the owner, a new one if it is unknown, and forget the longest unused ones."""
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = ContentOwner(kind, tenant, clock=clock, turns=self._turns)
            self.num_bytes += _bytes_of(key)
        self._owners.move_to_end(key)
        while self.num_bytes > self._max_bytes and len(self._owners) > 1:
            oldest_key, oldest = self._owners.popitem(last=False)
            self.num_bytes -= _bytes_of(oldest_key)
            self._turns.release(oldest.tenant, oldest)
            oldest.counted_bins = NOT_COUNTED  # it cannot return, which says nothing about the others
        return owner


def _bytes_of(key: OwnerKey) -> int:
    return OWNER_BYTES + (getsizeof(key) if isinstance(key, bytes) else sum(map(getsizeof, key)))
