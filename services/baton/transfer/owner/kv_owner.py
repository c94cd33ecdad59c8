"""The owner's side of every KV transfer: leases, pinned blocks and announcements, as a state machine over
`now_s`.

A transfer is CREATED with its job, or with the Follow of a prefix pull. It is FOLLOWED after its reader's
Follow. It is ENDED by Release, by Abandon, by the end of its lease, or by `claim_timeout_s`. A Follow that
arrives before its job is kept for `reorder_window_s`. Blocks stay pinned from their allocation until the
transfer has ended, even if the sequence ends before. Messages are idempotent: unknown, late and repeated ones
are counted and dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.core.errors import Reason
from baton.core.ids import Incarnation, JobId, TransferId, WorkerRef
from baton.core.interfaces import PinPool
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import NO_BLOCK, entries_from, hashes_of_entries, hashes_of_prefix, num_entries
from baton.core.messages.peer_messages import (
    RECEIVED,
    Abandon,
    FirstToken,
    Follow,
    HashRange,
    Lost,
    OwnerMessage,
    Release,
    Renew,
    Renewed,
)
from baton.core.request import LegTimeline, SessionKey
from baton.core.state_machines import OWNED_TRANSFER_TRANSITIONS, Lifecycle
from baton.core.state_machines import OwnedTransferState as State
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.owner.early_follows import EarlyFollow, EarlyFollows
from baton.transfer.owner.ended_transfers import EndedTransfers, Key, PullKey
from baton.transfer.owner.lease_deadlines import Deadlines
from baton.transfer.owner.owned_transfer import OwnedTransfer

PrefixLookup = Callable[[Sequence[BlockHash]], Sequence[int]]
"""Returns the block ids of the longest leading run of hashes that this worker holds, in any of its regions.
Ids count the blocks of all regions in one sequence."""
StartReload = Callable[[PullKey, HashRange], bool]
"""Starts to reload what readers cannot read of a prefix, because it is on a disk only, and `prefix_reloaded`
will be called with the key. Returns False if there is nothing to reload, or if it does not pay."""
SessionMoved = Callable[[SessionKey, int], None]
"""Called with a session that goes on at a reader, and the number of leading blocks that the reader has."""


@dataclass(slots=True, kw_only=True)
class OwnerCounts:
    """Counters since the start of the owner, for metrics and tests."""

    followed: int = 0
    released: int = 0
    abandoned: int = 0
    leases_ended: int = 0
    unclaimed: int = 0
    early_follows: int = 0
    dropped_notices: int = 0
    refused_follows: int = 0


class KvOwner:
    """All transfers of one worker's blocks. Messages from peers never make it raise.

    `send` sends a message to a reader incarnation. A message that cannot be delivered is lost. The reader
    then repeats its Follow, and the owner sends the announcement again.
    A prefix that is not in memory is announced after its reload, within the time that the reader gives.
    `on_session_moved` is called when a reader has all of the KV that it wanted for a session that goes on
    there.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        num_blocks: int,
        pins: PinPool,
        send: Callable[[WorkerRef, OwnerMessage], None],
        lookup: PrefixLookup,
        start_reload: StartReload = lambda _key, _prefix: False,
        on_session_moved: SessionMoved = lambda _session, _num_blocks: None,
        lease_s: float,
        claim_timeout_s: float,
        reorder_window_s: float,
        tracing: Tracing = OFF,
    ) -> None:
        self._tracing = tracing
        self._windows, self._block_size = layout.windows, layout.block_size_tokens
        self._num_blocks = num_blocks
        self._pins = pins
        self._send = send
        self._lookup, self._start_reload, self._on_moved = lookup, start_reload, on_session_moved
        self._lease_s, self._claim_timeout_s = lease_s, claim_timeout_s
        self._transfers: dict[Key, OwnedTransfer] = {}
        self._early = EarlyFollows(reorder_window_s)
        self._transfer_until: Deadlines[Key] = Deadlines()
        self._by_reader: dict[Incarnation, dict[TransferId, OwnedTransfer]] = {}  # followed and not ended
        self._ended = EndedTransfers(remember_s=reorder_window_s)
        self._streams = 0
        self.counts = OwnerCounts()

    @property
    def open_leases(self) -> int:
        """Number of transfers that have not ended, followed or not."""
        return len(self._transfers)

    @property
    def next_deadline_s(self) -> float | None:
        """The time at which `expire` must be called next; None if there is no deadline."""
        times = [self._transfer_until.next_s, self._early.next_deadline_s, self._ended.next_deadline_s]
        return min((t for t in times if t is not None), default=None)

    # -- called by the worker for its jobs ---------------------------------------------------------

    def create(self, job: JobId, reader: WorkerRef, now_s: float, *, moving_session: SessionKey | None = None) -> None:
        """Create the transfer of an accepted job whose KV `reader` will pull.

        moving_session: the session that goes on at the reader; None if this worker's copy is still needed
        Does nothing if the job is known.
        """
        if job in self._transfers:
            return
        transfer = OwnedTransfer(
            key=job,
            lifecycle=Lifecycle(OWNED_TRANSFER_TRANSITIONS, State.CREATED),
            reader=reader,
            job=job,
            moving_session=moving_session,
        )
        self._transfers[job] = transfer
        self._ended.forget(job)
        early = self._early.pop(job)
        if early is not None:
            self._follow_job(early.reader, early.message, job, early.stream_number, now_s)

    def allocated(
        self,
        job: JobId,
        block_table: Sequence[int],
        hashes: Sequence[BlockHash],
        now_s: float,
        *,
        first_blocks: tuple[int, ...] = (0,),
    ) -> None:
        """Pin the blocks of a job's prompt. Does nothing if the transfer has ended.

        block_table: flat (`core.kv.kv_tables`). Called again when blocks were added to it.
        hashes: of the full blocks of tokens, in order
        first_blocks: by table; the blocks before them are not needed to continue the prompt. They are neither
            pinned nor announced.
        """
        transfer = self._transfers.get(job)
        if transfer is None or transfer.lost is not None:
            return
        num_tables = len(first_blocks)
        entries = entries_from(first_blocks, len(block_table) // num_tables)
        before = transfer.block_ids or (NO_BLOCK,) * len(entries)
        transfer.block_ids = tuple(block_table[entry] for entry in entries)
        transfer.hashes = tuple(hashes_of_entries(hashes, entries, num_tables))
        transfer.first_blocks = first_blocks
        new = [now for now, was in zip(transfer.block_ids, before, strict=True) if now != was]
        self._pins.pin(new)
        transfer.pinned += tuple(new)

    def announce(
        self,
        job: JobId,
        num_computed_tokens: int,
        now_s: float,
        *,
        final: bool = False,
        first_tokens: Sequence[FirstToken] = (),
        timeline: LegTimeline | None = None,
    ) -> None:
        """Announce to the reader that KV of the first `num_computed_tokens` tokens is computed.

        final: the prompt is complete; `first_tokens` and `timeline` are sent along
        Does nothing if the transfer has ended.
        """
        transfer = self._transfers.get(job)
        if transfer is None or transfer.lost is not None or transfer.is_final:
            return
        transfer.num_computed_tokens = num_computed_tokens
        num_full = num_entries(transfer.first_blocks, num_computed_tokens // self._block_size)
        transfer.num_ready = len(transfer.block_ids) if final else min(num_full, len(transfer.hashes))
        transfer.is_final = final
        transfer.first_tokens, transfer.timeline = tuple(first_tokens), timeline
        if final and transfer.lifecycle.state is State.CREATED:
            self._transfer_until.set(job, now_s + self._claim_timeout_s)
        self._announce_new(transfer)

    def lost(self, job: JobId, reason: Reason, now_s: float) -> None:
        """Handle that the job's sequence ended before its prompt was computed.

        Announced blocks stay pinned until the reader releases them or its lease ends. The others are unpinned
        now.
        """
        self._early.pop(job)
        transfer = self._transfers.get(job)
        if transfer is None or transfer.is_final or transfer.lost is not None:
            return
        transfer.lost = reason
        if transfer.lifecycle.state is State.CREATED or transfer.reader is None or transfer.transfer_id is None:
            self._end(transfer, reason, now_s)
            return
        announced = transfer.announced
        self._pins.unpin([block_id for block_id in transfer.block_ids[len(announced) :] if block_id != NO_BLOCK])
        transfer.pinned = announced
        self._send(transfer.reader, Lost(transfer_id=transfer.transfer_id, reason=reason))

    def prefix_reloaded(self, key: PullKey, now_s: float) -> None:
        """Announce a prefix after its reload, whatever came of that.

        Does nothing if the transfer has ended.
        """
        transfer = self._transfers.get(key)
        if transfer is None or transfer.prefix is None:
            return
        self._pin_prefix(transfer, is_final=True)
        self._announce_new(transfer)

    # -- called with the messages of readers -------------------------------------------------------

    def stream_opened(self) -> int:
        """Return a number for a new stream of a reader, to be passed with each message that arrives on it.

        Renewals extend only transfers that were followed on the same stream. A transfer that the reader no
        longer knows thus ends with its current lease.
        """
        self._streams += 1
        return self._streams

    def follow(
        self, reader: WorkerRef, message: Follow, stream_number: int, now_s: float, *, max_regions: int = 1
    ) -> None:
        """Start or resume a transfer to `reader`, or refuse the Follow with Lost.

        max_regions: regions of this worker's memory that the reader can read from
        """
        incarnation = reader.incarnation
        key: PullKey = (incarnation, message.transfer_id)
        if not 0 <= message.have_blocks <= message.resume_from_block or not message.transfer_id:
            self._refuse(reader, message.transfer_id, Reason.INVALID_REQUEST)
            return
        known = self._by_reader.get(incarnation, {}).get(message.transfer_id)
        if known is not None:
            self._follow_again(known, message, stream_number, now_s)
        elif (reason := self._ended.reason(key)) is not None:
            self._refuse(reader, message.transfer_id, reason)
        elif isinstance(message.subject, HashRange):
            self._follow_prefix(reader, message, message.subject, stream_number, now_s, max_regions)
        else:
            self._follow_job(reader, message, message.subject, stream_number, now_s)

    def renew(self, reader: WorkerRef, message: Renew, stream_number: int, now_s: float) -> None:
        """Extend the reader's leases of this stream. The answer names the transfers that have ended."""
        incarnation = reader.incarnation
        for transfer in self._by_reader.get(incarnation, {}).values():
            if transfer.stream_number == stream_number:
                self._transfer_until.set(transfer.key, now_s + self._lease_s)
        self._send(reader, Renewed(renewal=message.renewal, lost=self._ended.without_reader(incarnation)))

    def release(self, reader: WorkerRef, message: Release | Abandon, now_s: float) -> None:
        """End a transfer that its reader has finished or abandoned.

        Unknown transfers are counted and dropped.
        """
        transfer = self._by_reader.get(reader.incarnation, {}).get(message.transfer_id)
        if transfer is None:
            dropped = self._early.drop(reader, message.transfer_id)
            self.counts.dropped_notices += not dropped
            return
        if isinstance(message, Release):
            self.counts.released += 1
        else:
            self.counts.abandoned += 1
        self._end(transfer, Reason.LEASE_LOST, now_s, by_reader=True)
        if transfer.moving_session is not None and isinstance(message, Release) and message.outcome == RECEIVED:
            self._on_moved(transfer.moving_session, transfer.num_computed_tokens // self._block_size)

    def may_read(self, reader: WorkerRef, transfer_id: TransferId, block_ids: Sequence[int]) -> bool:
        """Return True if a two-sided read of these blocks may be served.

        The blocks must be announced to this reader. Probes (transfer 0) may read any block.
        """
        if not transfer_id:
            return all(0 <= block_id < self._num_blocks for block_id in block_ids)
        transfer = self._by_reader.get(reader.incarnation, {}).get(transfer_id)
        return transfer is not None and transfer.announced_ids.issuperset(block_ids)

    def expire(self, now_s: float) -> None:
        """End transfers whose lease or claim timeout has passed.

        Also refuses early Follows whose job did not come in time, and forgets transfers that ended long ago.
        """
        for key in self._transfer_until.pop_passed(now_s):
            transfer = self._transfers[key]
            if transfer.lifecycle.state is State.FOLLOWED:
                self.counts.leases_ended += 1
            else:
                self.counts.unclaimed += 1
            self._end(transfer, Reason.LEASE_LOST, now_s)
        for early in self._early.pop_passed(now_s):
            self._refuse(early.reader, early.message.transfer_id, Reason.LEASE_LOST)
        self._ended.expire(now_s)

    def close(self, reason: Reason, now_s: float) -> None:
        """End all transfers, because the worker is shutting down."""
        for transfer in list(self._transfers.values()):
            self._end(transfer, reason, now_s)

    # -- internal ----------------------------------------------------------------------------------

    def _follow_job(self, reader: WorkerRef, message: Follow, job: JobId, stream_number: int, now_s: float) -> None:
        transfer = self._transfers.get(job)
        if transfer is None:
            if (reason := self._ended.reason(job)) is not None:
                self._refuse(reader, message.transfer_id, reason)
                return
            self.counts.early_follows += 1
            if not self._early.keep(job, EarlyFollow(reader, message, stream_number), now_s):
                self._refuse(reader, message.transfer_id, Reason.LEASE_LOST)
            return
        if transfer.reader is None or not transfer.reader.is_same_incarnation(reader):
            self._refuse(reader, message.transfer_id, Reason.WRONG_EPOCH)
            return
        if transfer.lifecycle.state is not State.CREATED:  # the same reader follows this job with another transfer
            self._refuse(reader, message.transfer_id, Reason.SUPERSEDED)
            return
        self._start_following(transfer, reader, message, stream_number, now_s)

    def _follow_prefix(
        self,
        reader: WorkerRef,
        message: Follow,
        subject: HashRange,
        stream_number: int,
        now_s: float,
        max_regions: int,
    ) -> None:
        key: PullKey = (reader.incarnation, message.transfer_id)
        transfer = OwnedTransfer(
            key=key,
            lifecycle=Lifecycle(OWNED_TRANSFER_TRANSITIONS, State.CREATED),
            prefix=subject,
            max_regions=max_regions,
            moving_session=subject.moving_session,
        )
        is_reloading = (
            subject.reload_within_s > 0
            and len(self._readable(transfer)) < len(hashes_of_prefix(subject.hashes, self._windows))
            and self._start_reload(key, subject)
        )
        self._transfers[key] = transfer
        self._pin_prefix(transfer, is_final=not is_reloading)
        self._start_following(transfer, reader, message, stream_number, now_s)

    def _readable(self, transfer: OwnedTransfer) -> tuple[int, ...]:
        """Return the blocks of a prefix that its reader can read, as far as they are without a gap."""
        assert transfer.prefix is not None
        wanted = hashes_of_prefix(transfer.prefix.hashes, self._windows)
        found = tuple(self._lookup(wanted))[: len(wanted)]
        if transfer.max_regions == 1:
            found = tuple(takewhile(lambda block_id: block_id < self._num_blocks, found))
        return found

    def _pin_prefix(self, transfer: OwnedTransfer, *, is_final: bool) -> None:
        """Pin what can be read of a prefix, in place of what was pinned before.

        is_final: it can be announced; else it is only kept during a reload
        """
        assert transfer.prefix is not None
        hashes, found, pinned_before = transfer.prefix.hashes, self._readable(transfer), transfer.pinned
        wanted, num_blocks = hashes_of_prefix(hashes, self._windows), len(hashes)
        if len(found) < len(wanted):
            entries = entries_from(self._windows.first_blocks(num_blocks * self._block_size), num_blocks)
            num_blocks = entries[len(found)] // self._windows.num_tables
        self._pins.pin(found)
        self._pins.unpin(pinned_before)
        transfer.block_ids = transfer.pinned = found
        transfer.hashes = tuple(wanted[: len(found)])
        transfer.num_ready = len(found) if is_final else 0
        transfer.num_computed_tokens, transfer.is_final = num_blocks * self._block_size, is_final

    def _start_following(
        self, transfer: OwnedTransfer, reader: WorkerRef, message: Follow, stream_number: int, now_s: float
    ) -> None:
        transfer.reader, transfer.transfer_id = reader, message.transfer_id
        transfer.lifecycle.move(State.FOLLOWED)
        self._by_reader.setdefault(reader.incarnation, {})[message.transfer_id] = transfer
        transfer.span = self._tracing.start("kv lease", message.trace_context, at_s=now_s)
        self.counts.followed += 1
        self._transfer_until.drop(transfer.key)  # the lease may end before the claim timeout would have
        self._follow_again(transfer, message, stream_number, now_s)

    def _follow_again(self, transfer: OwnedTransfer, message: Follow, stream_number: int, now_s: float) -> None:
        """Continue from `resume_from_block`. A Follow also renews the lease of its transfer."""
        transfer.stream_number = stream_number
        self._transfer_until.set(transfer.key, now_s + self._lease_s)
        if transfer.lost is not None and transfer.reader is not None:
            self._send(transfer.reader, Lost(transfer_id=message.transfer_id, reason=transfer.lost))
            return
        transfer.next_block = message.resume_from_block
        transfer.final_sent = False
        self._announce_new(transfer)

    def _announce_new(self, transfer: OwnedTransfer) -> None:
        ready = transfer.take_announcement(self._pins.generation)
        if ready is not None and transfer.reader is not None:
            self._send(transfer.reader, ready)

    def _refuse(self, reader: WorkerRef, transfer_id: TransferId, reason: Reason) -> None:
        self.counts.refused_follows += 1
        self._send(reader, Lost(transfer_id=transfer_id, reason=reason))

    def _end(self, transfer: OwnedTransfer, reason: Reason, now_s: float, *, by_reader: bool = False) -> None:
        transfer.lifecycle.move(State.ENDED)
        if transfer.span.is_recorded:
            attributes = {
                "baton.outcome": "released" if by_reader else reason.value,
                "baton.blocks": len(transfer.pinned),
            }
            transfer.span.end(attributes, problem="" if by_reader else reason.value, at_s=now_s)
        self._pins.unpin(transfer.pinned)
        transfer.pinned = ()
        del self._transfers[transfer.key]
        self._transfer_until.drop(transfer.key)
        keys: list[Key] = [transfer.key]
        if transfer.reader is not None and transfer.transfer_id is not None:
            incarnation = transfer.reader.incarnation
            self._by_reader[incarnation].pop(transfer.transfer_id, None)
            if not self._by_reader[incarnation]:
                del self._by_reader[incarnation]
            if not by_reader:
                # The memory of ended transfers may be shorter than the time to the next renewal.
                self._send(transfer.reader, Lost(transfer_id=transfer.transfer_id, reason=reason))
                self._ended.add_without_reader(incarnation, transfer.transfer_id)
            keys.append((incarnation, transfer.transfer_id))
        for key in dict.fromkeys(keys):
            self._ended.add(key, reason, now_s)
