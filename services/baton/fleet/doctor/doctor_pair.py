"""One end of a pair of processes that try a way of moving KV. `python -m baton.fleet.doctor.doctor_pair
nixl|local owner` prints its memory as a line of JSON and stays until standard input ends; `... nixl|local
reader` takes that line, reads, and prints {transport, bytes_per_s}.
"""

import asyncio
import json
import secrets
import sys

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvComponent, KvLayout, KvMemory, LayerGroup
from baton.core.plain_json import from_plain, to_plain
from baton.transfer.backend import KvDescriptor, ReadState, TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private, allocate_shared
from baton.transfer.integrity.generation_table import MemoryGenerationTable

NUM_BLOCKS = 384
BLOCK = KvComponent(name="k", num_kv_heads=8, head_dim=128, dtype="bfloat16")
LAYOUT = KvLayout(
    model_fingerprint="doctor",
    tokenizer_fingerprint="doctor",
    block_size_tokens=16,
    groups=(LayerGroup(layer_begin=0, num_layers=8, components=(BLOCK,)),),
)
"""Blocks of 256 KiB."""
READS = 12
"""Of 8 MiB each, none of the same memory twice; the fastest counts, because others may use the cores
meanwhile."""


WAYS = ("nixl", "local")


def allocate(way: str) -> HostMemory:
    return (allocate_private if way == "nixl" else allocate_shared)(NUM_BLOCKS, LAYOUT.block_bytes)


def open_backend(way: str, worker: WorkerRef, memory: HostMemory) -> TransferBackend:
    if way == "nixl":
        from baton.transfer.backends.nixl_backend import NixlBackend

        return NixlBackend.over(memory, worker=worker, layout=LAYOUT, loopback_only=True)
    from baton.transfer.backends.local_backend import LocalBackend

    return LocalBackend(worker=worker, layout=LAYOUT, memory=memory)


async def own(way: str) -> None:
    worker = WorkerRef(worker_id="owner", worker_epoch=secrets.randbits(64), address="")
    memory = allocate(way)
    MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    backend = open_backend(way, worker, memory)
    sys.stdout.write(json.dumps(to_plain(backend.memory[0])) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await backend.aclose()


async def read(way: str) -> None:
    backend = open_backend(
        way, WorkerRef(worker_id="reader", worker_epoch=secrets.randbits(64), address=""), allocate(way)
    )
    peer = from_plain(KvMemory, json.loads(sys.stdin.readline()))
    backend.connect(peer, LAYOUT)
    count = min(backend.max_probe_blocks, NUM_BLOCKS // READS)
    loop = asyncio.get_running_loop()
    best_s = float("inf")
    for number in range(READS):
        source = KvDescriptor(memory=peer, block_ids=tuple(range(number * count, (number + 1) * count)))
        began_s = loop.time()
        backend.start_probe(ReadId(number), source)
        state = await backend.wait(ReadId(number))
        if state is not ReadState.DONE:
            raise RuntimeError("the owner's memory could not be read")
        best_s = min(best_s, loop.time() - began_s)
        backend.release(ReadId(number))
    speed = count * LAYOUT.block_bytes / best_s
    sys.stdout.write(json.dumps({"transport": backend.transport_to(peer), "bytes_per_s": speed}) + "\n")
    sys.stdout.flush()
    backend.forget(peer)
    await backend.aclose()


def main() -> None:
    way, end = sys.argv[1:]
    if way not in WAYS:
        sys.exit(f"{way!r} is no way of moving KV; there are {', '.join(WAYS)}")
    asyncio.run(own(way) if end == "owner" else read(way))


if __name__ == "__main__":
    main()
