"""Of several transfer backends of a pair, the fastest one that works is used; a broken link chooses again."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.errors import LayoutMismatch, Reason, Refused
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage, PeerHello
from baton.transfer.backend import SendGroup, drop_message
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.transfer.owner.owner_service import readable_regions
from baton.transfer.reader.backend_choice import CHOICE_MIN_S, TRIAL_READ_S
from baton.transfer.reader.owner_regions import MAX_BLOCKS, regions_by_transfer
from tests import builders
from tests.unit.transfer.choice_rig import NAMES, choice_rig, slow_down
from tests.unit.transfer.pulls import pull_all, refusal_of, virtual
from tests.unit.transfer.transfer_rig import (
    NUM_BLOCKS,
    OWNER,
    READ_S,
    READER,
    Fabric,
    FakeBackend,
)


@virtual
@pytest.mark.parametrize("fastest", NAMES)
async def test_the_fastest_backend_reads_and_the_others_are_disconnected(fastest: str) -> None:
    async with choice_rig() as c:
        slow_down(c, **{name: 1.0 if name == fastest else 5.0 for name in NAMES})
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == fastest
        assert all(name in c.reason and "GB/s" in c.reason for name in NAMES)
        await pull_all(c.rig)
        assert {name for name, fabric in c.fabrics.items() if fabric.reads} == {fastest}
        assert {name for name, pair in c.backends.items() if pair[1].forgotten} == set(NAMES) - {fastest}


@virtual
async def test_pulls_wait_for_the_choice() -> None:
    async with choice_rig() as c:
        slow_down(c, one=5.0, three=5.0)
        job, _blocks = c.rig.prefill("a", 18)
        pull = c.rig.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = c.rig.mark_received(pull, 5)
        await pull.done()
        c.rig.release(receiving)
        assert {name for name, fabric in c.fabrics.items() if fabric.reads} == {"two"}


@virtual
async def test_a_backend_that_fails_is_not_chosen() -> None:
    async with choice_rig() as c:
        c.fabrics["one"].failing = True
        c.fabrics["two"].read_s = 3 * READ_S
        c.fabrics["three"].read_s = 2 * READ_S
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == "three"
        assert "one transfer_failed" in c.reason
        assert c.rig.observed.broken[-1] is False
        await pull_all(c.rig)


@virtual
async def test_if_all_fail_the_link_is_broken_and_chosen_later() -> None:
    async with choice_rig() as c:
        for fabric in c.fabrics.values():
            fabric.failing = True
        assert not await c.rig.kv_reader.warmed(OWNER)
        with pytest.raises(Refused, match="transfer_failed"):
            c.rig.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        c.fabrics["three"].failing = False
        await asyncio.sleep(CHOICE_MIN_S + 2)
        assert c.transport == "three"
        await pull_all(c.rig)


@virtual
async def test_a_link_that_breaks_uses_another_backend_after_a_pause() -> None:
    async with choice_rig() as c:
        slow_down(c, two=5.0, three=3.0)
        await pull_all(c.rig)
        assert c.transport == "one"
        c.fabrics["one"].failing = True
        job, _blocks = c.rig.prefill("b", 18, 1)
        pull = c.rig.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = c.rig.mark_received(pull, 5)
        assert (await refusal_of(pull.done())).reason is Reason.TRANSFER_FAILED
        c.rig.release(receiving)
        await asyncio.sleep(CHOICE_MIN_S + 2)
        assert c.transport == "three"
        assert "one transfer_failed" in c.reason


@virtual
async def test_a_probe_repairs_the_chosen_backend_without_another_choice() -> None:
    async with choice_rig() as c:
        slow_down(c, two=5.0, three=5.0)
        await pull_all(c.rig)
        measured = c.fabrics["two"].probes
        c.fabrics["one"].failing = True
        c.rig.kv_reader.probe(OWNER)
        await asyncio.sleep(1.0)
        (link,) = c.rig.kv_reader.links()
        assert link.broken
        c.fabrics["one"].failing = False
        await asyncio.sleep(2.0)
        (link,) = c.rig.kv_reader.links()
        assert (link.broken, link.transport, c.fabrics["two"].probes) == (False, "one", measured)


@virtual
async def test_a_link_is_broken_until_it_has_chosen_again() -> None:
    async with choice_rig() as c:
        slow_down(c, two=5.0, three=3.0)
        await pull_all(c.rig)
        c.fabrics["one"].failing = True
        c.rig.kv_reader.probe(OWNER)
        await asyncio.sleep(1.0)
        assert c.rig.kv_reader.links()[0].broken
        c.fabrics["three"].reads_may_end.clear()
        connect = c.backends["one"][1].connect
        chosen_again = asyncio.Event()

        def work_again(peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
            c.fabrics["one"].failing = False
            chosen_again.set()
            connect(peer, layout, send)

        c.backends["one"][1].connect = work_again  # type: ignore[method-assign]
        await chosen_again.wait()
        await asyncio.sleep(0.3)  # the first backend works, and the last one is still measured
        assert c.fabrics["three"].running > 0
        with pytest.raises(Refused, match="transfer_failed"):
            c.rig.kv_reader.pull(OWNER, builders.job_id(7), have_blocks=0)
        await asyncio.sleep(TRIAL_READ_S)
        assert (c.rig.kv_reader.links()[0].broken, c.transport) == (False, "one")
        c.fabrics["three"].reads_may_end.set()
        await asyncio.sleep(5)


@virtual
async def test_a_backend_that_raises_an_error_is_not_chosen() -> None:
    async with choice_rig() as c:
        slow_down(c, two=2.0, three=3.0)
        connect, calls = c.backends["one"][1].connect, []

        def fail_later(peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
            calls.append(peer)
            if len(calls) > 2:  # the first calls are those of the hello
                raise RuntimeError("can't start new thread")
            connect(peer, layout, send)

        c.backends["one"][1].connect = fail_later  # type: ignore[method-assign]
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == "two"
        assert "one transfer_failed" in c.reason


@virtual
async def test_a_silent_backend_delays_the_choice_for_a_short_time() -> None:
    async with choice_rig() as c:
        c.fabrics["one"].reads_may_end.clear()
        began_s = asyncio.get_running_loop().time()
        assert await c.rig.kv_reader.warmed(OWNER)
        assert asyncio.get_running_loop().time() - began_s < TRIAL_READ_S + 1
        assert c.transport in ("two", "three")
        c.fabrics["one"].reads_may_end.set()
        await asyncio.sleep(1)


@virtual
async def test_memory_that_does_not_fit_leaves_its_backend_out() -> None:
    async with choice_rig() as c:
        slow_down(c, one=2.0, two=3.0)

        def refuse(peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
            raise LayoutMismatch("memory_kind: of another host")

        c.backends["three"][1].connect = refuse  # type: ignore[method-assign]
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == "one"
        assert c.reason.endswith(", three left out (memory_kind: of another host)")


@virtual
async def test_a_link_is_refused_if_no_backend_is_fast_enough() -> None:
    fast_gbps = builders.layout().block_bytes * 8 / READ_S / 1e9
    async with choice_rig(min_link_gbps=fast_gbps / 3) as c:
        slow_down(c, one=10.0, two=20.0, three=30.0)
        assert not await c.rig.kv_reader.warmed(OWNER)
        (link,) = c.rig.kv_reader.links()
        assert link.problem.startswith("refused: measured")
        assert link.transport == "one"


@virtual
async def test_messages_of_groups_reach_only_two_sided_backends() -> None:
    async with choice_rig() as c:
        c.backends["two"][1]._two_sided = True
        slow_down(c, one=2.0, three=2.0)
        assert await c.rig.kv_reader.warmed(OWNER)
        server = c.backends["two"][0].servers[-1]
        server.send(GroupMessage(group=1, key="k", value=b"v"))
        c.backends["two"][1].send_group(GroupMessage(group=2, key="to the owner"))
        await asyncio.sleep(0.1)
        assert [message.group for message in c.backends["two"][1].received] == [1]
        assert c.backends["one"][1].received == []
        assert [message.group for message in server.received] == [2]
        c.rig.cut()
        await asyncio.sleep(0.5)
        assert server.is_closed
        assert len(c.backends["two"][0].servers) == 2


@virtual
async def test_backends_that_are_no_candidates_are_named_although_one_is_left() -> None:
    async with choice_rig(owner_names=["two"], not_available={"four": "not installed"}) as c:
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == "two"
        assert c.reason == (
            "four left out (not installed), one left out (the owner does not have it), "
            "three left out (the owner does not have it)"
        )


@virtual
async def test_a_new_choice_ranks_by_its_own_measurement() -> None:
    async with choice_rig() as c:
        slow_down(c, two=100.0, three=3.0)
        await pull_all(c.rig)
        assert c.transport == "one"
        c.fabrics["one"].failing = True
        slow_down(c, two=1.5)
        c.rig.kv_reader.probe(OWNER)
        await asyncio.sleep(CHOICE_MIN_S + 2)
        assert c.transport == "two"
        fast = builders.layout().block_bytes / READ_S
        (link,) = c.rig.kv_reader.links()
        assert link.bytes_per_s == pytest.approx(fast / 1.5)
        assert c.rig.observed.measured[-1] == pytest.approx({"one": 0.0, "two": fast / 1.5, "three": fast / 3})


def memory(transfer: str, **changes: object) -> KvMemory:
    fabric = Fabric()
    table = MemoryGenerationTable(bytearray(NUM_BLOCKS * ENTRY_BYTES), OWNER.worker_epoch)
    (described,) = FakeBackend(fabric, OWNER, builders.layout(), table, transfer=transfer).memory
    return replace(described, **changes)  # type: ignore[arg-type]


def test_regions_are_grouped_by_the_backends_of_the_reader_in_its_order() -> None:
    memories = [memory("one"), memory("two"), memory("four")]
    found = regions_by_transfer(OWNER, memories, ("two", "one", "three"))
    assert [(each.transfer, len(each.memories)) for each in found] == [("two", 1), ("one", 1)]


def test_regions_of_an_earlier_release_are_those_of_the_first_backend() -> None:
    (found,) = regions_by_transfer(OWNER, [memory("")], ("one", "two"))
    assert found.memories[0].transfer == ""


@pytest.mark.parametrize(
    ("memories", "problem"),
    [
        ([memory("four")], r"transfer: this worker has one, two, the owner four"),
        ([], "the owner none of them"),
        ([memory("one", owner=READER)], "has described memory of"),
        ([memory("one", num_blocks=0)], "num_blocks: a region has 0 blocks"),
        ([memory("one", num_blocks=MAX_BLOCKS + 1)], "num_blocks"),
        ([memory("one")] * 3, "3 regions for one; at most 2"),
        ([memory("one"), memory("two"), memory("two")], "differ between its transfer backends"),
    ],
)
def test_regions_that_cannot_be_read_are_refused(memories: list[KvMemory], problem: str) -> None:
    with pytest.raises(LayoutMismatch, match=problem):
        regions_by_transfer(OWNER, memories, ("one", "two"))


@pytest.mark.parametrize(
    ("transfers", "max_regions", "expected"),
    [
        ((), 0, ["one"]),
        ((), 2, ["one", "one"]),
        (("two",), 2, ["two", "two"]),
        (("two", "one", "two"), 1, ["two", "one"]),
        (("three",), 2, []),
    ],
)
def test_an_owner_describes_the_regions_that_the_reader_can_read(
    transfers: tuple[str, ...], max_regions: int, expected: list[str]
) -> None:
    regions = [memory("one"), memory("one", agent_name="tier"), memory("two"), memory("two", agent_name="tier")]
    hello = PeerHello(
        reader=READER, owner=OWNER, layout=builders.layout(), max_regions=max_regions, transfers=transfers
    )
    assert [region.transfer for region in readable_regions(regions, hello)] == expected
