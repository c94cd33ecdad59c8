"""The owner's part in the two-sided reads of one reader: the process group of one stream, and its limits."""

from collections.abc import Callable, Sequence

from baton.core.ids import ReadId, WorkerRef
from baton.core.messages.peer_messages import GroupMessage
from baton.runtime.logging import get_logger
from baton.transfer.backend import SendGroup
from baton.transfer.backends.collective.message_format import MessageFormat, MessageHeader
from baton.transfer.backends.collective.rendezvous_store import MAX_VALUE_BYTES, RendezvousStore
from baton.transfer.backends.collective.serving_group import ReadAnswer, ServingGroup

log = get_logger(__name__)

MAX_ENDING_GROUPS = 4
"""Most groups of one stream that were left and have not ended. One that is being formed ends later."""
JOIN_KEY = "join"
"""Key of a reader's first message of a group, which has no value."""
MAX_WAITING_MESSAGES = 64
"""Most messages of full size whose blocks may wait in one group; with more, it is ended. This is twice what
readers have in flight (`reader.peer_reads.MAX_INFLIGHT_BYTES`)."""

OpenServing = Callable[[WorkerRef, RendezvousStore], ServingGroup | None]
"""Starts to form a group with a reader; None if the worker serves too many groups."""


class GroupServer:
    """Implements `ReadServer`. The reader numbers its groups; a message of a later one ends the previous."""

    def __init__(
        self,
        reader: WorkerRef,
        *,
        message_format: MessageFormat,
        num_blocks: int,
        send: SendGroup,
        new_store: Callable[[Callable[[str, bytes], None]], RendezvousStore],
        open_group: OpenServing,
        end_group: Callable[[ServingGroup], None],
    ) -> None:
        """num_blocks: of both regions.

        new_store: takes what sends a value to the reader, from any thread
        end_group: closes a group without waiting for it
        """
        self._reader, self._format, self._num_blocks = reader, message_format, num_blocks
        self._send, self._new_store = send, new_store
        self._open_group, self._end_group = open_group, end_group
        self._number = 0
        self._store: RendezvousStore | None = None
        self._group: ServingGroup | None = None
        self._left: list[ServingGroup] = []
        self._is_closed = False

    def receive(self, message: GroupMessage) -> None:
        if self._is_closed or message.group < self._number:
            return  # of a group that has ended
        if message.group > self._number:
            self._leave()
            self._number = message.group
            if message.key:
                self._join()
        if not message.key:
            self._leave()
        elif len(message.value) > MAX_VALUE_BYTES:
            problem = f"a value of {len(message.value)} bytes was published; must be at most {MAX_VALUE_BYTES}"
            log.warning("kv_group_ended", reader=str(self._reader), problem=problem)
            self._send(GroupMessage(group=self._number, key=""))
            self._leave()
        elif self._store is not None and message.key != JOIN_KEY:
            self._store.deliver(message.key, message.value)

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        if all(0 <= block_id < self._num_blocks for block_id in block_ids):
            self._answer(read_id, len(block_ids), tuple(block_ids))
        else:
            self.refuse_read(read_id, len(block_ids))

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        self._answer(read_id, num_blocks, ())

    def close(self) -> None:
        self._is_closed = True
        self._leave()

    def _join(self) -> None:
        number = self._number
        self._left = [group for group in self._left if not group.has_ended]
        if len(self._left) >= MAX_ENDING_GROUPS:
            log.warning("kv_group_refused", reader=str(self._reader), problem="its earlier groups have not ended yet")
            self._send(GroupMessage(group=number, key=""))
            return
        self._store = self._new_store(lambda key, value: self._send(GroupMessage(group=number, key=key, value=value)))
        self._group = self._open_group(self._reader, self._store)
        if self._group is None:
            self._store = None
            self._send(GroupMessage(group=number, key=""))

    def _answer(self, read_id: ReadId, num_blocks: int, block_ids: tuple[int, ...]) -> None:
        group = self._group
        if group is None or group.has_ended:
            return  # the reader's side ends, too
        most = MAX_WAITING_MESSAGES * self._format.max_blocks
        if not 0 < num_blocks <= self._format.max_blocks or group.waiting_blocks + num_blocks > most:
            log.warning("kv_group_ended", reader=str(self._reader), num_blocks=num_blocks, waiting=group.waiting_blocks)
            self._send(GroupMessage(group=self._number, key=""))
            self._leave()
            return
        header = MessageHeader(read_id=read_id, num_blocks=num_blocks, granted=bool(block_ids))
        group.put(ReadAnswer(header=header, block_ids=block_ids))

    def _leave(self) -> None:
        if self._group is not None:
            self._end_group(self._group)
            self._left.append(self._group)
        self._group = self._store = None
