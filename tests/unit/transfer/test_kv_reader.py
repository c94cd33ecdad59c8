"""Tests of complete pulls: received blocks equal the announced ones, also after a broken stream or a dead
owner."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.core.errors import Reason, Refused, StreamBroken
from baton.core.messages.peer_messages import FirstToken, HashRange, OwnerMessage, ReaderMessage
from tests import builders
from tests.unit.transfer import transfer_rig as rigs
from tests.unit.transfer.pulls import failure_of, pull_all, virtual
from tests.unit.transfer.transfer_rig import OWNER, READER, rig


@virtual
async def test_pull_receives_all_blocks_and_frees_everything() -> None:
    async with rig() as r:
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0, expected=r.hashes("a", 4))
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        result = await pull.done()
        assert result.first_tokens == (FirstToken(sample_index=0, token_id=42),)
        assert (result.num_blocks, result.num_computed_tokens) == (5, 18)
        assert result.kv_transfer_s > 0.0
        assert result.transfer_bytes == 5 * builders.layout().block_bytes
        assert [r.reader.contents[receiving[i]] for i in range(5)] == [f"a:{i}" for i in range(5)]
        assert r.reader.pool.lookup(r.hashes("a", 4)) == [receiving[i] for i in range(4)]
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()
        assert r.observed.ended == [None]


@virtual
async def test_blocks_are_read_while_the_owner_still_computes() -> None:
    async with rig() as r:
        job, hashes = builders.job_id(), r.hashes("a", 4)
        r.service.create(job, READER)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        block_ids = r.owner.compute("a", hashes, 5)
        r.service.allocated(job, block_ids, hashes)
        r.service.announce(job, 8)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        await asyncio.sleep(0.1)
        assert [r.reader.contents[receiving[i]] for i in range(5)] == ["a:0", "a:1", "", "", ""]
        r.service.announce(job, 18, final=True)
        await pull.done()
        assert r.reader.contents[receiving[4]] == "a:4"
        assert r.reader.pool.lookup(hashes) == [receiving[i] for i in range(4)]


@virtual
async def test_blocks_that_the_reader_holds_are_not_pulled() -> None:
    async with rig() as r:
        job, blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=3)
        await pull.first_ready()
        r.mark_received(pull, 5, have_blocks=3)
        assert (await pull.done()).num_blocks == 2
        assert [source for source, _own in r.fabric.reads] == [(blocks[3],), (blocks[4],)]


@virtual
async def test_evicted_cached_block_is_requested_again() -> None:
    async with rig() as r:
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=3)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5, have_blocks=1)
        assert (await pull.done()).num_blocks == 4
        assert [r.reader.contents[receiving[i]] for i in range(1, 5)] == ["a:1", "a:2", "a:3", "a:4"]


@virtual
async def test_at_most_two_percent_of_the_pool_is_in_flight() -> None:
    async with rig() as r:
        await asyncio.gather(*(pull_all(r, text, 18, i) for i, text in enumerate("abcd")))
        assert r.fabric.most_running_blocks == 1  # 2 % of 64
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_prefix_is_pulled_by_its_hashes() -> None:
    async with rig() as r:
        hashes = r.hashes("a", 4)
        r.owner.pool.unref(r.owner.compute("a", hashes, 4))
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=1)
        await pull.first_ready()
        receiving = r.mark_received(pull, 4, have_blocks=1)
        assert (await pull.done()).num_blocks == 3
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_partly_cached_prefix_is_received_as_far_as_it_goes() -> None:
    async with rig() as r:
        hashes = r.hashes("a", 6)
        r.owner.pool.unref(r.owner.compute("a", hashes[:3], 3))
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=0)
        receiving = r.mark_received(pull, 6)
        assert (await pull.done()).num_blocks == 3
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_follow_may_arrive_before_its_job() -> None:
    async with rig() as r:
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        await asyncio.sleep(rigs.REORDER_WINDOW_S / 2)
        r.prefill("a", 18)
        await pull.first_ready()
        r.mark_received(pull, 5)
        assert (await pull.done()).num_blocks == 5


@virtual
async def test_job_unknown_to_the_owner_fails_the_pull() -> None:
    async with rig() as r:
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        assert await failure_of(pull.first_ready()) is Reason.LEASE_LOST
        assert asyncio.get_running_loop().time() < 1.0


@virtual
async def test_lease_is_renewed_while_the_owner_computes() -> None:
    async with rig() as r:
        r.service.create(builders.job_id(), READER)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        await asyncio.sleep(10 * rigs.LEASE_S)
        r.prefill("a", 18)
        await pull.first_ready()
        await asyncio.sleep(10 * rigs.LEASE_S)  # waiting for our own memory
        r.mark_received(pull, 5)
        assert (await pull.done()).num_blocks == 5


@virtual
@pytest.mark.parametrize("at", range(0, 60, 3))
async def test_pull_survives_a_broken_stream(at: int) -> None:
    async with rig() as r:
        job, hashes = builders.job_id(), r.hashes("a", 4)
        r.service.create(job, READER)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        asyncio.get_running_loop().call_later(at * 0.002, r.cut)
        block_ids = r.owner.compute("a", hashes, 5)
        await asyncio.sleep(0.02)
        r.service.allocated(job, block_ids, hashes)
        r.service.announce(job, 8)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        await asyncio.sleep(0.03)
        r.service.announce(job, 18, final=True, first_tokens=[FirstToken(sample_index=0, token_id=1)])
        r.owner.pool.unref(block_ids)
        result = await pull.done()
        assert result.first_tokens
        assert [r.reader.contents[receiving[i]] for i in range(5)] == [f"a:{i}" for i in range(5)]
        r.release(receiving)
        await asyncio.sleep(
            rigs.LEASE_S + 0.1
        )  # a farewell that was lost with its stream leaves the lease to end by itself
        r.check_nothing_leaks()
        assert r.end.num_streams == 2


@virtual
async def test_hello_reply_comes_before_what_is_announced_while_the_old_stream_closes() -> None:
    async with rig() as r:
        job, hashes = builders.job_id(), r.hashes("a", 4)
        r.service.create(job, READER)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await asyncio.sleep(0.1)
        r.service.allocated(job, r.owner.compute("a", hashes, 5), hashes)
        old = SlowlyClosing(asyncio.Event(), on_close=lambda: r.service.announce(job, 18, final=True))
        r.service._streams[READER.incarnation] = old  # its break was not noticed here
        r.cut()
        await asyncio.sleep(rigs.RENEW_S)
        old.may_close.set()
        await pull.first_ready()
        assert r.end.num_streams == 2


@dataclass
class SlowlyClosing:
    """The owner's end of a stream that takes time to close."""

    may_close: asyncio.Event
    on_close: Callable[[], None]

    def send(self, message: OwnerMessage) -> None:
        raise StreamBroken("the other end is gone")

    async def receive(self) -> ReaderMessage:
        raise StreamBroken("the other end is gone")

    async def aclose(self) -> None:
        self.on_close()
        await self.may_close.wait()


@virtual
async def test_owner_death_fails_the_pull_within_a_lease() -> None:
    async with rig() as r:
        r.service.create(builders.job_id(), READER)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        await asyncio.sleep(0.1)
        r.network.remove(OWNER.address)
        assert await failure_of(pull.first_ready()) in (Reason.LEASE_LOST, Reason.WORKER_LOST)
        assert asyncio.get_running_loop().time() < 0.1 + rigs.LEASE_S + rigs.RENEW_S


@virtual
async def test_unreachable_owner_fails_the_pull() -> None:
    async with rig() as r:
        unreachable = builders.worker_ref("gone", epoch=3)
        pull = r.kv_reader.pull(unreachable, builders.job_id(), have_blocks=0)
        with pytest.raises(Refused) as refused:
            await pull.first_ready()
        assert refused.value.failure.retriable
        assert refused.value.failure.blamed == unreachable


@pytest.mark.fault("F-23")
@virtual
@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        ({"layout": builders.layout(model_fingerprint="b")}, Reason.LAYOUT_MISMATCH, "model_fingerprint"),
        ({"layout": builders.layout(block_size_tokens=8)}, Reason.LAYOUT_MISMATCH, "block_size_tokens"),
    ],
)
async def test_layout_mismatch_is_refused_and_names_the_field(
    change: dict[str, Any], reason: Reason, word: str
) -> None:
    async with rig() as r:
        other = rigs.PeerEnd(rigs.owner_service(r.owner, **change))
        r.network.add_worker(OWNER.address, other)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        with pytest.raises(Refused, match=word) as refused:
            await pull.first_ready()
        assert refused.value.failure.reason is reason


@virtual
async def test_other_incarnation_of_the_owner_is_not_read() -> None:
    async with rig() as r:
        before = replace(OWNER, worker_epoch=6)
        pull = r.kv_reader.pull(before, builders.job_id(), have_blocks=0)
        assert await failure_of(pull.first_ready()) is Reason.WRONG_EPOCH
        await pull_all(r)


@virtual
async def test_two_sided_owner_is_notified_of_every_read() -> None:
    async with rig(two_sided=True) as r:
        await pull_all(r)
        notified = [blocks for _read, reader, blocks in r.owner.backend.expected if reader == READER.worker_id]
        assert notified[0] == (0,)  # the probe
        assert notified[-5:] == [source for source, _own in r.fabric.reads]
