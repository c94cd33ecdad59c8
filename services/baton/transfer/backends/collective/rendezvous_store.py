"""`RendezvousStore`: the store by which the two processes of a group find each other, carried by their gRPC
stream."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

MAX_KEYS = 64
"""Most values that one side keeps of the other. A group of two needs a handful."""
MAX_VALUE_BYTES = 4096
"""Largest value that is taken from the other process. Gloo's have 170 bytes, NCCL's 128."""


class RendezvousClosed(Exception):
    """The stream that carried the store has ended, or the group was left."""


class RendezvousStore(Store):
    """Implements `torch.distributed.Store` for two processes: what one sets, the other one can get.

    No port is opened, and nothing is stored anywhere else. `publish` sends one value to the other process. It
    is called on the thread that joins the group; `deliver` and `close` may be called from any thread.

    connect_s: longest time that connecting may take after the last value has come
    """

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        """`timeout_s`: longest time that the group may take to form, from now on.

        Values are waited for during the first half of it. The other half is for the connection.
        """
        super().__init__()
        self._publish = publish
        self._values_s = self.connect_s = timeout_s / 2
        self._begin_s = time.monotonic()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def left_s(self) -> float:
        """Time until the group must have formed; at least 1 ms, because Gloo takes 0 for no limit."""
        return max(0.001, self._begin_s + self._values_s + self.connect_s - time.monotonic())

    def deliver(self, key: str, value: bytes) -> None:
        """Add a value of the other process. Values beyond `MAX_KEYS` are dropped."""
        with self._changed:
            if len(self._values) < MAX_KEYS or key in self._values:
                self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Make all waiting calls fail, and further ones."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.deliver(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        """Return a value once there is one. Raises RendezvousClosed or TimeoutError."""
        ends_s = self._begin_s + self._values_s
        with self._changed:
            while key not in self._values:
                if self._is_closed:
                    raise RendezvousClosed("the stream to the other worker has ended")
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise TimeoutError(f"the other worker has not published {key!r} within {self._values_s:g} s")
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values. `timeout` is ignored: the store has one time limit for all values together."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)
