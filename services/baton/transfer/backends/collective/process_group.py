"""`ProcessGroup`: a group of two processes, a reader of KV and its owner, that exchange messages."""

from typing import Any, Protocol

READER_RANK, OWNER_RANK = 0, 1
"""Ranks in a group of two."""


class GroupFailed(Exception):
    """A process group cannot be formed, or has failed. It must be left; a new one may work."""


class GroupLeft(GroupFailed):
    """The other process has closed its connection: it has left the group, or has died."""


class ProcessGroup(Protocol):
    """A group of this process and one other. One thread uses it, except for `abort`.

    `buffer` is memory of `MessageMemory`, [num_bytes] uint8. It must stay unchanged, and allocated, until the
    operation on it has ended or the group was closed.
    """

    def join(self) -> None:
        """Wait until the other process joins, connect to it, and check that it is the one of the store.

        Raises GroupFailed, at the latest when the time limit of the store has passed.
        """
        ...

    def start_send(self, buffer: Any) -> Any:
        """Start to send a whole buffer. Returns what `wait` takes. Raises GroupFailed."""
        ...

    def start_receive(self, buffer: Any) -> Any:
        """Start to receive the next message. Over Gloo it may be shorter than the buffer.

        Returns what `wait` takes. Raises GroupFailed.
        """
        ...

    def wait(self, work: Any, timeout_s: float) -> None:
        """Wait until an operation has ended. Raises GroupFailed if it fails or takes longer; the group has
        then failed. GroupLeft says that the other process has left it."""
        ...

    def abort(self) -> None:
        """Make everything fail that waits in this group, or will. May be called from any thread, and blocks
        for milliseconds at most."""
        ...

    def close(self) -> None:
        """Leave the group and close its connections. Nothing may wait in it."""
        ...
