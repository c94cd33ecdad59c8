"""Process groups: late answers, silence, refused reads, new streams, hostile messages, leaks."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from random import Random

import psutil
import pytest

from baton.core.errors import ConfigError, LayoutMismatch
from baton.core.ids import ReadId
from baton.core.messages.peer_messages import GroupMessage
from baton.transfer.backend import MAX_READ_BYTES, GenerationEntry, ReadState
from baton.transfer.backends.collective import collective_backend
from baton.transfer.backends.collective.collective_backend import CollectiveBackend
from baton.transfer.backends.collective.group_kinds import GlooKind
from baton.transfer.backends.collective.group_server import MAX_WAITING_MESSAGES
from baton.transfer.backends.collective.message_format import MessageFormat, MessageHeader
from baton.transfer.backends.collective.reading_group import GroupRead, ReadingGroup
from baton.transfer.backends.collective.rendezvous_store import (
    MAX_KEYS,
    MAX_VALUE_BYTES,
    RendezvousClosed,
    RendezvousStore,
)
from baton.transfer.backends.host_memory import HostMemory, allocate_private
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from baton.transfer.reader.peer_reads import MAX_INFLIGHT_BYTES
from tests import builders
from tests.contract.transfer_backends import LAYOUT, NUM_BLOCKS, WORKERS, Endpoint, Pair, pattern
from tests.scale import sized

pytestmark = [pytest.mark.contract, pytest.mark.model, pytest.mark.timeout(120)]

SILENCE_S = 2.0
OWN_WORKERS = (*WORKERS, builders.worker_ref("d1", epoch=9))


def endpoint(
    number: int, *, silence_s: float = SILENCE_S, memories: list[HostMemory], num_blocks: int = NUM_BLOCKS
) -> Endpoint:
    worker, memory = OWN_WORKERS[number], allocate_private(num_blocks, LAYOUT.block_bytes)
    memories.append(memory)
    table = MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    kind = GlooKind(LAYOUT, memory, host="127.0.0.1")
    backend = CollectiveBackend(worker=worker, layout=LAYOUT, kind=kind, num_blocks=num_blocks, silence_s=silence_s)

    def fill(block_id: int, seed: int) -> None:
        memoryview(memory.kv[block_id].data)[:] = pattern(seed, LAYOUT.block_bytes)

    def holds(block_id: int, seed: int) -> bool:
        return bytes(memory.kv[block_id]) == pattern(seed, LAYOUT.block_bytes)

    return Endpoint(worker=worker, backend=backend, generation_table=table, fill=fill, holds=holds)


@asynccontextmanager
async def connected(silence_s: float = SILENCE_S, owner_blocks: int = NUM_BLOCKS) -> AsyncIterator[Pair]:
    memories: list[HostMemory] = []
    pair = Pair(
        owner=endpoint(0, silence_s=silence_s, memories=memories, num_blocks=owner_blocks),
        reader=endpoint(1, silence_s=silence_s, memories=memories),
    )
    pair.reader.backend.connect(pair.memory, LAYOUT, pair.send)
    for block_id in range(NUM_BLOCKS):
        pair.owner.fill(block_id, block_id)
        pair.reader.fill(block_id, 900 + block_id)
    try:
        yield pair
    finally:
        pair.server.close()
        for each in (pair.reader, pair.owner):
            await each.backend.aclose()
        for memory in memories:
            memory.close()


async def state_of(pair: Pair, read_id: ReadId) -> ReadState:
    state = await pair.reader.backend.wait_ended(read_id)
    pair.reader.backend.release(read_id)
    return state


def start_unannounced(pair: Pair, blocks: dict[int, int]) -> ReadId:
    """Start a read that the owner is not told of."""
    read_id = ReadId(next(pair.read_ids))
    pair.reader.backend.start_read(read_id, pair.describe(tuple(blocks)), tuple(blocks.values()))
    return read_id


def announce(pair: Pair, read_id: ReadId, block_ids: Sequence[int]) -> None:
    asyncio.get_running_loop().call_soon(pair.server.expect_read, read_id, block_ids)


def refuse(pair: Pair, read_id: ReadId, num_blocks: int) -> None:
    asyncio.get_running_loop().call_soon(pair.server.refuse_read, read_id, num_blocks)


async def test_a_read_without_an_answer_fails_and_the_next_one_works_in_a_new_group() -> None:
    async with connected() as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        assert await state_of(pair, start_unannounced(pair, {1: 1})) is ReadState.FAILED
        assert pair.reader.holds(1, 901)
        assert await pair.read({2: 2}) is ReadState.DONE
        assert pair.reader.holds(2, 2)


async def test_the_late_answer_to_an_abandoned_read_lands_nowhere() -> None:
    async with connected() as pair:
        late = start_unannounced(pair, {1: 1})
        assert await state_of(pair, late) is ReadState.FAILED
        announce(pair, late, (1,))  # goes to the old group, which has ended
        assert await pair.read({2: 2}) is ReadState.DONE
        announce(pair, ReadId(999), (5,))  # an answer that nothing waits for
        read_id = pair.start({3: 3})
        assert await state_of(pair, read_id) is ReadState.FAILED  # the answer of another read came
        assert pair.reader.holds(1, 901)
        assert pair.reader.holds(3, 903)
        assert await pair.read({3: 3}) is ReadState.DONE
        assert pair.reader.holds(3, 3)


async def test_a_refused_read_is_lost_at_once_and_the_group_stays() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        read_id = start_unannounced(pair, {1: 1, 2: 2})
        following = start_unannounced(pair, {3: 3})
        refuse(pair, read_id, 2)
        announce(pair, following, (3,))
        assert await state_of(pair, read_id) is ReadState.LOST
        assert await state_of(pair, following) is ReadState.DONE
        assert (pair.reader.holds(1, 901), pair.reader.holds(3, 3)) == (True, True)


async def test_blocks_that_the_owner_does_not_have_are_refused() -> None:
    async with connected(silence_s=60) as pair:
        read_id = start_unannounced(pair, {1: 1})
        announce(pair, read_id, (NUM_BLOCKS,))
        assert await state_of(pair, read_id) is ReadState.LOST


async def test_a_new_stream_ends_reads_of_the_old_one_and_its_late_close_harms_nothing() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        old_server, waiting = pair.server, start_unannounced(pair, {1: 1})
        pair.server = pair.owner.backend.serve(pair.reader.worker, pair._to_reader)

        def send_on_new_stream(message: GroupMessage) -> None:
            asyncio.get_running_loop().call_soon(pair.server.receive, message)

        pair.reader.backend.connect(pair.memory, LAYOUT, send_on_new_stream)
        assert await state_of(pair, waiting) is ReadState.LOST
        assert await pair.read({2: 2}) is ReadState.DONE
        old_server.close()
        assert await pair.read({3: 3}) is ReadState.DONE
        assert pair.reader.holds(3, 3)


async def test_the_end_of_the_owners_stream_ends_running_reads() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        waiting = start_unannounced(pair, {1: 1})
        pair.server.close()
        assert await state_of(pair, waiting) is ReadState.LOST


async def test_a_silent_owner_delays_no_other_pair_of_its_reader() -> None:
    memories: list[HostMemory] = []
    async with connected(silence_s=60) as silent:
        other = Pair(owner=endpoint(2, memories=memories), reader=silent.reader, read_ids=count(1000))
        other.reader.backend.connect(other.memory, LAYOUT, other.send)
        other.owner.fill(2, 2)
        waiting = start_unannounced(silent, {1: 1})
        for _ in range(20):
            assert await other.read({2: 2}) is ReadState.DONE
        assert other.reader.holds(2, 2)
        assert silent.reader.backend.poll(waiting) is ReadState.RUNNING
        other.server.close()
        await other.owner.backend.aclose()
    memories[0].close()


async def test_a_silent_reader_delays_no_other_pair_of_its_owner() -> None:
    memories: list[HostMemory] = []
    async with connected(silence_s=60) as silent:
        other = Pair(owner=silent.owner, reader=endpoint(2, memories=memories), read_ids=count(1000))
        other.reader.backend.connect(other.memory, LAYOUT, other.send)
        assert await silent.read({0: 0}) is ReadState.DONE
        for number in range(8):  # answers that the reader does not expect, so that it takes none
            announce(silent, ReadId(5000 + number), (1,))
        for _ in range(20):
            assert await other.read({2: 2}) is ReadState.DONE
        assert other.reader.holds(2, 2)
        other.server.close()
        await other.reader.backend.aclose()
    memories[0].close()


@pytest.mark.parametrize("key", ["0/0", "0/1", "secret/0", "x"])
async def test_invalid_values_of_a_reader_end_its_group_only(key: str) -> None:
    async with connected() as pair:
        hostile = pair.owner.backend.serve(builders.worker_ref("d1", epoch=3), lambda message: None)
        for number in range(1, 6):
            hostile.receive(GroupMessage(group=number, key="secret/0", value=bytes(32)))
            hostile.receive(GroupMessage(group=number, key=key, value=Random(number).randbytes(170)))
            hostile.expect_read(ReadId(number), (0,))
            assert await pair.read({number: number}) is ReadState.DONE
        hostile.close()
        assert await pair.read({0: 0}) is ReadState.DONE


async def test_a_reader_that_publishes_large_values_loses_its_group_only() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        sent: list[GroupMessage] = []
        hostile = pair.owner.backend.serve(builders.worker_ref("d1", epoch=3), sent.append)
        for number, joins in ((1, True), (2, False)):  # with its first message, and later
            if joins:
                hostile.receive(GroupMessage(group=number, key="join"))
                hostile.receive(GroupMessage(group=number, key="0/0", value=bytes(MAX_VALUE_BYTES)))
                assert (number, "") not in [(message.group, message.key) for message in sent]
            hostile.receive(GroupMessage(group=number, key="0/1", value=bytes(MAX_VALUE_BYTES + 1)))
            assert (sent[-1].group, sent[-1].key) == (number, "")
            assert hostile._store is None  # type: ignore[attr-defined]
        assert await pair.read({1: 1}) is ReadState.DONE
        hostile.close()


async def test_an_owner_that_publishes_large_values_loses_its_group() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        owner = pair.reader.backend._owners[pair.owner.worker.incarnation]  # type: ignore[attr-defined]
        store, waiting = owner.store, start_unannounced(pair, {1: 1})
        large = GroupMessage(group=owner.number, key="large", value=bytes(MAX_VALUE_BYTES + 1))
        pair.reader.backend.receive(pair.memory, large)
        assert not store.check(["large"])
        assert await state_of(pair, waiting) is ReadState.LOST
        assert await pair.read({2: 2}) is ReadState.DONE
        assert pair.reader.holds(2, 2)


async def test_messages_of_ended_groups_are_dropped() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        pair.server.receive(GroupMessage(group=0, key="0/0", value=b"late"))
        pair.server.receive(GroupMessage(group=0, key=""))
        pair.reader.backend.receive(pair.memory, GroupMessage(group=99, key=""))
        assert await pair.read({1: 1}) is ReadState.DONE


async def test_an_owner_ends_the_group_of_a_reader_that_asks_for_too_much() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        most = MessageFormat.of(LAYOUT).max_blocks
        waiting = start_unannounced(pair, {1: 1})
        announce(pair, waiting, [0] * (most + 1))
        assert await state_of(pair, waiting) is ReadState.LOST
        assert await pair.read({2: 2}) is ReadState.DONE
        for number in range(MAX_WAITING_MESSAGES + 2):  # nothing is taken in between: the loop does not run
            announce(pair, ReadId(1000 + number), [0] * most)
        waiting = start_unannounced(pair, {1: 1})
        assert await state_of(pair, waiting) is ReadState.LOST
        assert await pair.read({3: 3}) is ReadState.DONE


async def test_a_worker_serves_a_limited_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_backend, "MAX_GROUPS", 1)
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        refused: list[GroupMessage] = []
        second = pair.owner.backend.serve(builders.worker_ref("d1", epoch=3), refused.append)
        second.receive(GroupMessage(group=1, key="0/0", value=b"address"))
        assert [(message.group, message.key) for message in refused] == [(1, "")]
        assert await pair.read({1: 1}) is ReadState.DONE
        second.close()


async def test_a_read_beyond_the_largest_message_is_an_error_of_the_caller() -> None:
    async with connected() as pair:
        most = MessageFormat.of(LAYOUT).max_blocks
        source = pair.describe([0] * (most + 1))
        with pytest.raises(ValueError, match=f"{most + 1} blocks; must be 1 to {most}"):
            pair.reader.backend.start_probe(ReadId(1), source)


async def test_another_kind_of_group_is_refused() -> None:
    async with connected() as pair:
        other = type(pair.memory)(
            **{name: getattr(pair.memory, name) for name in pair.memory.__dataclass_fields__}
            | {"agent_metadata": b"nccl", "agent_name": "other"}
        )
        with pytest.raises(LayoutMismatch, match=r"this worker has gloo, the peer nccl; .* --gpu-kv staged"):
            pair.reader.backend.connect(other, LAYOUT, pair.send)


def test_an_address_of_another_machine_is_refused() -> None:
    memory = allocate_private(NUM_BLOCKS, LAYOUT.block_bytes)
    with pytest.raises(ConfigError, match="--advertise-host"):
        GlooKind(LAYOUT, memory, host="192.0.2.1")
    memory.close()


async def test_generation_that_begins_while_blocks_are_copied_is_seen() -> None:
    """Entries are taken after the blocks, so a reuse during the copy shows."""
    async with connected() as pair:
        gather = pair.owner.backend._kind.messages._gather  # type: ignore[attr-defined]

        def gather_and_reuse(into: object, part: int, block_ids: tuple[int, ...]) -> None:
            gather(into, part, block_ids)
            if part == 0:
                pair.owner.generation_table.begin_generation(4)

        pair.owner.backend._kind.messages._gather = gather_and_reuse  # type: ignore[attr-defined]
        (entry,) = await pair.read_validated({4: 4})
        assert entry.generation == 1


def usage() -> dict[str, int]:
    return {"threads": threading.active_count(), "descriptors": psutil.Process(os.getpid()).num_fds()}


async def until_no_more_than(before: dict[str, int]) -> None:
    for _ in range(200):
        now = usage()
        if all(now[name] <= before[name] for name in before):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"before {before}, now {now}")


@pytest.mark.timeout(600)
async def test_connecting_and_disconnecting_leaks_nothing() -> None:
    """Acceptance 3 of the transport: in the long form a thousand times."""
    async with connected() as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        pair.reader.backend.forget(pair.memory)
        await asyncio.sleep(0.2)
        before = usage()
        for number in range(sized(30, 1000)):
            pair.reader.backend.connect(pair.memory, LAYOUT, pair.send)
            if number % 4 == 1:  # it is left while a read is under way
                read_id = pair.start({number % NUM_BLOCKS: 1})
                pair.reader.backend.forget(pair.memory)
                assert await state_of(pair, read_id) in (ReadState.DONE, ReadState.LOST)
            elif number % 4:  # else it is left while it forms
                assert await pair.read({number % NUM_BLOCKS: 1}) is ReadState.DONE
                assert pair.reader.holds(1, number % NUM_BLOCKS)
            pair.reader.backend.forget(pair.memory)
        await until_no_more_than(before)


def test_a_store_gives_what_the_other_side_has_set_and_ends_waits() -> None:
    published: list[tuple[str, bytes]] = []
    store = RendezvousStore(lambda key, value: published.append((key, value)), timeout_s=0.05)
    store.set("a", b"1")
    assert (published, store.get("a"), store.check(["a"]), store.check(["b"])) == ([("a", b"1")], b"1", True, False)
    with pytest.raises(TimeoutError, match="'b' within"):
        store.get("b")
    threading.Timer(0.01, store.deliver, ("c", b"3")).start()
    RendezvousStore.wait(store, ["a"])
    for number in range(2 * MAX_KEYS):
        store.deliver(f"k{number}", b"")
    assert not store.check([f"k{2 * MAX_KEYS - 1}"])
    store.close()
    with pytest.raises(RendezvousClosed):
        store.get("never")


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_messages_have_the_size_that_their_format_says(num_blocks: int) -> None:
    form = MessageFormat(block_bytes=100)
    header = MessageHeader(read_id=ReadId(2**63 + num_blocks), num_blocks=num_blocks, granted=num_blocks > 1)
    assert MessageHeader.decode(header.encode()) == header
    assert form.blocks_at(num_blocks) % 64 == 0
    assert form.num_bytes(num_blocks) == form.blocks_at(num_blocks) + 100 * num_blocks
    assert MessageFormat(block_bytes=2**30).max_blocks == 1


class FakeGroup:
    """A process group in which a message arrives at once, and nothing can be aborted."""

    def __init__(self) -> None:
        self.may_arrive = threading.Event()
        self.waits = threading.Event()

    def join(self) -> None:
        pass

    def start_send(self, buffer: object) -> object:
        return None

    def start_receive(self, buffer: object) -> object:
        return None

    def wait(self, work: object, timeout_s: float) -> None:
        self.waits.set()
        self.may_arrive.wait(timeout_s)

    def abort(self) -> None:
        """Do nothing, as if the message had arrived before."""

    def close(self) -> None:
        pass


class FakeMessages:
    """Messages that answer every read with the header of read 1."""

    def new_buffer(self) -> object:
        return None

    def pack(self, buffer: object, header: MessageHeader, block_ids: tuple[int, ...]) -> object:
        return None

    def expected(self, buffer: object, num_blocks: int) -> object:
        return None

    def header(self, buffer: object) -> MessageHeader:
        return MessageHeader(read_id=ReadId(1), num_blocks=1, granted=True)

    def unpack(self, buffer: object, num_blocks: int, own: tuple[int, ...] | None) -> tuple[GenerationEntry, ...]:
        return ()


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_a_group_that_is_closed_as_a_message_arrives_ends(num_waiting: int) -> None:
    ended: list[tuple[int, ReadState]] = []
    fake = FakeGroup()
    group = ReadingGroup(
        fake,
        FakeMessages(),
        name="p0",
        silence_s=30,
        on_read=lambda read, state, entries: ended.append((read.read_id, state)),
    )
    for number in range(1, 2 + num_waiting):
        assert group.put(GroupRead(read_id=ReadId(number), num_blocks=1, own=(0,)))
    assert fake.waits.wait(10)
    group.close()
    fake.may_arrive.set()
    assert group.join(10)
    assert group.has_ended
    assert ended == [(1, ReadState.DONE), *[(2, ReadState.LOST)] * num_waiting]
    assert not group.put(GroupRead(read_id=ReadId(9), num_blocks=1, own=(0,)))


def test_readers_have_half_as_much_in_flight_as_owners_serve() -> None:
    assert 2 * MAX_INFLIGHT_BYTES <= MAX_WAITING_MESSAGES * MAX_READ_BYTES


async def test_memory_of_another_owner_with_the_same_name_is_another_owner() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        hostile = replace(pair.memory, owner=builders.worker_ref("p1", epoch=99))
        sent: list[GroupMessage] = []
        pair.reader.backend.connect(hostile, LAYOUT, sent.append)
        assert await pair.read({1: 1}) is ReadState.DONE
        assert pair.reader.holds(1, 1)
        pair.reader.backend.forget(hostile)
        assert await pair.read({2: 2}) is ReadState.DONE
        assert sent[0].key == "join"


async def test_entries_of_one_read_validate_no_other_read() -> None:
    async with connected(silence_s=60) as pair:
        reader = pair.reader.backend
        first = pair.start({4: 4})
        assert await reader.wait(first) is ReadState.DONE
        pair.owner.generation_table.begin_generation(4)
        second, other = pair.start({4: 5}), pair.start({6: 6})
        for read_id in (second, other):
            assert await reader.wait(read_id) is ReadState.DONE
        assert [(await pair.entries(each, (4,)))[0].generation for each in (second, first)] == [1, 0]
        for block_ids, payload in (((4,), other), ((4, 6), first), ((4,), None)):
            with pytest.raises(ValueError, match=f"payload is {payload}; must be a read of the same blocks"):
                reader.start_read_generations(ReadId(99), pair.describe(block_ids), payload)
        reader.release(first)
        with pytest.raises(ValueError, match="not released"):
            reader.start_read_generations(ReadId(99), pair.describe((4,)), first)


def num_entries() -> int:
    """Return how many generation-table entries this process holds as objects."""
    gc.collect()
    return sum(isinstance(each, GenerationEntry) for each in gc.get_objects())


async def test_entries_of_a_read_are_kept_until_its_release_only() -> None:
    """The owner has more blocks than any limit of the reader's own pool, and all of them are read."""
    num_blocks = 2 * NUM_BLOCKS + MessageFormat.of(LAYOUT).max_blocks + 1
    async with connected(silence_s=60, owner_blocks=num_blocks) as pair:
        before = num_entries()
        for first in range(0, num_blocks - 1, NUM_BLOCKS):
            part = range(first, min(first + NUM_BLOCKS, num_blocks - 1))
            await pair.read_validated({block_id: block_id - first for block_id in part})
        assert len(await pair.read_validated({0: 0, num_blocks - 1: 1})) == 2
        late = pair.start({1: 1, 2: 2})
        assert await state_of(pair, late) is ReadState.DONE  # released, and never validated
        assert num_entries() <= before + 2  # the thread of the group may still hold those of the last read


async def test_a_read_that_its_group_did_not_serve_has_no_entries() -> None:
    async with connected(silence_s=60) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        reader, read_id = pair.reader.backend, start_unannounced(pair, {1: 1})
        refuse(pair, read_id, 1)
        assert await reader.wait(read_id) is ReadState.LOST
        reader.start_read_generations(ReadId(99), pair.describe((1,)), read_id)
        assert reader.poll(ReadId(99)) is ReadState.LOST
