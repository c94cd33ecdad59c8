"""Reads from a worker over a process group, without a `KvReader`."""

import asyncio
from contextlib import suppress
from itertools import count

from baton.core.errors import StreamBroken
from baton.core.ids import ReadId, TransferId, WorkerRef
from baton.core.interfaces import Network
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.peer_messages import GroupMessage, PeerHello, PeerHelloReply, WillRead
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private


def gloo_backend(layout: KvLayout, memory: HostMemory, worker: WorkerRef) -> TransferBackend:
    """Return a backend over Gloo for workers of this machine."""
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.group_kinds import GlooKind

    kind = GlooKind(layout, memory, host="127.0.0.1")
    return CollectiveBackend(worker=worker, layout=layout, kind=kind, num_blocks=memory.num_blocks, silence_s=40.0)


async def entries_over_group(network: Network, hello: PeerHello) -> tuple[GenerationEntry, ...]:
    """Return the generation-table entries of all blocks of a worker's device memory.

    An owner sends entries with their blocks only, so all blocks are read.
    """
    layout, numbers = hello.layout, count(1)
    memory = allocate_private(64, layout.block_bytes)
    backend = gloo_backend(layout, memory, hello.reader)
    stream = await network.open_peer(hello.owner.address)
    receiving: asyncio.Task[None] | None = None
    entries: list[GenerationEntry] = []
    try:
        stream.send(hello)
        reply = await stream.receive()
        assert isinstance(reply, PeerHelloReply), reply
        assert not reply.refusal, reply
        owner = reply.memory[0]

        async def receive() -> None:
            with suppress(StreamBroken):
                while True:
                    if isinstance(message := await stream.receive(), GroupMessage):
                        backend.receive(owner, message)

        receiving = asyncio.create_task(receive())
        backend.connect(owner, layout, stream.send)
        size = min(memory.num_blocks, backend.max_probe_blocks)
        for begin in range(0, owner.num_blocks, size):
            block_ids = tuple(range(begin, min(begin + size, owner.num_blocks)))
            source, read_id = KvDescriptor(memory=owner, block_ids=block_ids), ReadId(next(numbers))
            backend.start_read(read_id, source, range(len(block_ids)))
            stream.send(WillRead(transfer_id=TransferId(0), read_id=read_id, block_ids=block_ids))
            assert await backend.wait(read_id) is ReadState.DONE
            entries_id = ReadId(next(numbers))
            backend.start_read_generations(entries_id, source, read_id)
            entries += backend.generations(entries_id)
            for ended in (read_id, entries_id):
                backend.release(ended)
        backend.forget(owner)
    finally:
        if receiving is not None:
            receiving.cancel()
        await stream.aclose()
        await backend.aclose()
        memory.close()
    return tuple(entries)
