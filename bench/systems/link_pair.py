"""One of two processes between which `bench links` times reads of KV, with the product's transfer backends.

`python -m bench.systems.link_pair LINK owner` fills KV memory, prints how to reach it and stays until
standard input ends. `... reader` takes that line on standard input, reads the memory, and prints
`{"transport": ..., "seconds": {SIZE: ...}}`.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np

from baton.core.ids import ReadId
from baton.core.kv.kv_layout import KvComponent, KvLayout, KvMemory, LayerGroup
from baton.fleet.doctor.doctor_channel import Announce, connect_reads
from baton.fleet.doctor.doctor_pair import allocate, new_worker, offer_memory, open_backend, owner_address
from baton.runtime.process.event_loop import new_event_loop
from baton.transfer.backend import MAX_READ_BYTES, KvDescriptor, ReadState, TransferBackend
from baton.transfer.backends.host_memory import Bytes

KIB, MIB = 2**10, 2**20
ROUNDS: Mapping[int, int] = {64 * KIB: 200, MIB: 100, 8 * MIB: 32, 64 * MIB: 8}
"""Timed reads by their size in bytes. Their median counts."""
_COMPONENT = KvComponent(name="k", num_kv_heads=8, head_dim=128, dtype="bfloat16")
LAYOUT = KvLayout(
    model_fingerprint="bench",
    tokenizer_fingerprint="bench",
    block_size_tokens=16,
    groups=(LayerGroup(layer_begin=0, num_layers=2, components=(_COMPONENT,)),),
)
"""Layout with blocks of 64 KiB."""
NUM_BLOCKS = 4096
"""Memory of each process: 256 MiB, which consecutive reads go through, so that caches hold little of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """A backend, by its name in `--transfer`, and the transports that UCX may use."""

    title: str
    backend: str
    ucx_tls: str = ""


LINKS: Mapping[str, LinkKind] = {
    "nixl-cma": LinkKind(title="NIXL, CMA", backend="nixl", ucx_tls="tcp,cma,self"),
    "nixl-tcp": LinkKind(title="NIXL, TCP", backend="nixl", ucx_tls="tcp"),
    "local": LinkKind(title="shared memory", backend="local"),
    "gloo": LinkKind(title="Gloo", backend="collective"),
}


class TimedReads:
    """Reads blocks into the same blocks of this process, as the reader of a worker does.

    A read of more than 8 MiB is several reads in flight. Each is followed by one of the generation-table
    entries, which validates it; two-sided reads bring these with the blocks.
    """

    def __init__(self, backend: TransferBackend, owner: KvMemory, announce: Announce) -> None:
        self._backend, self._owner, self._announce = backend, owner, announce
        self._numbers = count(1)

    async def read(self, begin: int, num_blocks: int) -> None:
        """Read consecutive blocks. Raises RuntimeError if a read fails."""
        await asyncio.gather(*(self._read_slice(each) for each in slices(begin, num_blocks)))

    async def _read_slice(self, block_ids: tuple[int, ...]) -> None:
        source = KvDescriptor(memory=self._owner, block_ids=block_ids)
        blocks, entries = ReadId(next(self._numbers)), ReadId(next(self._numbers))
        self._backend.start_read(blocks, source, block_ids)
        self._announce(blocks, source)
        await self._ended(blocks)
        self._backend.start_read_generations(entries, source, blocks)
        await self._ended(entries)
        self._backend.generations(entries)
        for read_id in (blocks, entries):
            self._backend.release(read_id)

    async def _ended(self, read_id: ReadId) -> None:
        state = await self._backend.wait(read_id)
        if state is not ReadState.DONE:
            raise RuntimeError(f"a read ended in state {state.value}")


def slices(begin: int, num_blocks: int) -> Iterator[tuple[int, ...]]:
    """Yield the blocks of each read, at most `MAX_READ_BYTES`."""
    most = MAX_READ_BYTES // LAYOUT.block_bytes
    for first in range(begin, begin + num_blocks, most):
        yield tuple(range(first, min(first + most, begin + num_blocks)))


def positions(num_blocks: int, rounds: int) -> Iterator[int]:
    """Yield the first block of each round: the memory from its beginning to its end, then again."""
    for number in range(rounds):
        yield number * num_blocks % NUM_BLOCKS


def content() -> Bytes:
    """Return what the blocks of an owner hold, [NUM_BLOCKS, block_bytes] uint8, without a copy of it."""
    first = (np.arange(NUM_BLOCKS) % 251 + 1).astype(np.uint8)
    return np.broadcast_to(first[:, None], (NUM_BLOCKS, LAYOUT.block_bytes))


def time_copies() -> dict[int, float]:
    """Return the median seconds of a copy of each size within this process."""
    theirs, ours = (np.empty((NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8) for _ in range(2))
    theirs[:] = content()
    ours[:] = theirs

    def copy(begin: int, num_blocks: int) -> None:
        np.copyto(ours[begin : begin + num_blocks], theirs[begin : begin + num_blocks])

    return {size: _median(copy, size // LAYOUT.block_bytes, rounds) for size, rounds in ROUNDS.items()}


def _median(copy: Callable[[int, int], None], num_blocks: int, rounds: int) -> float:
    seconds = []
    for begin in positions(num_blocks, rounds):
        began_s = time.perf_counter()
        copy(begin, num_blocks)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


async def time_reads(reads: TimedReads) -> dict[int, float]:
    """Return the median seconds of a read of each size, after a read of everything that connects."""
    for begin in positions(max(ROUNDS) // LAYOUT.block_bytes, ROUNDS[max(ROUNDS)] // 2):
        await reads.read(begin, max(ROUNDS) // LAYOUT.block_bytes)
    found = {}
    for size, rounds in ROUNDS.items():
        num_blocks, seconds = size // LAYOUT.block_bytes, []
        for begin in positions(num_blocks, rounds):
            began_s = time.perf_counter()
            await reads.read(begin, num_blocks)
            seconds.append(time.perf_counter() - began_s)
        found[size] = statistics.median(seconds)
    return found


async def serve_filled_memory(backend_name: str) -> None:
    """Run as the owner."""
    worker, memory = new_worker("owner"), allocate(backend_name, NUM_BLOCKS, LAYOUT)
    memory.kv[:] = content()
    await offer_memory(open_backend(backend_name, worker, memory, LAYOUT), worker, memory)


async def time_link(backend_name: str) -> None:
    """Run as the reader. Raises RuntimeError if other bytes arrive than the owner has."""
    memory = allocate(backend_name, NUM_BLOCKS, LAYOUT)
    memory.kv.fill(0)
    backend = open_backend(backend_name, new_worker("reader"), memory, LAYOUT)
    owner = await owner_address()
    async with connect_reads(backend, owner.memory, LAYOUT, owner.channel) as announce:
        seconds = await time_reads(TimedReads(backend, owner.memory, announce))
        transport = backend.transport_to(owner.memory)
    if not np.array_equal(memory.kv, content()):
        raise RuntimeError("the bytes that were read are not those of the owner")
    sys.stdout.write(json.dumps({"transport": transport, "seconds": seconds}) + "\n")
    sys.stdout.flush()
    await backend.aclose()


def main() -> None:
    """Run as the owner or as the reader of the memory."""
    link, role = sys.argv[1:]
    kind = LINKS[link]
    if kind.ucx_tls:
        os.environ["UCX_TLS"] = kind.ucx_tls
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve_filled_memory(kind.backend) if role == "owner" else time_link(kind.backend))


if __name__ == "__main__":
    main()
