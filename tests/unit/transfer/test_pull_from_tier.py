"""Pulls of prefixes whose blocks the owner has partly in a slower tier."""

import asyncio

import pytest

from baton.core.errors import Reason
from baton.core.ids import TransferId
from baton.core.messages.peer_messages import Follow, HashRange, KvReady, PeerHello, PeerHelloReply
from baton.runtime.network.in_process_network import InProcessNetwork
from tests import builders
from tests.unit.transfer.pulls import failure_of, virtual
from tests.unit.transfer.transfer_rig import NUM_BLOCKS, OWNER, READER, Rig, rig


def owner_has(r: Rig, where: str) -> tuple[bytes, ...]:
    """Store a prefix: `D` a block on the device, `T` one in the tier, `B` one in both. Returns its hashes."""
    hashes = r.hashes("a", len(where))
    for index, place in enumerate(where):
        if place in "DB":
            r.owner.pool.unref(r.owner.compute(f"a:{index}", hashes[index : index + 1], 1))
        if place in "TB":
            r.store_in_tier(f"a:{index}", hashes[index : index + 1])
    return hashes


@virtual
@pytest.mark.parametrize("where", ["TTTT", "DDTT", "TDTD", "BTBD", "DTTD"])
async def test_blocks_of_both_regions_arrive_in_one_pull(where: str) -> None:
    async with rig() as r:
        hashes = owner_has(r, where)
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=0)
        await pull.announced()
        receiving = r.mark_received(pull, 4)
        await pull.done()
        expected = [f"a:{i}:tier:0" if place == "T" else f"a:{i}:0" for i, place in enumerate(where)]
        assert [r.reader.contents[receiving[i]] for i in range(4)] == expected
        assert r.reader.pool.lookup(hashes) == [receiving[i] for i in range(4)]
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_slots_under_a_lease_are_not_reallocated() -> None:
    async with rig() as r:
        hashes = owner_has(r, "TT")
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=0)
        await pull.announced()
        r.store_in_tier("b", r.hashes("b", 30))
        assert all(r.slots.slot_of(each) is not None for each in hashes)
        receiving = r.mark_received(pull, 2)
        await pull.done()
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.store_in_tier("c", r.hashes("c", 30))
        assert [r.slots.slot_of(each) is None for each in hashes] != [False, False]
        r.check_nothing_leaks()


@virtual
async def test_content_that_is_discarded_under_a_read_is_never_used() -> None:
    async with rig() as r:
        hashes = owner_has(r, "TT")

        def withdraw() -> None:
            r.slots.discard(hashes[0])
            r.store_in_tier("other", r.hashes("other", 16))

        r.fabric.mid_read_fault = withdraw
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=0)
        await pull.announced()
        receiving = r.mark_received(pull, 2)
        assert await failure_of(pull.done()) is Reason.VALIDATION_FAILED
        assert r.observed.mismatches[0] == "generation"
        assert r.reader.visible() <= {"a:1:tier:0"}
        r.release(receiving)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_a_reader_of_an_earlier_release_sees_device_blocks_only() -> None:
    """Such a reader refuses an owner with more than one region."""
    async with rig() as r:
        hashes = owner_has(r, "DDTT")
        network: InProcessNetwork = r.network
        stream = await network.open_peer(OWNER.address)
        stream.send(PeerHello(reader=READER, owner=OWNER, layout=builders.layout()))
        reply = await stream.receive()
        assert isinstance(reply, PeerHelloReply)
        assert len(reply.memory) == 1
        subject = HashRange(hashes=hashes)
        stream.send(Follow(transfer_id=TransferId(5), subject=subject, have_blocks=0, resume_from_block=0))
        ready = await stream.receive()
        assert isinstance(ready, KvReady)
        assert (len(ready.block_ids), ready.final) == (2, True)
        assert max(ready.block_ids) < NUM_BLOCKS
        await stream.aclose()
