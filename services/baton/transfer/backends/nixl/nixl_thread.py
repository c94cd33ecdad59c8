"""The thread that owns a NIXL agent: it posts and polls reads, and makes progress for peers that read from
here.

Posting a read may block for the whole copy, and NIXL's own progress thread would use a full core. This thread
sleeps on UCX's event descriptors, so it uses no CPU while it is idle.

An error of a read ends it only if NIXL says so (`nixl_errors`). Otherwise the read is in doubt. It ends when
a later poll reports its end, or when its connection has failed. An error of the notification
call is retried a few times and then ends the thread, because peers can no longer read from here.
"""

import ctypes
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.ids import ReadId
from baton.core.kv.kv_layout import KvMemory
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.runtime.thread_commands import ThreadCommands
from baton.transfer.backend import GenerationEntry, ReadState
from baton.transfer.backends.block_ranges import CopyRange
from baton.transfer.backends.first_reads import FirstReads
from baton.transfer.backends.generation_cells import GenerationCells
from baton.transfer.backends.nixl import nixl_errors
from baton.transfer.backends.nixl.nixl_memory import HOST_SEGMENT, Segment, memory_kind_of, prepare_read, register
from baton.transfer.backends.nixl.pair_transport import UNKNOWN_TRANSPORT, PairTransports, PeerKind
from baton.transfer.backends.nixl.ucx import UcxLog

log = get_logger(__name__)

_SPINS = 200
"""Number of times that the thread polls running reads before it sleeps between polls."""
_BUSY_MS, _IDLE_MS, _BLIND_IDLE_MS = 1, 1000, 2
"""Longest sleep while reads run, while none runs, and while none runs and UCX's descriptors were not
found."""
_DOUBT_POLL_S = 1.0
"""Time between two polls of the reads that are in doubt."""
_ReadKind = tuple[str, Segment, Segment]
"""(name of the peer's agent, local segment, remote segment): what UCX has one configuration for."""


@dataclass(slots=True)
class NixlPeer:
    """One peer incarnation. Owned by the thread; the event loop only reads `transport`."""

    memory: KvMemory
    transport: str = ""
    is_loaded: bool = False
    is_forgotten: bool = False
    num_running: int = 0


@dataclass(slots=True)
class _Running:
    """One posted read. Its handle is kept until the read is terminal, because the finalizer releases it.

    has_handle: False if NIXL has deleted the handle
    """

    handle: Any
    peer: NixlPeer
    cells: list[int] = field(default_factory=list)
    has_handle: bool = True


class NixlThread:
    """Runs commands in the order of the calls. Calls `report` from the thread when a read ends or is in
    doubt.

    The thread starts in the constructor. failure: the error that has ended it; its reads never end then
    """

    def __init__(
        self,
        agent: Any,
        ucx_events: Sequence[int],
        report: Callable[[ReadId, ReadState, tuple[GenerationEntry, ...]], None],
        bind: Callable[[], None],
    ) -> None:
        """Take ownership of `agent`.

        `ucx_events`: descriptors that become readable when UCX has work to progress. `bind`: called on the
        thread before it calls NIXL.
        """
        self._agent, self._ucx_events, self._report, self._bind = agent, ucx_events, report, bind
        self._ucx_log = UcxLog()
        self._transports = PairTransports(self._ucx_log)
        self._first_reads: FirstReads[_ReadKind] = FirstReads()
        self._cells = GenerationCells()
        register(agent, self._cells.region)
        self.failure: BaseException | None = None
        self._running: dict[ReadId, _Running] = {}
        self._in_doubt: dict[ReadId, _Running] = {}
        self._next_doubt_poll_s = 0.0
        self._notification_errors = nixl_errors.NotificationErrors()
        self._commands = ThreadCommands()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    # -- called from the event loop ----------------------------------------------------------------

    def load(self, peer: NixlPeer) -> None:
        """Load the peer's metadata and start to connect."""
        self._commands.add(lambda: self._load(peer))

    def forget(self, peer: NixlPeer) -> None:
        """Unload the peer once no read from it runs."""
        self._commands.add(lambda: self._forget(peer))

    def read(
        self, read_id: ReadId, peer: NixlPeer, copies: Sequence[CopyRange], local: Segment, remote: Segment
    ) -> None:
        """Post a read of several address ranges."""
        self._commands.add(lambda: self._post(read_id, peer, copies, local, remote, [], time.monotonic()))

    def read_generations(self, read_id: ReadId, peer: NixlPeer, table_address: int, block_ids: Sequence[int]) -> None:
        """Post a read of generation-table entries. They are passed to `report` at its end."""
        self._commands.add(lambda: self._post_generations(read_id, peer, table_address, block_ids))

    def close(self) -> None:
        """Ask the thread to end. If reads still run, the agent and its handles are kept until the process
        ends.

        Destroying them would abort a paused owner process when it resumes.
        """
        self._is_closing = True
        self._commands.wake()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout_s)

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._bind()
            self._serve()
        except Exception as error:
            log.critical("kv_thread_failed", error=nixl_errors.describe(error), running=len(self._running))
            self.failure = error
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # reads may still be written
        else:
            self._end()

    def _serve(self) -> None:
        poller = select.poll()
        for fd in (self._commands.wake_fd, *self._ucx_events):
            poller.register(fd, select.POLLIN)
        idle_ms = _IDLE_MS if self._ucx_events else _BLIND_IDLE_MS
        spins = 0
        while not self._is_closing:
            had_work = self._commands.run()
            self._serve_peers()
            had_work |= self._check_running()
            for post in self._first_reads.due(time.monotonic()):
                post()
            if self._in_doubt:
                self._check_in_doubt()
            spins = 0 if had_work else spins + 1
            sleep_ms = idle_ms if not self._running else 0 if spins < _SPINS else _BUSY_MS
            if self._notification_errors.num_in_a_row:
                sleep_ms = min(sleep_ms, _BUSY_MS)
            for fd, _event in poller.poll(sleep_ms):
                if fd == self._commands.wake_fd:
                    self._commands.drain()

    def _serve_peers(self) -> None:
        """Make progress for peers that read from here.

        Raises NIXL's error after too many in a row.
        """
        errors = self._notification_errors
        if errors.num_in_a_row and time.monotonic() < errors.retry_s:
            return
        try:
            hit("transfer.notifications")
            self._agent.get_new_notifs()
        except Exception as error:
            may_retry = errors.add(time.monotonic())
            log.warning("kv_notifications_failed", attempt=errors.num_in_a_row, error=nixl_errors.describe(error))
            if not may_retry:
                raise
        else:
            errors.clear()

    def _end(self) -> None:
        if self._running or self._in_doubt:
            log.warning("kv_agent_kept", running=len(self._running), in_doubt=len(self._in_doubt))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        else:
            del self._agent
        self._commands.close()

    def _load(self, peer: NixlPeer) -> None:
        try:
            self._agent.add_remote_agent(peer.memory.agent_metadata)
            self._agent.make_connection(peer.memory.agent_name)
            peer.is_loaded = True
        except Exception as error:  # NIXL's exceptions have no common base
            log.warning("kv_connect_failed", owner=str(peer.memory.owner), error=nixl_errors.describe(error))

    def _forget(self, peer: NixlPeer) -> None:
        peer.is_forgotten = True
        self._first_reads.forget(lambda kind: kind[0] == peer.memory.agent_name)
        self._unload(peer)

    def _unload(self, peer: NixlPeer) -> None:
        if peer.is_loaded and not peer.num_running:
            peer.is_loaded = False
            self._try("remove_remote_agent", lambda: self._agent.remove_remote_agent(peer.memory.agent_name))

    def _post_generations(self, read_id: ReadId, peer: NixlPeer, table_address: int, block_ids: Sequence[int]) -> None:
        cells = self._cells.take(len(block_ids))
        if cells is None:
            log.warning("kv_generation_cells_exhausted", running=len(self._running))
            self._report(read_id, ReadState.FAILED, ())
            return
        copies = self._cells.copies(table_address, block_ids, cells)
        self._post(read_id, peer, copies, HOST_SEGMENT, HOST_SEGMENT, cells, time.monotonic())

    def _post(
        self,
        read_id: ReadId,
        peer: NixlPeer,
        copies: Sequence[CopyRange],
        local: Segment,
        remote: Segment,
        cells: list[int],
        asked_s: float,
    ) -> None:
        kind = (peer.memory.agent_name, local, remote)
        if not self._first_reads.begin(read_id, kind, time.monotonic(), asked_s=asked_s):
            self._first_reads.hold(asked_s, lambda: self._post(read_id, peer, copies, local, remote, cells, asked_s))
            return
        if self._first_reads.is_first(read_id):
            self._transports.begin_first_read()
        if not peer.is_loaded and not peer.is_forgotten:
            self._load(peer)  # reconnect after a failure
        try:
            handle = prepare_read(self._agent, peer.memory.agent_name, copies, local, remote)
        except Exception as error:
            self._not_posted(read_id, peer, cells, error)
            return
        read = _Running(handle, peer, cells)
        try:
            state = self._agent.transfer(handle)
        except Exception as error:
            if nixl_errors.ends_post(error):
                self._release(read, error)
                self._not_posted(read_id, peer, cells, error)
                return
            peer.num_running += 1
            self._doubt(read_id, read, error)
            return
        peer.num_running += 1
        self._running[read_id] = read
        if state != "PROC":
            self._terminal(read_id, state)

    def _check_running(self) -> bool:
        """Handle reads that have ended or are in doubt. Returns True if there was one."""
        changed = False
        for read_id, read in list(self._running.items()):
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                del self._running[read_id]
                if nixl_errors.ends_read(error):
                    self._failed(read_id, read, error)
                else:
                    self._doubt(read_id, read, error)
                changed = True
                continue
            if state != "PROC":
                self._terminal(read_id, state)
                changed = True
        return changed

    def _check_in_doubt(self) -> None:
        """Poll the reads that are in doubt from time to time. Each end is reported as a failure."""
        now_s = time.monotonic()
        if now_s < self._next_doubt_poll_s:
            return
        self._next_doubt_poll_s = now_s + _DOUBT_POLL_S
        for read_id, read in list(self._in_doubt.items()):
            if not read.has_handle or read_id not in self._in_doubt:
                continue
            try:
                if self._agent.check_xfer_state(read.handle) == "DONE":
                    self._failed(read_id, self._in_doubt.pop(read_id), None)
            except Exception as error:
                read.has_handle = not nixl_errors.deletes_handle(error)
                if nixl_errors.ends_read(error):
                    self._failed(read_id, self._in_doubt.pop(read_id), error)

    def _doubt(self, read_id: ReadId, read: _Running, error: Exception) -> None:
        """Report a read that has failed, but of which NIXL does not say that it has ended."""
        log.warning("kv_read_in_doubt", owner=str(read.peer.memory.owner), error=nixl_errors.describe(error))
        read.has_handle = not nixl_errors.deletes_handle(error)
        if not self._in_doubt:
            self._next_doubt_poll_s = time.monotonic() + _DOUBT_POLL_S
        self._in_doubt[read_id] = read
        self._first_reads.end(read_id, is_done=False)
        self._report(read_id, ReadState.IN_DOUBT, ())

    def _failed(self, read_id: ReadId, read: _Running, error: Exception | None) -> None:
        """End a posted read that has failed. `error`: what NIXL has reported; None for a late success."""
        log.info(
            "kv_read_failed",
            owner=str(read.peer.memory.owner),
            error=nixl_errors.describe(error) if error is not None else "it has ended after an error",
        )
        self._first_reads.end(read_id, is_done=False)
        self._close(read, error)
        if error is not None:
            self._connection_failed(read.peer, error)
        self._report(read_id, ReadState.FAILED, ())

    def _close(self, read: _Running, error: Exception | None) -> None:
        """Release what a read that has ended holds."""
        read.peer.num_running -= 1
        self._release(read, error)
        self._cells.free(read.cells)
        if read.peer.is_forgotten:
            self._unload(read.peer)

    def _terminal(self, read_id: ReadId, state: str) -> None:
        """Handle the state other than PROC that NIXL has returned for a read."""
        read = self._running.pop(read_id)
        if state != "DONE":
            self._doubt(read_id, read, RuntimeError(f"NIXL returned the state {state}"))
            return
        entries = self._cells.entries(read.cells)
        self._find_transport(read_id, read.peer)
        self._close(read, None)
        self._report(read_id, ReadState.DONE, entries)

    def _not_posted(self, read_id: ReadId, peer: NixlPeer, cells: Iterable[int], error: Exception) -> None:
        log.info("kv_read_failed", owner=str(peer.memory.owner), error=nixl_errors.describe(error))
        self._cells.free(cells)
        self._first_reads.end(read_id, is_done=False)
        self._connection_failed(peer, error)
        self._report(read_id, ReadState.FAILED, ())

    def _connection_failed(self, peer: NixlPeer, error: Exception) -> None:
        """Unload the peer, so that the next read loads its metadata again, and log UCX's errors.

        If the connection itself has failed, the peer's reads that are in doubt have ended.
        """
        if nixl_errors.ends_connection(error):
            for read_id in [read_id for read_id, read in self._in_doubt.items() if read.peer is peer]:
                self._close(self._in_doubt.pop(read_id), None)
                self._report(read_id, ReadState.FAILED, ())
        self._unload(peer)
        for problem in self._ucx_log.problems()[:10]:
            log.warning("ucx_error_logged", text=problem)

    def _find_transport(self, read_id: ReadId, peer: NixlPeer) -> None:
        """Set the transport of a peer, if it is unknown, when a read of a new key has succeeded."""
        first = self._first_reads.end(read_id, is_done=True)
        if first is None:
            return
        key, was_alone = first
        memory_kind = memory_kind_of(key[2])
        kind = PeerKind(environment=peer.memory.ucx_environment, memory_kind=memory_kind)
        transport = self._transports.end_first_read(kind, was_alone=was_alone)
        if transport != UNKNOWN_TRANSPORT:
            self._first_reads.settle(key)
        # The generation table is in host memory, whatever kind of memory holds the blocks.
        if memory_kind == peer.memory.memory_kind and peer.transport in ("", UNKNOWN_TRANSPORT):
            peer.transport = transport

    def _release(self, read: _Running, error: Exception | None) -> None:
        """Release the handle of a read that has ended with `error`, unless NIXL has deleted it."""
        if not read.has_handle or (error is not None and nixl_errors.deletes_handle(error)):
            read.handle._released = True  # or the handle's finalizer would release it again
        else:
            self._try("release_xfer_handle", lambda: self._agent.release_xfer_handle(read.handle))

    def _try(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            log.info("nixl_call_failed", what=what, error=nixl_errors.describe(error))
