"""One of two processes that measure a path of GPU KV, with the code that workers use.

`python -m baton.worker.device.kv_memory.kv_path_pair direct|staged cuda|cpu owner` fills KV memory, prints
its address as one line of JSON and stays until standard input ends. `... reader` takes that line on standard
input, reads the memory, and prints `{"transport": ..., "bytes_per_s": ...}`. `cpu` tries the code without a
GPU.
"""

import asyncio
import json
import secrets
import sys
from typing import Any

import torch

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.plain_json import from_plain, to_plain
from baton.model.device.kv_tensors import KvCache, uniform_layout
from baton.runtime.config.settings import WorkerConfig
from baton.transfer.backend import KvDescriptor, ReadState
from baton.transfer.backends.host_memory import HOST
from baton.worker.device.kv_memory.kv_path import KvPath
from baton.worker.device.kv_memory.kv_registration import RegisteredMemory, register_directly, register_staged

NUM_READS = 12
"""Reads of different memory. The fastest one counts, because other programs may use the links meanwhile."""
READ_BLOCKS = 16
NUM_BLOCKS = NUM_READS * READ_BLOCKS


def layout() -> KvLayout:
    """Return a layout with blocks of 512 KiB, as an 8B model has them in some eight of its layers."""
    return uniform_layout(
        model_fingerprint="kv path",
        tokenizer_fingerprint="kv path",
        block_size_tokens=16,
        num_layers=8,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
    )


def open_memory(path: KvPath, device: str, worker_id: str) -> tuple[KvCache, RegisteredMemory]:
    """Allocate KV memory and register it as a worker would that uses this path."""
    settings: dict[str, Any] = {"transfer": "nixl"}
    worker = WorkerRef(worker_id=worker_id, worker_epoch=secrets.randbits(64), address="")
    cache = KvCache.zeros(layout(), NUM_BLOCKS, device)
    config = WorkerConfig(**settings)
    if path is KvPath.STAGED:
        return cache, register_staged(config, worker, cache)
    return cache, register_directly(config, worker, cache, "cuda" if device == "cuda" else HOST)


def pattern(device: torch.device) -> torch.Tensor:
    """Return what the owner's memory holds, uint8 [NUM_BLOCKS, block_bytes]."""
    num_bytes = NUM_BLOCKS * layout().block_bytes
    period = torch.arange(251, dtype=torch.uint8, device=device)  # a prime: blocks differ from each other
    return period.repeat(-(-num_bytes // 251))[:num_bytes].view(NUM_BLOCKS, -1)


async def serve_memory(path: KvPath, device: str) -> None:
    """Make KV memory readable, print how to reach it, and wait until standard input ends."""
    cache, registered = await asyncio.to_thread(open_memory, path, device, "owner")
    cache.memory.copy_(pattern(cache.device))
    _synchronize(cache.device)
    registered.backend.offer(range(NUM_BLOCKS))
    sys.stdout.write(json.dumps(to_plain(registered.backend.memory[0])) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await registered.backend.aclose()
    registered.close()


async def measure_reads(path: KvPath, device: str) -> None:
    """Read the memory that standard input describes, and print the transport and the best speed.

    A staged read is timed together with a copy to host memory, which its owner makes before.
    Raises LayoutMismatch if other bytes arrive than the owner has.
    """
    cache, registered = await asyncio.to_thread(open_memory, path, device, "reader")
    backend = registered.backend
    peer = from_plain(KvMemory, json.loads(await asyncio.to_thread(sys.stdin.readline)))
    backend.connect(peer, layout())
    loop = asyncio.get_running_loop()
    best_s = float("inf")
    for number in range(NUM_READS):
        block_ids = tuple(range(number * READ_BLOCKS, (number + 1) * READ_BLOCKS))
        began_s = loop.time()
        if path is KvPath.STAGED:
            backend.offer(block_ids)
        backend.start_read(ReadId(number), KvDescriptor(memory=peer, block_ids=block_ids), block_ids)
        state = await backend.wait(ReadId(number))
        if state is not ReadState.DONE:
            raise RuntimeError(f"reading the owner's memory ended in state {state.value}")
        best_s = min(best_s, loop.time() - began_s)
        backend.release(ReadId(number))
    _synchronize(cache.device)
    if not torch.equal(cache.memory, pattern(cache.device)):
        raise LayoutMismatch("the bytes that were read are not those of the owner")
    bytes_per_s = READ_BLOCKS * layout().block_bytes / best_s
    sys.stdout.write(json.dumps({"transport": backend.transport_to(peer), "bytes_per_s": bytes_per_s}) + "\n")
    sys.stdout.flush()
    backend.forget(peer)
    await backend.aclose()
    registered.close()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Run as the owner or as the reader of the memory."""
    path, device, role = sys.argv[1:]
    act = serve_memory if role == "owner" else measure_reads
    asyncio.run(act(KvPath(path), device))


if __name__ == "__main__":
    main()
