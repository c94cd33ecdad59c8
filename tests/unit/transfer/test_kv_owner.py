"""Tests of the owner's state machine: pins, leases and announcements under any order of messages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Reason
from baton.core.ids import TransferId, WorkerRef
from baton.core.kv.block_hash import NO_HASH, BlockHash, table_hash
from baton.core.kv.kv_tables import NO_BLOCK
from baton.core.messages.peer_messages import (
    RECEIVED,
    Abandon,
    FirstToken,
    Follow,
    HashRange,
    KvReady,
    Lost,
    OwnerMessage,
    Release,
    Renew,
    Renewed,
)
from baton.core.request import SessionKey
from baton.transfer.owner import early_follows
from baton.transfer.owner.kv_owner import KvOwner
from tests import builders
from tests.cpu_time import CpuTime
from tests.unit.transfer.transfer_rig import CLAIM_TIMEOUT_S, LEASE_S, READER, REORDER_WINDOW_S

TABLE = [10, 11, 12, 13, 14]
HASHES = builders.hashes_of(range(16))
OTHER = builders.worker_ref("d1", epoch=5)


@dataclass
class Pins:
    """A PinPool that counts pins. A test can give a block a new generation."""

    pinned: Counter[int] = field(default_factory=Counter)
    generations: Counter[int] = field(default_factory=Counter)

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pinned.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.pinned[block_id] > 0, f"block {block_id} is unpinned twice"
            self.pinned[block_id] -= 1

    def generation(self, block_id: int) -> int:
        return self.generations[block_id]

    @property
    def held(self) -> list[int]:
        return sorted(block_id for block_id, count in self.pinned.items() if count)


class Rig:
    def __init__(self) -> None:
        self.pins = Pins()
        self.sent: list[tuple[str, OwnerMessage]] = []
        self.cached: dict[BlockHash, int] = {}
        self.moved: list[tuple[SessionKey, int]] = []
        self.reloads: list[object] = []
        self.has_disk = True
        self.owner = KvOwner(
            layout=builders.layout(),
            num_blocks=64,
            pins=self.pins,
            send=lambda reader, message: self.sent.append((reader.worker_id, message)),
            lookup=self.lookup,
            start_reload=self.start_reload,
            on_session_moved=lambda session, num_blocks: self.moved.append((session, num_blocks)),
            lease_s=LEASE_S,
            claim_timeout_s=CLAIM_TIMEOUT_S,
            reorder_window_s=REORDER_WINDOW_S,
        )
        self.stream = self.owner.stream_opened()

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        found = []
        for block_hash in hashes:
            if block_hash not in self.cached:
                break
            found.append(self.cached[block_hash])
        return found

    def start_reload(self, key: object, prefix: HashRange) -> bool:
        if self.has_disk:
            self.reloads.append(key)
        return self.has_disk

    def prefill(self, now_s: float = 0.0, *, final: bool = True, request: int = 0) -> None:
        job = builders.job_id(request)
        self.owner.create(job, READER, now_s)
        self.owner.allocated(job, TABLE, HASHES, now_s)
        if final:
            self.owner.announce(job, 18, now_s, final=True, first_tokens=[FirstToken(sample_index=0, token_id=3)])

    def follow(
        self, now_s: float = 0.0, *, transfer: int = 1, request: int = 0, have: int = 0, resume: int = 0, **more: object
    ) -> None:
        message = Follow(
            transfer_id=TransferId(transfer),
            subject=builders.job_id(request),
            have_blocks=have,
            resume_from_block=max(have, resume),
        )
        self.owner.follow(READER, replace(message, **more), self.stream, now_s)

    def take(self) -> list[OwnerMessage]:
        sent, self.sent = [message for _reader, message in self.sent], []
        return sent


def test_blocks_of_a_job_are_pinned_from_allocation_to_release() -> None:
    r = Rig()
    r.prefill()
    assert r.pins.held == TABLE
    r.follow(0.5)
    (ready,) = r.take()
    assert ready == KvReady(
        transfer_id=TransferId(1),
        first_block_index=0,
        block_ids=tuple(TABLE),
        generations=(0,) * 5,
        hashes=(*HASHES, NO_HASH),
        num_computed_tokens=18,
        final=True,
        first_tokens=(FirstToken(sample_index=0, token_id=3),),
    )
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome="received"), 0.6)
    assert r.pins.held == []
    assert r.owner.open_leases == 0


def test_each_chunk_is_announced_once_and_the_tail_only_at_the_end() -> None:
    r = Rig()
    r.prefill(final=False)
    r.follow(have=1)
    assert r.take() == []
    r.owner.announce(builders.job_id(), 7, 0.1)
    assert r.take() == []  # the only full block is there already
    r.owner.announce(builders.job_id(), 14, 0.2)
    r.owner.announce(builders.job_id(), 14, 0.3)
    (ready,) = r.take()
    assert (ready.first_block_index, ready.block_ids, ready.final) == (1, (11, 12), False)
    r.owner.announce(builders.job_id(), 18, 0.4, final=True)
    (ready,) = r.take()
    assert (ready.first_block_index, ready.block_ids, ready.hashes[-1], ready.final) == (3, (13, 14), NO_HASH, True)


def test_blocks_that_no_layer_needs_are_neither_pinned_nor_announced() -> None:
    """The blocks before a window may have been freed already."""
    r, job = Rig(), builders.job_id()
    r.owner.create(job, READER, 0.0)
    r.owner.allocated(job, [NO_BLOCK, 11, *TABLE[2:]], HASHES, 0.0, first_blocks=(2,))
    assert r.pins.held == TABLE[2:]
    r.follow(have=0)  # a reader that did not leave them out
    r.owner.announce(job, 9, 0.1)
    assert r.take() == []
    r.owner.announce(job, 14, 0.2)
    (ready,) = r.take()
    assert (ready.first_block_index, ready.block_ids, ready.hashes) == (0, (12,), HASHES[2:3])
    assert [r.owner.may_read(READER, TransferId(1), [block_id]) for block_id in (11, 12, 13)] == [False, True, False]
    r.owner.lost(job, Reason.CANCELLED, 0.3)
    assert r.pins.held == [12]
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome="received"), 0.4)
    assert r.pins.held == []


def test_blocks_of_all_tables_are_pinned_as_they_are_given() -> None:
    """The second table has a window, so the reader needs only its last two blocks, which are given late."""
    r, job = Rig(), builders.job_id()
    r.owner.create(job, READER, 0.0)
    first_blocks = (0, 3)
    r.owner.allocated(job, [10, 20, 11, 21, 12, NO_BLOCK, 13, NO_BLOCK, 14, -1], HASHES, 0.0, first_blocks=first_blocks)
    assert r.pins.held == TABLE
    r.follow(have=0)
    r.owner.announce(job, 8, 0.1)
    r.owner.allocated(job, [10, -1, 11, -1, 12, 22, 13, 23, 14, 24], HASHES, 0.2, first_blocks=first_blocks)
    assert sorted(r.pins.held) == [*TABLE, 23, 24]
    r.owner.announce(job, 16, 0.3)
    r.owner.announce(job, 18, 0.4, final=True)
    ready = [message for message in r.take() if isinstance(message, KvReady)]
    assert [each.block_ids for each in ready] == [(10, 11), (12, 13, 23), (14, 24)]
    assert [each.first_block_index for each in ready] == [0, 2, 5]
    assert ready[1].hashes == (HASHES[2], HASHES[3], table_hash(HASHES[3], 1))
    assert ready[2].hashes == (NO_HASH, NO_HASH)
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome="received"), 0.5)
    assert r.pins.held == []


@pytest.mark.parametrize("num_computed", [0, 8, 16])
def test_a_lost_transfer_keeps_what_was_announced(num_computed: int) -> None:
    r, job = Rig(), builders.job_id()
    r.owner.create(job, READER, 0.0)
    r.owner.allocated(job, [10, -1, 11, -1, 12, -1, 13, 23, 14, -1], HASHES, 0.0, first_blocks=(0, 3))
    r.follow(have=0)
    r.owner.announce(job, num_computed, 0.1)
    r.owner.lost(job, Reason.CANCELLED, 0.2)
    assert sorted(r.pins.held) == {0: [], 8: [10, 11], 16: [10, 11, 12, 13, 23]}[num_computed]
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome="received"), 0.3)
    assert r.pins.held == []


def test_unclaimed_blocks_are_pinned_until_the_claim_timeout() -> None:
    r = Rig()
    r.prefill(final=False)
    r.owner.expire(1000.0)
    assert r.pins.held == TABLE  # still computing
    r.owner.announce(builders.job_id(), 18, 1000.0, final=True)
    r.owner.expire(1000.0 + CLAIM_TIMEOUT_S - 0.01)
    assert r.pins.held == TABLE
    r.owner.expire(1000.0 + CLAIM_TIMEOUT_S)
    assert r.pins.held == []
    assert r.owner.counts.unclaimed == 1


def test_early_follow_waits_for_the_reorder_window() -> None:
    r = Rig()
    r.follow(0.0)
    r.prefill(REORDER_WINDOW_S - 0.01)
    assert [type(m) for m in r.take()] == [KvReady]
    r.follow(1.0, transfer=2, request=2)
    r.owner.expire(1.0 + REORDER_WINDOW_S)
    assert r.take() == [Lost(transfer_id=TransferId(2), reason=Reason.LEASE_LOST)]
    assert r.owner.next_deadline_s is not None  # transfer 1's lease


def test_early_follows_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_follows, "MAX_EARLY_FOLLOWS", 2)
    r = Rig()
    for number in (1, 2, 2, 3):
        r.follow(transfer=number, request=number)
    assert r.take() == [Lost(transfer_id=TransferId(3), reason=Reason.LEASE_LOST)]
    r.owner.release(READER, Abandon(transfer_id=TransferId(1), blocks_in_doubt=0), 0.0)
    r.follow(transfer=4, request=4)
    assert r.take() == []
    r.owner.expire(REORDER_WINDOW_S)
    assert [message.transfer_id for message in r.take()] == [2, 4]


def test_abandoning_many_early_follows_takes_linear_time() -> None:
    """A search through all of them would take more than a second."""
    r = Rig()
    for number in range(12_000):
        r.follow(transfer=number + 1, request=number)
    with CpuTime() as cpu:
        for number in reversed(range(12_000)):
            r.owner.release(READER, Abandon(transfer_id=TransferId(number + 1), blocks_in_doubt=0), 0.0)
    assert cpu.spent_s < 0.25
    assert r.owner.counts.dropped_notices == 0


def test_follow_of_a_cancelled_job_gets_the_cancel_reason() -> None:
    r = Rig()
    r.prefill(final=False)
    r.owner.lost(builders.job_id(), Reason.CANCELLED, 0.1)
    assert r.pins.held == []
    r.follow(0.2)
    assert r.take() == [Lost(transfer_id=TransferId(1), reason=Reason.CANCELLED)]


def test_announced_blocks_stay_pinned_after_the_sequence_ends() -> None:
    r = Rig()
    r.prefill(final=False)
    r.follow()
    r.owner.announce(builders.job_id(), 8, 0.1)
    r.owner.lost(builders.job_id(), Reason.CANCELLED, 0.2)
    assert r.pins.held == [10, 11]
    assert r.take()[-1] == Lost(transfer_id=TransferId(1), reason=Reason.CANCELLED)
    r.owner.expire(0.0 + LEASE_S - 0.01)
    assert r.pins.held == [10, 11]
    r.owner.expire(LEASE_S)
    assert r.pins.held == []


def test_only_a_renewal_extends_a_lease() -> None:
    r = Rig()
    r.prefill()
    r.follow(0.0)
    for tick in range(1, 20):
        r.owner.renew(READER, Renew(renewal=tick), r.stream, tick * 1.0)
        r.owner.expire(tick * 1.0)
    assert r.pins.held == TABLE
    r.owner.expire(19 + LEASE_S)
    assert r.pins.held == []
    assert r.take()[-1] == Lost(transfer_id=TransferId(1), reason=Reason.LEASE_LOST)
    r.owner.renew(READER, Renew(renewal=20), r.stream, 19 + LEASE_S)
    assert r.take() == [Renewed(renewal=20, lost=(TransferId(1),))]
    r.owner.expire(19 + LEASE_S + REORDER_WINDOW_S)
    r.owner.renew(READER, Renew(renewal=21), r.stream, 30.0)
    assert r.take() == [Renewed(renewal=21)]


def test_renewal_extends_only_transfers_of_its_stream() -> None:
    r = Rig()
    r.prefill(request=0)
    r.prefill(request=1)
    r.follow(0.0, transfer=1, request=0)
    r.follow(0.0, transfer=2, request=1)
    r.stream = r.owner.stream_opened()
    r.take()
    r.follow(1.0, transfer=1, request=0, resume=3)
    (ready,) = r.take()
    assert (ready.first_block_index, ready.block_ids, ready.final) == (3, (13, 14), True)
    r.owner.renew(READER, Renew(renewal=1), r.stream, 1.5)
    r.owner.expire(LEASE_S + 0.1)
    assert r.owner.counts.leases_ended == 1
    assert r.owner.open_leases == 1
    r.owner.expire(1.5 + LEASE_S)
    assert r.owner.open_leases == 0


@pytest.mark.fault("F-24")
@pytest.mark.parametrize("count", [1, 2, 50, 3000])
def test_renewed_lease_does_not_hide_expired_ones(count: int) -> None:
    r = Rig()
    for request in range(count):
        r.prefill(request=request)
        reader = replace(READER, worker_id=f"d{request}")
        r.owner._transfers[builders.job_id(request)].reader = reader
        follow = Follow(transfer_id=TransferId(1), subject=builders.job_id(request), have_blocks=0, resume_from_block=0)
        r.owner.follow(reader, follow, r.stream, request * 1e-4)
    forever = replace(READER, worker_id="d0")
    tick_s, now_s = 0.1, 0.0
    while now_s < LEASE_S + count * 1e-4 + tick_s:
        now_s += tick_s
        r.owner.renew(forever, Renew(renewal=1), r.stream, now_s)
        r.owner.expire(now_s)
        overdue = [t for t in r.owner._transfers.values() if (r.owner._transfer_until.of(t.key) or 0) <= now_s]
        assert not overdue
    assert r.owner.open_leases == 1


# The vLLM #52234 matrix: a reference that does not hold any more is refused.


@pytest.mark.fault("F-20")
def test_unknown_transfer_id_is_refused() -> None:
    r = Rig()
    r.owner.release(READER, Release(transfer_id=TransferId(77), outcome="received"), 0.0)
    assert r.owner.counts.dropped_notices == 1
    assert not r.owner.may_read(READER, TransferId(77), (10,))
    r.follow(0.0, transfer=77, request=9)
    r.owner.expire(REORDER_WINDOW_S)
    assert r.take() == [Lost(transfer_id=TransferId(77), reason=Reason.LEASE_LOST)]


@pytest.mark.fault("F-20")
def test_block_out_of_range_is_refused() -> None:
    r = Rig()
    r.prefill()
    r.follow()
    assert r.owner.may_read(READER, TransferId(1), (10, 14))
    assert not r.owner.may_read(READER, TransferId(1), (10, 15))
    assert not r.owner.may_read(READER, TransferId(1), (-1,))
    assert not r.owner.may_read(READER, TransferId(0), (64,))
    assert not r.owner.may_read(OTHER, TransferId(1), (10,))


@pytest.mark.fault("F-20")
def test_released_transfer_is_refused() -> None:
    r = Rig()
    r.prefill()
    r.follow()
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome="received"), 0.1)
    r.take()
    r.follow(0.2)
    assert [type(m) for m in r.take()] == [Lost]
    assert not r.owner.may_read(READER, TransferId(1), (10,))
    r.follow(0.2, transfer=2)
    assert [type(m) for m in r.take()] == [Lost]
    assert r.pins.held == []


@pytest.mark.fault("F-20")
def test_reused_block_is_announced_with_its_current_generation() -> None:
    r = Rig()
    r.prefill()
    r.follow()
    (before,) = r.take()
    r.pins.generations[12] += 1  # whatever made it possible, the reader can tell
    r.follow(0.1)
    (after,) = r.take()
    assert (before.generations[2], after.generations[2]) == (0, 1)


@pytest.mark.fault("F-20")
def test_expired_lease_is_refused() -> None:
    r = Rig()
    r.prefill()
    r.follow(0.0)
    r.owner.expire(LEASE_S)
    r.take()
    r.follow(LEASE_S + 0.1)
    assert r.take() == [Lost(transfer_id=TransferId(1), reason=Reason.LEASE_LOST)]
    assert not r.owner.may_read(READER, TransferId(1), (10,))


@pytest.mark.parametrize(
    ("reader", "reason"), [(OTHER, Reason.WRONG_EPOCH), (replace(READER, worker_epoch=1), Reason.WRONG_EPOCH)]
)
def test_only_the_reader_of_the_job_may_follow_it(reader: WorkerRef, reason: Reason) -> None:
    r = Rig()
    r.prefill()
    follow = Follow(transfer_id=TransferId(1), subject=builders.job_id(), have_blocks=0, resume_from_block=0)
    r.owner.follow(reader, follow, r.stream, 0.0)
    assert r.take() == [Lost(transfer_id=TransferId(1), reason=reason)]


@pytest.mark.parametrize("wrong", [{"transfer_id": 0}, {"have_blocks": -1}, {"have_blocks": 3, "resume_from_block": 2}])
def test_invalid_follow_is_refused(wrong: dict[str, int]) -> None:
    r = Rig()
    r.prefill()
    r.follow(**wrong)
    assert [type(m) for m in r.take()] == [Lost]
    assert r.pins.held == TABLE


def test_prefix_is_pinned_as_far_as_it_is_cached() -> None:
    r = Rig()
    r.cached = dict(zip(HASHES[:3], [20, 21, 22], strict=True))
    r.follow(0.0, subject=HashRange(hashes=HASHES), have=1)
    (ready,) = r.take()
    assert (ready.first_block_index, ready.block_ids, ready.hashes) == (1, (21, 22), HASHES[1:3])
    assert (ready.final, ready.num_computed_tokens) == (True, 12)
    assert r.pins.held == [20, 21, 22]
    r.owner.expire(LEASE_S)
    assert r.pins.held == []


@pytest.mark.parametrize(
    ("end", "has_moved"),
    [
        (Release(transfer_id=TransferId(1), outcome=RECEIVED), True),
        (Release(transfer_id=TransferId(1), outcome="validation_failed"), False),
        (Abandon(transfer_id=TransferId(1), blocks_in_doubt=1), False),
        (None, False),
    ],
    ids=["received", "failed", "abandoned", "lease ended"],
)
def test_session_has_moved_once_its_kv_was_received(end: Release | Abandon | None, has_moved: bool) -> None:
    r, session = Rig(), SessionKey("t", "s")
    r.cached = dict(zip(HASHES[:3], [20, 21, 22], strict=True))
    r.follow(0.0, subject=HashRange(hashes=HASHES, moving_session=session))
    assert r.moved == []
    if end is None:
        r.owner.expire(LEASE_S)
    else:
        r.owner.release(READER, end, 0.1)
        r.owner.release(READER, end, 0.2)
    assert r.moved == [(session, 3)] * has_moved


FROM_DISK = HashRange(hashes=HASHES, reload_within_s=0.5)
"""A prefix that the owner may reload."""


def test_prefix_on_disk_is_announced_after_its_reload() -> None:
    r = Rig()
    r.cached = dict(zip(HASHES[:2], [20, 21], strict=True))
    r.follow(0.0, subject=FROM_DISK, have=1)
    assert (r.take(), len(r.reloads), r.pins.held) == ([], 1, [20, 21])
    r.follow(0.1, subject=FROM_DISK, have=1)  # the reader has connected again
    assert (r.take(), len(r.reloads)) == ([], 1)
    r.cached = dict(zip(HASHES, [20, 31, 32, 33], strict=True))
    r.owner.prefix_reloaded(r.reloads[0], 0.2)
    (ready,) = r.take()
    assert (ready.first_block_index, ready.block_ids, ready.hashes) == (1, (31, 32, 33), HASHES[1:])
    assert (ready.final, ready.num_computed_tokens) == (True, 16)
    assert r.pins.held == [20, 31, 32, 33]
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome=RECEIVED), 0.3)
    assert r.pins.held == []


def test_reload_that_failed_leaves_what_is_in_memory() -> None:
    r = Rig()
    r.cached = dict(zip(HASHES[:2], [20, 21], strict=True))
    r.follow(0.0, subject=FROM_DISK)
    r.owner.prefix_reloaded(r.reloads[0], 0.2)
    (ready,) = r.take()
    assert (ready.block_ids, ready.final, ready.num_computed_tokens) == ((20, 21), True, 8)


@pytest.mark.parametrize(
    ("subject", "num_cached", "has_disk", "num_reloads"),
    [
        (HashRange(hashes=HASHES), 2, True, 0),
        (FROM_DISK, 4, True, 0),
        (FROM_DISK, 2, False, 0),
        (FROM_DISK, 2, True, 1),
    ],
    ids=["not allowed", "all in memory", "nothing on disk", "on disk"],
)
def test_prefix_is_announced_at_once_if_there_is_nothing_to_reload(
    subject: HashRange, num_cached: int, has_disk: bool, num_reloads: int
) -> None:
    r = Rig()
    r.has_disk = has_disk
    r.cached = dict(zip(HASHES[:num_cached], range(20, 20 + num_cached), strict=True))
    r.follow(0.0, subject=subject)
    assert (len(r.take()), len(r.reloads)) == (1 - num_reloads, num_reloads)


@pytest.mark.parametrize("end", ["abandon", "lease", "close"])
def test_reload_after_the_end_of_its_transfer_pins_nothing(end: str) -> None:
    r = Rig()
    r.cached = dict(zip(HASHES[:2], [20, 21], strict=True))
    r.follow(0.0, subject=FROM_DISK)
    if end == "abandon":
        r.owner.release(READER, Abandon(transfer_id=TransferId(1), blocks_in_doubt=0), 0.1)
    elif end == "lease":
        r.owner.expire(LEASE_S)
    else:
        r.owner.close(Reason.WORKER_LOST, 0.1)
    r.take()
    r.owner.prefix_reloaded(r.reloads[0], 0.2)
    assert (r.take(), r.pins.held) == ([], [])


def test_late_follow_does_not_recreate_a_released_prefix() -> None:
    r = Rig()
    r.cached = dict(zip(HASHES[:3], [20, 21, 22], strict=True))
    r.follow(0.0, subject=HashRange(hashes=HASHES))
    r.owner.release(READER, Release(transfer_id=TransferId(1), outcome="received"), 0.1)
    r.take()
    r.follow(0.2, subject=HashRange(hashes=HASHES))
    assert [type(m) for m in r.take()] == [Lost]
    assert r.pins.held == []


def test_ended_transfers_leave_nothing_behind() -> None:
    r = Rig()
    for request in range(100):
        r.prefill(request=request)
        r.follow(0.0, transfer=request + 1, request=request)
    r.owner.expire(LEASE_S)
    r.owner.expire(LEASE_S + REORDER_WINDOW_S)
    owner = r.owner
    left = (
        owner._transfers,
        owner._ended,
        owner._early,
        owner._transfer_until,
        owner._early._until,
        owner._ended._until,
    )
    assert [len(kept) for kept in left] == [0] * 6
    assert (owner._by_reader, owner._ended._without_reader) == ({}, {})
    assert owner.next_deadline_s is None


NOTICES = st.sampled_from(
    ["born", "allocated", "announce", "final", "lost", "follow", "resume", "renew", "release", "abandon", "stream"]
)


@pytest.mark.fault("F-19")
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(NOTICES, st.integers(0, 2), st.floats(0, 1.5)), max_size=40))
def test_messages_in_any_order_and_number_are_safe(notices: list[tuple[str, int, float]]) -> None:
    """Duplicate, late and early messages raise nothing, unpin nothing twice, and leave nothing after the
    leases end."""
    r, now_s = Rig(), 0.0
    computing: set[int] = set()
    for notice, request, pause_s in notices:
        now_s += pause_s
        r.owner.expire(now_s)
        job, transfer = builders.job_id(request), TransferId(request + 1)
        match notice:
            case "born":
                r.owner.create(job, READER, now_s)
                computing.add(request)
            case "allocated":
                r.owner.allocated(job, TABLE, HASHES, now_s)
            case "announce":
                r.owner.announce(job, 9, now_s)
            case "final":
                r.owner.announce(job, 18, now_s, final=True)
                computing.discard(request)
            case "lost":
                r.owner.lost(job, Reason.CANCELLED, now_s)
                computing.discard(request)
            case "follow":
                r.follow(now_s, transfer=transfer, request=request)
            case "resume":
                r.follow(now_s, transfer=transfer, request=request, resume=3)
            case "renew":
                r.owner.renew(READER, Renew(renewal=1), r.stream, now_s)
            case "release":
                r.owner.release(READER, Release(transfer_id=transfer, outcome="received"), now_s)
            case "abandon":
                r.owner.release(READER, Abandon(transfer_id=transfer, blocks_in_doubt=1), now_s)
            case "stream":
                r.stream = r.owner.stream_opened()
        assert set(r.pins.held) <= set(TABLE)
    for request in computing:  # a worker always says how its jobs end
        r.owner.lost(builders.job_id(request), Reason.CANCELLED, now_s)
    r.owner.expire(now_s + max(LEASE_S, CLAIM_TIMEOUT_S))
    r.owner.expire(now_s + max(LEASE_S, CLAIM_TIMEOUT_S) + REORDER_WINDOW_S)
    assert r.pins.held == []
    assert r.owner.open_leases == 0
    assert r.owner.next_deadline_s is None
