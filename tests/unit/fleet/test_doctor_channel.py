"""Two-sided reads of the doctor: what arrives through the channel, and how the channel ends."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.core.ids import ReadId, TransferId
from baton.core.kv.kv_layout import KvMemory
from baton.core.messages.peer_messages import GroupMessage, WillRead
from baton.core.plain_json import from_plain, to_plain
from baton.fleet.doctor.doctor_channel import PairMessage, connect_reads, serve_reads
from baton.fleet.doctor.doctor_pair import LAYOUT, NUM_BLOCKS, new_worker
from baton.transfer.backend import KvDescriptor
from tests import builders

GROUP = GroupMessage(group=1, key="rank 0", value=b"\0\xff")
ANSWER = GroupMessage(group=1, key="rank 1", value=b"address")


class TwoSided:
    """A backend and the server of its reader, both of which record what they get. The server answers."""

    def __init__(self, *, two_sided: bool = True) -> None:
        self.got: list[Any] = []
        self.memory = (kv_memory(),)
        self._is_two_sided = two_sided
        self._changed = asyncio.Event()

    def is_two_sided(self, peer: KvMemory) -> bool:
        return self._is_two_sided

    def connect(self, peer: KvMemory, layout: object, send: Any = None) -> None:
        self._note("connect")
        if send is not None:
            send(GROUP)

    def forget(self, peer: KvMemory) -> None:
        self._note("forget")

    def serve(self, reader: object, send: Any) -> "TwoSided":
        self.send = send
        return self

    def receive(self, *arguments: Any) -> None:
        self._note(arguments[-1])
        if arguments[-1] == GROUP:
            self.send(ANSWER)

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        self._note((read_id, tuple(block_ids)))

    def close(self) -> None:
        self._note("close")

    def _note(self, what: object) -> None:
        self.got.append(what)
        self._changed.set()

    async def has(self, *expected: object) -> None:
        """Wait until exactly this was recorded."""
        async with asyncio.timeout(30):
            while len(self.got) < len(expected):
                self._changed.clear()
                await self._changed.wait()
        assert self.got == list(expected)


def kv_memory() -> KvMemory:
    return KvMemory(
        owner=new_worker("owner"),
        agent_name="owner",
        agent_metadata=b"gloo",
        memory_kind="host",
        device_id=0,
        base_address=0,
        block_stride_bytes=LAYOUT.block_bytes,
        num_blocks=NUM_BLOCKS,
        generation_table_address=0,
        generation_entry_bytes=32,
    )


async def test_messages_and_reads_arrive_in_order() -> None:
    owner: Any = TwoSided()
    reader: Any = TwoSided()
    source = KvDescriptor(memory=owner.memory[0], block_ids=(4, 7))
    async with serve_reads(owner, builders.worker_ref()) as path:
        assert os.stat(Path(path).parent).st_mode & 0o777 == 0o700
        async with connect_reads(reader, owner.memory[0], LAYOUT, path) as announce:
            announce(ReadId(1), source)
            announce(ReadId(2), source)
            await owner.has(GROUP, (1, (4, 7)), (2, (4, 7)))
            await reader.has("connect", ANSWER)
        await owner.has(GROUP, (1, (4, 7)), (2, (4, 7)), "close")
        await reader.has("connect", ANSWER, "forget")
    assert not Path(path).parent.exists()


async def test_the_server_is_closed_if_the_owner_ends_first() -> None:
    owner: Any = TwoSided()
    reader: Any = TwoSided()
    async with serve_reads(owner, builders.worker_ref()) as path:
        connection = connect_reads(reader, owner.memory[0], LAYOUT, path)
        await connection.__aenter__()
        await owner.has(GROUP)
    assert owner.got == [GROUP, "close"]
    await connection.__aexit__(None, None, None)


async def test_one_sided_backends_have_no_channel() -> None:
    owner: Any = TwoSided(two_sided=False)
    reader: Any = TwoSided(two_sided=False)
    async with serve_reads(owner, builders.worker_ref()) as path:
        assert path == ""
        async with connect_reads(reader, owner.memory[0], LAYOUT, path) as announce:
            announce(ReadId(1), KvDescriptor(memory=owner.memory[0], block_ids=(0,)))
    assert (owner.got, reader.got) == ([], ["connect", "forget"])


@pytest.mark.parametrize(
    ("line", "named"),
    [(b"[]", "PairMessage"), (b"{", "Expecting"), (b'{"group": {"group": 1}}', "PairMessage.group has no key")],
)
async def test_a_line_that_is_no_message_ends_the_owner(line: bytes, named: str) -> None:
    owner: Any = TwoSided()

    async def serve_one_line() -> None:
        async with serve_reads(owner, builders.worker_ref()) as path:
            _incoming, outgoing = await asyncio.open_unix_connection(path)
            outgoing.write(line + b"\n")
            await owner.has("close")
            outgoing.close()

    with pytest.raises(ValueError, match=named):
        await serve_one_line()


def test_a_message_survives_the_channel() -> None:
    read = WillRead(transfer_id=TransferId(0), read_id=ReadId(2**60), block_ids=(1, 2))
    for message in (PairMessage(group=GROUP), PairMessage(will_read=read)):
        assert from_plain(PairMessage, to_plain(message)) == message
