"""The reader's side of a process group: one thread that receives the answers to its reads, in order."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.core.ids import ReadId
from baton.runtime.logging import get_logger
from baton.transfer.backend import GenerationEntry, ReadState
from baton.transfer.backends.collective.message_format import MessageMemory
from baton.transfer.backends.collective.process_group import GroupFailed, GroupLeft, ProcessGroup

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRead:
    """One read. own: the blocks that it fills; None for a probe, whose blocks are dropped."""

    read_id: ReadId
    num_blocks: int
    own: tuple[int, ...] | None


OnRead = Callable[[GroupRead, ReadState, tuple[GenerationEntry, ...]], None]
"""Called on the group's thread at the end of a read, with its entries if it is DONE."""


class ReadingGroup:
    """Receives messages into staging buffers and copies their blocks to the destinations.

    A message is copied only if it answers the read that is next, so late data never lands in blocks of
    another read. If an operation fails or nothing arrives for `silence_s`, the group ends and all its reads
    are FAILED. They are LOST if this or the other process has left the group, as are reads that the owner
    refuses. The thread ends after `close`, or with the group. `put` and `close` may be called from any
    thread.
    """

    def __init__(
        self, group: ProcessGroup, messages: MessageMemory, *, name: str, silence_s: float, on_read: OnRead
    ) -> None:
        """`name`: names the peer in the log and the thread."""
        self.has_joined = False
        self.has_ended = False
        self._group, self._messages = group, messages
        self._name, self._silence_s, self._on_read = name, silence_s, on_read
        self._queue: queue.SimpleQueue[GroupRead | None] = queue.SimpleQueue()
        self._taken: deque[GroupRead] = deque()  # the one that is received, and the next one
        self._lock = threading.Lock()
        self._is_closing = False
        self._has_been_left = False
        self._thread = threading.Thread(target=self._run, name=f"kv-group-{name}", daemon=True)
        self._thread.start()

    def put(self, read: GroupRead) -> bool:
        """Add a read. Returns False if the group has ended."""
        with self._lock:
            if self.has_ended or self._is_closing:
                return False
            self._queue.put(read)
            return True

    def close(self) -> None:
        """End the group: all its reads are LOST. Blocks for milliseconds at most."""
        with self._lock:
            self._is_closing = True
        self._queue.put(None)
        self._group.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._group.join()
            self.has_joined = True
            buffers = [self._messages.new_buffer(), self._messages.new_buffer()]
            number, work = 0, None
            while self._has_more(waits=True):
                if work is None:
                    work = self._receive(buffers[number], self._taken[0])
                self._group.wait(work, self._silence_s)
                work = None
                if self._has_more(waits=False):  # the next message arrives while this one is copied
                    work = self._receive(buffers[1 - number], self._taken[1])
                self._finish(buffers[number], self._taken[0])
                number = 1 - number
        except GroupFailed as error:
            self._has_been_left = isinstance(error, GroupLeft)
            if not self._is_closing:
                log.warning("kv_group_failed", peer=self._name, problem=str(error))
        except Exception:  # memory errors, errors of torch
            log.exception("kv_group_failed", peer=self._name)
        finally:
            self._end()

    def _has_more(self, *, waits: bool) -> bool:
        """Take the next read from the queue, unless one is taken beyond that whose message has arrived.

        waits: waits for a read if none is taken; else the read after the taken one is looked for.
        Returns False if there is none, or the group is to end.
        """
        wanted = 1 if waits else 2
        if self._is_closing:
            return False  # what `close` puts into the queue may have been taken already, so nothing more comes
        if len(self._taken) < wanted and (waits or not self._queue.empty()):
            read = self._queue.get()
            if read is not None:
                self._taken.append(read)
        return len(self._taken) >= wanted and not self._is_closing

    def _receive(self, buffer: Any, read: GroupRead) -> Any:
        return self._group.start_receive(self._messages.expected(buffer, read.num_blocks))

    def _finish(self, buffer: Any, read: GroupRead) -> None:
        header = self._messages.header(buffer)
        if header.read_id != read.read_id or header.num_blocks != read.num_blocks:
            raise GroupFailed(f"the answer to read {header.read_id} came where that to {read.read_id} was expected")
        entries = self._messages.unpack(buffer, read.num_blocks, read.own) if header.granted else ()
        self._taken.popleft()
        self._on_read(read, ReadState.DONE if header.granted else ReadState.LOST, entries)

    def _end(self) -> None:
        """Leave the group and end what is left. Reads are terminal only after nothing writes any more."""
        try:
            self._group.close()
        finally:
            with self._lock:
                self.has_ended = True
            while not self._queue.empty():
                waiting = self._queue.get()
                if waiting is not None:
                    self._taken.append(waiting)
            state = ReadState.LOST if self._is_closing or self._has_been_left else ReadState.FAILED
            for read in self._taken:
                self._on_read(read, state, ())
