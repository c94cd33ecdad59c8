"""One of two processes that measure a transfer backend.

`python -m baton.fleet.doctor.doctor_pair nixl|local|collective owner` allocates KV memory, prints how to
reach it as one line of JSON and stays until standard input ends. `... reader` takes that line on standard
input, reads the memory, and prints `{"transport": ..., "bytes_per_s": ...}`.
"""

import asyncio
import json
import secrets
import sys
from dataclasses import dataclass

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvComponent, KvLayout, KvMemory, LayerGroup
from baton.core.plain_json import from_plain, to_plain
from baton.fleet.doctor.doctor_channel import Announce, connect_reads, serve_reads
from baton.transfer.backend import KvDescriptor, ReadState, TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private, allocate_shared
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from baton.transfer.integrity.validate_read import foreign_entries

NUM_BLOCKS = 384
_COMPONENT = KvComponent(name="k", num_kv_heads=8, head_dim=128, dtype="bfloat16")
LAYOUT = KvLayout(
    model_fingerprint="doctor",
    tokenizer_fingerprint="doctor",
    block_size_tokens=16,
    groups=(LayerGroup(layer_begin=0, num_layers=8, components=(_COMPONENT,)),),
)
"""Layout with blocks of 256 KiB."""
NUM_PARTS, NUM_ROUNDS = 12, 2
"""Reads of 8 MiB: each part of the memory once a round. The fastest one counts, because other programs may
use the cores meanwhile, and the first read of shared memory maps its pages."""
BACKENDS = ("nixl", "local", "collective")
"""Names as in `--transfer`, in the order in which `auto` prefers those that are equally fast."""
LOOPBACK = "127.0.0.1"
SILENCE_S = 20.0
"""Time after which reads over a process group fail in which nothing arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAddress:
    """Address of the owner's memory. channel: path of the channel for two-sided reads; empty for others."""

    memory: KvMemory
    channel: str


def allocate(name: str, num_blocks: int = NUM_BLOCKS, layout: KvLayout = LAYOUT) -> HostMemory:
    """Allocate the KV memory that the backend of that name can read."""
    return (allocate_shared if name == "local" else allocate_private)(num_blocks, layout.block_bytes)


def open_backend(name: str, worker: WorkerRef, memory: HostMemory, layout: KvLayout = LAYOUT) -> TransferBackend:
    """Create the transfer backend of that name over `memory`."""
    if name == "nixl":
        from baton.transfer.backends.nixl.nixl_backend import NixlBackend

        return NixlBackend.over(memory, worker=worker, layout=layout, loopback_only=True)
    if name == "collective":
        from baton.transfer.backends.collective.collective_backend import CollectiveBackend
        from baton.transfer.backends.collective.group_kinds import GlooKind

        kind = GlooKind(layout, memory, host=LOOPBACK)
        return CollectiveBackend(
            worker=worker, layout=layout, kind=kind, num_blocks=memory.num_blocks, silence_s=SILENCE_S
        )
    from baton.transfer.backends.local_backend import LocalBackend

    return LocalBackend(worker=worker, layout=layout, memory=memory)


def new_worker(worker_id: str) -> WorkerRef:
    """Return a worker of this process, which has no address."""
    return WorkerRef(worker_id=worker_id, worker_epoch=secrets.randbits(64), address="")


async def offer_memory(backend: TransferBackend, worker: WorkerRef, memory: HostMemory) -> None:
    """Make KV memory readable, print how to reach it, and wait until standard input ends."""
    MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    async with serve_reads(backend, new_worker("reader")) as channel:
        address = PairAddress(memory=backend.memory[0], channel=channel)
        sys.stdout.write(json.dumps(to_plain(address)) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)
    await backend.aclose()


async def owner_address() -> PairAddress:
    """Return the address that standard input describes."""
    return from_plain(PairAddress, json.loads(await asyncio.to_thread(sys.stdin.readline)))


async def measure_reads(name: str) -> None:
    """Read the owner's memory, and print the transport and the best speed."""
    backend = open_backend(name, new_worker("reader"), allocate(name))
    owner = await owner_address()
    num_blocks = min(backend.max_probe_blocks, NUM_BLOCKS // NUM_PARTS)
    loop = asyncio.get_running_loop()
    best_s = float("inf")
    async with connect_reads(backend, owner.memory, LAYOUT, owner.channel) as announce:
        for number in range(NUM_ROUNDS * NUM_PARTS):
            begin = number % NUM_PARTS * num_blocks
            block_ids = tuple(range(begin, begin + num_blocks))
            source = KvDescriptor(memory=owner.memory, block_ids=block_ids)
            began_s = loop.time()
            await probe(backend, ReadId(number), source, announce)
            best_s = min(best_s, loop.time() - began_s)
            await check_entries(backend, ReadId(number), source)
            backend.release(ReadId(number))
        measured = {
            "transport": backend.transport_to(owner.memory),
            "bytes_per_s": num_blocks * LAYOUT.block_bytes / best_s,
        }
    sys.stdout.write(json.dumps(measured) + "\n")
    sys.stdout.flush()
    await backend.aclose()


async def probe(backend: TransferBackend, read_id: ReadId, source: KvDescriptor, announce: Announce) -> None:
    """Read blocks of the owner's memory. Raises RuntimeError if that fails. The caller releases the read."""
    backend.start_probe(read_id, source)
    announce(read_id, source)
    state = await backend.wait(read_id)
    if state is not ReadState.DONE:
        raise RuntimeError(f"reading the owner's memory ended in state {state.value}")


async def check_entries(backend: TransferBackend, payload: ReadId, source: KvDescriptor) -> None:
    """Raise RuntimeError if the generation-table entries of blocks that were read are not the owner's.

    payload: the read of the blocks
    """
    read_id = ReadId(NUM_ROUNDS * NUM_PARTS + payload)
    backend.start_read_generations(read_id, source, payload)
    state = await backend.wait(read_id)
    if state is not ReadState.DONE:
        raise RuntimeError(f"reading entries of the owner's memory ended in state {state.value}")
    what = foreign_entries(backend.generations(read_id), len(source.block_ids), source.memory.owner.worker_epoch)
    if what is not None:
        raise RuntimeError(f"the entries of the owner's memory are not the owner's: their {what} differs")
    backend.release(read_id)


async def serve_memory(name: str) -> None:
    """Run as the owner."""
    worker, memory = new_worker("owner"), allocate(name)
    memory.kv.fill(1)  # pages that were never written would be read faster
    await offer_memory(open_backend(name, worker, memory), worker, memory)


def main() -> None:
    """Run as the owner or as the reader of the memory."""
    name, role = sys.argv[1:]
    if name not in BACKENDS:
        sys.exit(f"{name!r} is not a transfer backend; use one of {', '.join(BACKENDS)}")
    asyncio.run(serve_memory(name) if role == "owner" else measure_reads(name))


if __name__ == "__main__":
    main()
