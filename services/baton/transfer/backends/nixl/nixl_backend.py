"""Transfer backend over NIXL (UCX): reads registered memory of other processes, on one host or between hosts.

Agent metadata is sent as NIXL's own bytes, addresses as integers; nothing is pickled. Only `NixlThread` uses
the agent.
"""

import asyncio
import atexit
import secrets
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.runtime.logging import get_logger
from baton.transfer.backend import KvDescriptor, SendGroup, drop_message
from baton.transfer.backends.block_ranges import runs
from baton.transfer.backends.host_memory import HOST, HostMemory, KvRegion, anonymous_region
from baton.transfer.backends.nixl import ucx
from baton.transfer.backends.nixl.nixl_agent import new_agent
from baton.transfer.backends.nixl.nixl_memory import SEGMENTS, register
from baton.transfer.backends.nixl.nixl_thread import NixlPeer, NixlThread
from baton.transfer.backends.nixl.pair_transport import ucx_environment
from baton.transfer.backends.one_sided_backend import OneSidedBackend, probe_blocks
from baton.transfer.integrity.generation_table import ENTRY_BYTES

log = get_logger(__name__)

TRANSFER = "nixl"
_CLOSE_S, _EXIT_S = 5.0, 2.0


class NixlBackend(OneSidedBackend[KvRegion, NixlPeer]):
    """Implements `TransferBackend`. The caller keeps the registered memory allocated until after `aclose`."""

    def __init__(
        self,
        *,
        worker: WorkerRef,
        layout: KvLayout,
        kv: KvRegion,
        generation: KvRegion,
        scratch: KvRegion | None = None,
        tier: HostMemory | None = None,
        bind_thread: Callable[[], None] = lambda: None,
        loopback_only: bool = False,
        port_range: str | None = None,
        ucx_log: Path | None = None,
    ) -> None:
        """Register `kv` and the generation table `generation`. Blocks for about a second.

        scratch: `probe_blocks` blocks that probes read into, of the same kind of memory as `kv`, because UCX
            chooses the transport by both ends; None: host memory
        tier: a second region that peers may read
        bind_thread: called on the thread that calls NIXL; binds it to the GPU of `kv`

        The last three arguments only have an effect for the first backend of a process; see
        `ucx.prepare_environment`. Raises LayoutMismatch if the regions do not fit the layout.
        """
        num_blocks = generation.num_bytes // ENTRY_BYTES
        if kv.num_bytes != num_blocks * layout.block_bytes:
            raise LayoutMismatch(
                f"num_blocks: {num_blocks} generation-table entries for {kv.num_bytes / layout.block_bytes:g} blocks"
            )
        if tier is not None and tier.block_bytes != layout.block_bytes:
            raise LayoutMismatch(f"block_bytes: the tier has {tier.block_bytes}, the layout {layout.block_bytes}")
        scratch = scratch or anonymous_region(probe_blocks(num_blocks, layout) * layout.block_bytes)
        on_gpu = kv.memory_kind != HOST
        ucx.prepare_environment(
            loopback_only=loopback_only, port_range=port_range, reads_gpu_memory=on_gpu, log_path=ucx_log
        )
        name = f"{worker}-{secrets.token_hex(4)}"
        events_before = ucx.open_event_fds()
        agent = new_agent(name)
        events = ucx.new_event_fds(events_before)
        regions = [(kv, generation)]
        if tier is not None:
            regions.append((tier.region, _generation_region(tier)))
        for region in (*chain(*regions), scratch):
            register(agent, region)
        memory, *added = _described(agent, name, worker, layout, regions)
        super().__init__(layout=layout, memory=memory, kv=kv, scratch=scratch, added=tuple(added))
        self._thread = NixlThread(agent, events, self._reads.report, bind_thread)
        # If `aclose` is not called: an interpreter that ends while the thread is inside NIXL aborts the
        # process.
        self._at_exit = partial(_stop_at_exit, weakref.ref(self._thread))
        atexit.register(self._at_exit)

    @classmethod
    def over(cls, memory: HostMemory, *, worker: WorkerRef, layout: KvLayout, **settings: Any) -> "NixlBackend":
        """Build a backend over host memory from `allocate_private`."""
        return cls(worker=worker, layout=layout, kv=memory.region, generation=_generation_region(memory), **settings)

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        self._check_layout(peer, layout)
        if peer.memory_kind not in SEGMENTS:
            raise LayoutMismatch(
                f"memory_kind: the peer has {peer.memory_kind!r}; must be one of {', '.join(SEGMENTS)}"
            )
        if peer.agent_name not in self._peers:
            self._peers[peer.agent_name] = entry = NixlPeer(peer)
            self._thread.load(entry)

    def forget(self, peer: KvMemory) -> None:
        entry = self._peers.pop(peer.agent_name, None)
        if entry is not None:
            self._thread.forget(entry)

    @property
    def failure(self) -> BaseException | None:
        return self._thread.failure

    def transport_to(self, peer: KvMemory) -> str:
        entry = self._peers.get(peer.agent_name)
        return entry.transport if entry is not None else ""

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        peer = self._begin(read_id, source)
        if peer is not None:
            self._thread.read_generations(read_id, peer, source.memory.generation_table_address, source.block_ids)

    async def aclose(self) -> None:
        """Wait up to 5 s for running reads, then end the thread.

        If reads still run, the agent is kept until the process ends. The caller must then keep the memory,
        too.
        """
        running = [asyncio.ensure_future(self._reads.wait(read_id)) for read_id in self._reads.running]
        if running and self.failure is not None:  # the thread has ended, so no read will
            for wait in running:
                wait.cancel()
        elif running:
            _done, late = await asyncio.wait(running, timeout=_CLOSE_S)
            for wait in late:
                wait.cancel()
        self._thread.close()
        await asyncio.to_thread(self._thread.join)
        atexit.unregister(self._at_exit)

    def _start_copy(self, read_id: ReadId, source: KvDescriptor, into: KvRegion, block_ids: Sequence[int]) -> None:
        size, peer_memory = self._layout.block_bytes, source.memory
        copies = [
            (peer_memory.base_address + run.source * size, into.address + run.own * size, run.num_blocks * size)
            for run in runs(source.block_ids, block_ids)
        ]
        peer = self._begin(read_id, source)
        if peer is not None:
            local, remote = (
                (SEGMENTS[into.memory_kind], into.device_id),
                (SEGMENTS[peer_memory.memory_kind], peer_memory.device_id),
            )
            self._thread.read(read_id, peer, copies, local, remote)


def _described(
    agent: Any, name: str, worker: WorkerRef, layout: KvLayout, regions: Sequence[tuple[KvRegion, KvRegion]]
) -> list[KvMemory]:
    """Describe the regions of an agent, which have been registered: the blocks and the generation table of
    each."""
    metadata = bytes(agent.get_agent_metadata())
    return [
        KvMemory(
            owner=worker,
            agent_name=name,
            agent_metadata=metadata,
            memory_kind=blocks.memory_kind,
            device_id=blocks.device_id,
            base_address=blocks.address,
            block_stride_bytes=layout.block_bytes,
            num_blocks=table.num_bytes // ENTRY_BYTES,
            generation_table_address=table.address,
            generation_entry_bytes=ENTRY_BYTES,
            num_layers=layout.num_layers,
            ucx_environment=ucx_environment(),
            transfer=TRANSFER,
        )
        for blocks, table in regions
    ]


def _generation_region(memory: HostMemory) -> KvRegion:
    return KvRegion(address=int(memory.generation_table.ctypes.data), num_bytes=memory.generation_table.nbytes)


def _stop_at_exit(thread: "weakref.ref[NixlThread]") -> None:
    running = thread()
    if running is not None:
        running.close()
        running.join(_EXIT_S)
