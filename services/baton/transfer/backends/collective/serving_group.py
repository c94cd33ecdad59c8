"""The owner's side of a process group: one thread that sends blocks to a reader, in the order of its
reads."""

import queue
import threading
from dataclasses import dataclass
from typing import Any

from baton.runtime.logging import get_logger
from baton.transfer.backends.collective.message_format import MessageHeader, MessageMemory
from baton.transfer.backends.collective.process_group import GroupFailed, ProcessGroup

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """An answer to send. block_ids: empty if the read is refused."""

    header: MessageHeader
    block_ids: tuple[int, ...]


class ServingGroup:
    """Copies blocks into one of two buffers while the other one is being sent.

    If the reader takes nothing for `silence_s`, the group ends. The thread ends after `close`, or with the
    group. `put` and `close` may be called from any thread.

    waiting_blocks: number of blocks in answers that were put and not sent yet
    """

    def __init__(self, group: ProcessGroup, messages: MessageMemory, *, name: str, silence_s: float) -> None:
        """`name`: names the reader in the log and the thread."""
        self.has_ended = False
        self.waiting_blocks = 0
        self._group, self._messages = group, messages
        self._name, self._silence_s = name, silence_s
        self._queue: queue.SimpleQueue[ReadAnswer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"kv-serve-{name}", daemon=True)
        self._thread.start()

    def put(self, answer: ReadAnswer) -> None:
        """Add an answer. It is lost if the group has ended; the reader then sees that, too."""
        with self._lock:
            self.waiting_blocks += answer.header.num_blocks
        self._queue.put(answer)

    def close(self) -> None:
        """End the group. Blocks for milliseconds at most."""
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
            buffers = [self._messages.new_buffer(), self._messages.new_buffer()]
            works: list[Any] = [None, None]
            number = 0
            while not self._is_closing:
                if self._queue.empty():  # what is under way may fail while there is nothing to do
                    for each in (number, 1 - number):
                        self._finish(works, each)
                answer = self._queue.get()
                if answer is None:
                    break
                self._finish(works, number)
                message = self._messages.pack(buffers[number], answer.header, answer.block_ids)
                works[number] = self._group.start_send(message)
                with self._lock:
                    self.waiting_blocks -= answer.header.num_blocks
                number = 1 - number
        except GroupFailed as error:
            if not self._is_closing:
                log.warning("kv_group_failed", peer=self._name, problem=str(error))
        except Exception:  # memory errors, errors of torch
            log.exception("kv_group_failed", peer=self._name)
        finally:
            try:
                self._group.close()
            finally:
                self.has_ended = True

    def _finish(self, works: list[Any], number: int) -> None:
        if works[number] is not None:
            self._group.wait(works[number], self._silence_s)
            works[number] = None
