"""A worker without an engine as a process: pool, owner service and reader over a real backend and gRPC.

Takes commands as JSON lines on standard input and answers each with one JSON line. Blocks hold a pattern of
(text, index), so that a wrong block is detected. Run as `python -m tests.integration.transfer.peer_process
BACKEND WORKER_ID EPOCH PORT`.
"""

import asyncio
import gc
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from random import Random
from typing import Any

import numpy as np

from baton.core.errors import Refused
from baton.core.ids import WorkerRef
from baton.core.interfaces import Duplex
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_layout import KvComponent, KvLayout, LayerGroup
from baton.core.messages.peer_messages import FirstToken, OwnerMessage, ReaderMessage
from baton.engine.kv_cache.block_pool import BlockPool
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.runtime import logging
from baton.transfer.backend import TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private, allocate_shared
from baton.transfer.backends.local_backend import LocalBackend
from baton.transfer.backends.nixl.nixl_backend import NixlBackend
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.peer_reads import ReaderTimes
from tests import builders
from tests.group_reads import gloo_backend
from tests.times import TEST_TIMES

BLOCK_TOKENS = builders.BLOCK_SIZE_TOKENS
TIME_FACTOR = float(os.environ.get("PEER_TIME_FACTOR", "1"))
TIMES = {name: value * TIME_FACTOR for name, value in TEST_TIMES.items()}
"""Timeouts; `PEER_TIME_FACTOR` multiplies them where a network is slow on purpose or no timeout is tested."""
NUM_BLOCKS = int(os.environ.get("PEER_NUM_BLOCKS", "1024"))


def layout() -> KvLayout:
    """Return a layout with blocks of 64 KiB."""
    components = tuple(KvComponent(name=name, num_kv_heads=4, head_dim=64, dtype="float32") for name in ("k", "v"))
    return builders.layout(groups=(LayerGroup(layer_begin=0, num_layers=8, components=components),))


def hashes_of(text: str, num_blocks: int) -> tuple[BlockHash, ...]:
    """Return the hashes of the blocks of a prompt. Different texts have different ones."""
    token_id = zlib.crc32(text.encode()) & 0x7FFFFFFF
    return builders.hashes_of([token_id] * (num_blocks * BLOCK_TOKENS))


def pattern(text: str, index: int, size: int) -> Any:
    rng = np.random.default_rng([index, *text.encode()])
    return rng.integers(0, 256, size, dtype=np.uint8)


def make_backend(kind: str, worker: WorkerRef) -> tuple[HostMemory, TransferBackend]:
    memory = (allocate_shared if kind == "local" else allocate_private)(NUM_BLOCKS, layout().block_bytes)
    MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    if kind == "collective":
        return memory, gloo_backend(layout(), memory, worker)
    if kind == "local":
        return memory, LocalBackend(worker=worker, layout=layout(), memory=memory)
    loopback = os.environ.get("PEER_LOOPBACK", "1") == "1"
    return memory, NixlBackend.over(memory, worker=worker, layout=layout(), loopback_only=loopback)


class Peer:
    """The pool, owner service and reader of a worker without an engine. Each `do_` method is a command."""

    def __init__(self, kind: str, worker_id: str, epoch: int, port: int, host: str) -> None:
        self.worker = WorkerRef(worker_id=worker_id, worker_epoch=epoch, address=f"{host}:{port}")
        self.memory, self.backend = make_backend(kind, self.worker)
        self.table = MemoryGenerationTable(self.memory.generation_table, epoch)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS, self.table)
        self.network = GrpcNetwork(heartbeat_s=TIMES["heartbeat_s"], dial_s=2.0 * TIME_FACTOR)
        self.server = GrpcServer(heartbeat_s=TIMES["heartbeat_s"])
        self.texts: dict[BlockHash, tuple[str, int]] = {}
        self.reuse_contents: dict[int, tuple[str, int]] = {}
        self.may_finish, self.freed = asyncio.Event(), asyncio.Event()
        self.pool.on_freed(self.freed.set)
        self.server.add_worker(self)

    async def start(self) -> None:
        self.owner = OwnerService(
            worker=self.worker,
            layout=layout(),
            backend=self.backend,
            pins=self.pool,
            lookup=self.pool.lookup,
            lease_s=TIMES["lease_s"],
            claim_timeout_s=TIMES["kv_claim_timeout_s"],
            reorder_window_s=TIMES["transfer_reorder_window_s"],
        )
        self.reader = KvReader(
            worker=self.worker,
            layout=layout(),
            backend=self.backend,
            network=self.network,
            pool=self.pool,
            rng=Random(self.worker.worker_epoch),
            min_link_gbps=float(os.environ.get("PEER_MIN_LINK_GBPS", "0")),
            times=ReaderTimes(
                lease_s=TIMES["lease_s"],
                renew_s=TIMES["heartbeat_s"],
                deadline_min_s=TIMES["transfer_deadline_min_s"],
                deadline_max_s=TIMES["transfer_deadline_max_s"],
            ),
        )
        host, port = self.worker.address.rsplit(":", 1)
        await self.server.start(host, int(port))

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        await self.owner.serve(stream)

    async def session(self, stream: Any) -> None:
        raise NotImplementedError

    async def copy_prefix(self, stream: Any) -> None:
        raise NotImplementedError

    async def do_prefill(
        self,
        request: int,
        text: str,
        num_tokens: int,
        reader: dict[str, Any],
        chunks: int = 1,
        chunk_s: float = 0.0,
        is_held: bool = False,
    ) -> Any:
        """Compute a prompt in `chunks` steps. Its transfer keeps the blocks pinned.

        It waits for blocks, as in a worker's queue: a prompt that nobody pulls has its own for some time.

        is_held: the last step ends only after `finish`, so that no pull of the prompt can end before
        """
        job, num_full = builders.job_id(request), num_tokens // BLOCK_TOKENS
        hashes = hashes_of(text, num_full)
        self.owner.create(job, WorkerRef(**reader))
        while (block_ids := self.pool.allocate(-(-num_tokens // BLOCK_TOKENS))) is None:
            self.freed.clear()
            await self.freed.wait()
        self.owner.allocated(job, block_ids, hashes)
        for chunk in range(1, chunks + 1):
            for index in range((chunk - 1) * len(block_ids) // chunks, chunk * len(block_ids) // chunks):
                self.memory.kv[block_ids[index]] = pattern(text, index, self.memory.block_bytes)
                if index < num_full:
                    self.pool.set_hash(block_ids[index], hashes[index])
                    self.texts[hashes[index]] = (text, index)
            await asyncio.sleep(chunk_s)
            if chunk == chunks and is_held:
                await self.may_finish.wait()
            if chunk < chunks:
                self.owner.announce(job, chunk * len(block_ids) // chunks * BLOCK_TOKENS)
        self.owner.announce(job, num_tokens, final=True, first_tokens=[FirstToken(sample_index=0, token_id=request)])
        self.pool.unref(block_ids)
        return {}

    async def do_finish(self) -> Any:
        """Let held prompts end."""
        self.may_finish.set()
        return {}

    async def do_pull(self, owner: dict[str, Any], request: int, text: str, num_tokens: int) -> Any:
        """Pull a prompt. `wrong` counts received blocks with unexpected content."""
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        hashes = hashes_of(text, num_tokens // BLOCK_TOKENS)
        self.texts.update({h: (text, index) for index, h in enumerate(hashes)})
        receiving: list[int] = []
        answer: dict[str, Any] = {"outcome": "received"}
        try:
            pull = self.reader.pull(WorkerRef(**owner), builders.job_id(request), have_blocks=0, expected=hashes)
            await pull.first_ready()
            receiving = self.pool.allocate_receiving(num_blocks) or []
            assert receiving, self.pool.counts()
            pull.receive_into(dict(enumerate(receiving)), 0)
            result = await pull.done()
            answer |= {
                "bytes": result.transfer_bytes,
                "transport": result.transport,
                "kv_transfer_s": result.kv_transfer_s,
            }
            answer |= {"exposed_s": result.kv_exposed_s, "first_tokens": [t.token_id for t in result.first_tokens]}
            answer["wrong"] = sum(
                not np.array_equal(self.memory.kv[block_id], pattern(text, index, self.memory.block_bytes))
                for index, block_id in enumerate(receiving)
            )
        except Refused as refused:
            answer["outcome"] = refused.failure.reason.value
        self.pool.unref(receiving)
        return answer

    async def do_reuse(self, text: str) -> Any:
        """Allocate and overwrite every free block."""
        block_ids = self.pool.allocate(self.pool.num_allocatable) or []
        for index, block_id in enumerate(block_ids):
            self.memory.kv[block_id] = pattern(text, index, self.memory.block_bytes)
        self.pool.unref(block_ids)
        self.reuse_contents = {block_id: (text, index) for index, block_id in enumerate(block_ids)}
        return {"blocks": len(block_ids)}

    async def do_check_reused(self) -> Any:
        """Return how many of the blocks that the last `reuse` wrote have other content now."""
        damaged = sum(
            not np.array_equal(self.memory.kv[b], pattern(*content, self.memory.block_bytes))
            for b, content in self.reuse_contents.items()
        )
        return {"damaged": damaged, "blocks": len(self.reuse_contents)}

    async def do_warm(self, owner: dict[str, Any]) -> Any:
        return {"is_warm": await self.reader.warmed(WorkerRef(**owner))}

    async def do_state(self) -> Any:
        """Return counters, and `audit`: visible blocks whose content does not match their hash."""
        self.pool.check()
        audit = 0
        for block_id in range(NUM_BLOCKS):
            content = self.texts.get(self.pool.hash_of(block_id))
            if self.pool.hash_of(block_id) != NO_HASH and content is not None:
                audit += not np.array_equal(self.memory.kv[block_id], pattern(*content, self.memory.block_bytes))
        links = [
            {
                "peer": link.peer.worker_id,
                "bytes_per_s": link.bytes_per_s,
                "broken": link.broken,
                "transport": link.transport,
                "problem": link.problem,
            }
            for link in self.reader.links()
        ]
        return {
            "blocks": asdict(self.pool.counts()),
            "open_leases": self.owner.open_leases,
            "links": links,
            "audit": audit,
            "threads": threading.active_count(),
            "fds": len(os.listdir("/dev/fd")),
            "tasks": len(asyncio.all_tasks()),
            "cpu_s": time.process_time(),
            "objects": len(gc.get_objects()),
        }

    async def do_close(self) -> Any:
        await self.reader.aclose()
        await self.owner.aclose()
        await self.network.aclose()
        await self.server.stop(0)
        await self.backend.aclose()
        self.memory.close()
        return {}


async def main() -> None:
    kind, worker_id, epoch, port = sys.argv[1:5]
    logging.configure(worker_id, level=os.environ.get("PEER_LOG", "warning"))
    peer = Peer(kind, worker_id, int(epoch), int(port), os.environ.get("PEER_HOST", "127.0.0.1"))
    await peer.start()
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    send(ready=asdict(peer.worker))
    running: set[asyncio.Task[None]] = set()
    while line := await commands.readline():
        command = json.loads(line)
        work: Callable[..., Coroutine[Any, Any, Any]] = getattr(peer, f"do_{command.pop('command')}")
        task = asyncio.create_task(run_command(command.pop("id"), work, command))
        running.add(task)
        task.add_done_callback(running.discard)


async def run_command(number: int, work: Callable[..., Coroutine[Any, Any, Any]], arguments: dict[str, Any]) -> None:
    try:
        send(id=number, **await work(**arguments))
    except Exception as error:  # the test reports it
        send(id=number, error=f"{type(error).__name__}: {error}")


def send(**message: Any) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
