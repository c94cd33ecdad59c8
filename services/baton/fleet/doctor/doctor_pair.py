"""One of two processes that measure a transfer backend.

`python -m baton.fleet.doctor.doctor_pair nixl|local owner` allocates KV memory, prints its address as one
line of JSON and stays until standard input ends. `... nixl|local reader` takes that line on standard input,
reads the memory, and prints `{"transport": ..., "bytes_per_s": ...}`.
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
_COMPONENT = KvComponent(name="k", num_kv_heads=8, head_dim=128, dtype="bfloat16")
LAYOUT = KvLayout(
    model_fingerprint="doctor",
    tokenizer_fingerprint="doctor",
    block_size_tokens=16,
    groups=(LayerGroup(layer_begin=0, num_layers=8, components=(_COMPONENT,)),),
)
"""Layout with blocks of 256 KiB."""
NUM_READS = 12
"""Number of reads, 8 MiB each, all of different memory. The fastest one counts, because other programs may
use the cores meanwhile."""
BACKENDS = ("nixl", "local")


def allocate(backend: str) -> HostMemory:
    """Allocate the KV memory that `backend` can read."""
    return (allocate_private if backend == "nixl" else allocate_shared)(NUM_BLOCKS, LAYOUT.block_bytes)


def open_backend(backend: str, worker: WorkerRef, memory: HostMemory) -> TransferBackend:
    """Create the transfer backend of that name over `memory`."""
    if backend == "nixl":
        from baton.transfer.backends.nixl.nixl_backend import NixlBackend

        return NixlBackend.over(memory, worker=worker, layout=LAYOUT, loopback_only=True)
    from baton.transfer.backends.local_backend import LocalBackend

    return LocalBackend(worker=worker, layout=LAYOUT, memory=memory)


async def serve_memory(name: str) -> None:
    """Make KV memory readable, print how to reach it, and wait until standard input ends."""
    worker = WorkerRef(worker_id="owner", worker_epoch=secrets.randbits(64), address="")
    memory = allocate(name)
    MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    backend = open_backend(name, worker, memory)
    sys.stdout.write(json.dumps(to_plain(backend.memory[0])) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await backend.aclose()


async def measure_reads(name: str) -> None:
    """Read the memory that standard input describes, and print the transport and the best speed."""
    worker = WorkerRef(worker_id="reader", worker_epoch=secrets.randbits(64), address="")
    backend = open_backend(name, worker, allocate(name))
    peer = from_plain(KvMemory, json.loads(sys.stdin.readline()))
    backend.connect(peer, LAYOUT)
    num_blocks = min(backend.max_probe_blocks, NUM_BLOCKS // NUM_READS)
    loop = asyncio.get_running_loop()
    best_s = float("inf")
    for number in range(NUM_READS):
        source = KvDescriptor(memory=peer, block_ids=tuple(range(number * num_blocks, (number + 1) * num_blocks)))
        began_s = loop.time()
        backend.start_probe(ReadId(number), source)
        state = await backend.wait(ReadId(number))
        if state is not ReadState.DONE:
            raise RuntimeError(f"reading the owner's memory ended in state {state.value}")
        best_s = min(best_s, loop.time() - began_s)
        backend.release(ReadId(number))
    bytes_per_s = num_blocks * LAYOUT.block_bytes / best_s
    sys.stdout.write(json.dumps({"transport": backend.transport_to(peer), "bytes_per_s": bytes_per_s}) + "\n")
    sys.stdout.flush()
    backend.forget(peer)
    await backend.aclose()


def main() -> None:
    """Run as the owner or as the reader of the memory."""
    name, role = sys.argv[1:]
    if name not in BACKENDS:
        sys.exit(f"{name!r} is not a transfer backend; use one of {', '.join(BACKENDS)}")
    asyncio.run(serve_memory(name) if role == "owner" else measure_reads(name))


if __name__ == "__main__":
    main()
