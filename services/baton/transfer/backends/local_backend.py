"""Transfer backend for workers of one host: maps the peer's shared memory and copies blocks in its own
thread."""

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.runtime.logging import get_logger
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, SendGroup, drop_message
from baton.transfer.backends.block_ranges import runs
from baton.transfer.backends.host_memory import HOST, HostMemory, attach_shared, generation_table_offset
from baton.transfer.backends.one_sided_backend import OneSidedBackend, probe_blocks
from baton.transfer.integrity.generation_table import ENTRY_BYTES, decode_entries

log = get_logger(__name__)

TRANSFER = "local"
TRANSPORT = "shared-memory"
Blocks: TypeAlias = npt.NDArray[np.uint8]
Work = Callable[[], tuple[ReadState, tuple[GenerationEntry, ...]]]


class LocalBackend(OneSidedBackend[Blocks, HostMemory]):
    """Implements `TransferBackend` over memory from `allocate_shared`.

    Reads cannot get stuck, because the owner takes no part in them. The memory of a dead owner stays readable
    until its last reader unmaps it.
    """

    def __init__(
        self, *, worker: WorkerRef, layout: KvLayout, memory: HostMemory, tier: HostMemory | None = None
    ) -> None:
        """Raises LayoutMismatch if a memory does not fit `layout`. The caller closes both after the backend.

        tier: a second region that peers may read
        """
        for region in (memory, tier):
            if region is not None and region.block_bytes != layout.block_bytes:
                text = f"block_bytes: the memory has {region.block_bytes}, the layout {layout.block_bytes}"
                raise LayoutMismatch(text)
        own = _described(worker, layout, memory)
        added = () if tier is None else (_described(worker, layout, tier),)
        scratch = np.empty((probe_blocks(memory.num_blocks, layout), layout.block_bytes), dtype=np.uint8)
        super().__init__(layout=layout, memory=own, kv=memory.kv, scratch=scratch, added=added)
        self._work: queue.SimpleQueue[tuple[ReadId, Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-local", daemon=True)
        self._thread.start()

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        """Map the peer's memory. If it is gone already, nothing is raised here, but reads from it fail."""
        self._check_layout(peer, layout)
        if peer.agent_name in self._peers:
            return
        handle = peer.agent_metadata.decode(errors="replace")
        try:
            attached = attach_shared(handle, num_blocks=peer.num_blocks, block_bytes=layout.block_bytes)
        except OSError as error:
            log.warning("kv_peer_memory_gone", owner=str(peer.owner), error=str(error))
            return
        if decode_entries(attached.generation_table[:ENTRY_BYTES].tobytes())[0].worker_epoch != peer.owner.worker_epoch:
            log.warning("kv_peer_memory_gone", owner=str(peer.owner), error="another process has that process id now")
            return
        self._peers[peer.agent_name] = attached

    def forget(self, peer: KvMemory) -> None:
        attached = self._peers.pop(peer.agent_name, None)
        if attached is not None:
            attached.close()

    def transport_to(self, peer: KvMemory) -> str:
        return TRANSPORT if peer.agent_name in self._peers else ""

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        peer = self._begin(read_id, source)
        if peer is None:
            return
        table = peer.generation_table.reshape(-1, ENTRY_BYTES)

        def read() -> tuple[ReadState, tuple[GenerationEntry, ...]]:
            return ReadState.DONE, decode_entries(table[list(source.block_ids)].tobytes())

        self._work.put((read_id, read))

    async def aclose(self) -> None:
        for read_id in self._reads.running:
            await self._reads.wait(read_id)
        self._work.put(None)
        self._thread.join()
        for attached in self._peers.values():
            attached.close()
        self._peers.clear()

    def _start_copy(self, read_id: ReadId, source: KvDescriptor, into: Blocks, block_ids: Sequence[int]) -> None:
        block_runs = list(runs(source.block_ids, block_ids))
        peer = self._begin(read_id, source)
        if peer is None:
            return
        peer_kv = peer.kv

        def copy() -> tuple[ReadState, tuple[GenerationEntry, ...]]:
            for run in block_runs:  # numpy releases the GIL during each copy
                np.copyto(
                    into[run.own : run.own + run.num_blocks],
                    peer_kv[run.source : run.source + run.num_blocks],
                )
            return ReadState.DONE, ()

        self._work.put((read_id, copy))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            read_id, work = item
            try:
                state, generations = work()
            except Exception:
                log.exception("kv_copy_failed", read_id=read_id)
                state, generations = ReadState.FAILED, ()
            self._reads.report(read_id, state, generations)


def _described(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> KvMemory:
    return KvMemory(
        owner=worker,
        agent_name=f"{worker}-{secrets.token_hex(4)}",
        agent_metadata=memory.handle.encode(),
        memory_kind=HOST,
        device_id=0,
        base_address=0,
        block_stride_bytes=layout.block_bytes,
        num_blocks=memory.num_blocks,
        generation_table_address=generation_table_offset(memory.num_blocks, layout.block_bytes),
        generation_entry_bytes=ENTRY_BYTES,
        num_layers=layout.num_layers,
        transfer=TRANSFER,
    )
