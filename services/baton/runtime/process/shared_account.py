"""Buffers that share one account of the memory budget. If it is full, the largest buffer is cut off.

A slow peer whose buffer grows therefore loses its own buffer, and cannot displace those of fast peers.
"""

from collections.abc import Callable

from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget


class SharedAccount:
    """The buffers of one account. Used from one event loop."""

    def __init__(self, budget: ByteBudget, account: Account, what: str) -> None:
        """`what` names one buffer in error messages, such as `the stream`."""
        self.budget = budget
        self.account = account
        self.what = what
        self._open: set[Buffer] = set()

    def open(self, on_cut: Callable[[OverBudget], None]) -> "Buffer":
        """Return a new buffer. `on_cut` is called if it is cut off for another one."""
        buffer = Buffer(self, on_cut)
        self._open.add(buffer)
        return buffer

    def largest(self, *, asking: "Buffer", num_bytes: int) -> "Buffer":
        """Return the buffer with the most bytes, when `asking` needs `num_bytes` more."""
        return max(self._open, key=lambda one: (one.num_bytes + num_bytes * (one is asking), one is asking))

    def discard(self, buffer: "Buffer") -> None:
        """Forget a closed buffer."""
        self._open.discard(buffer)


class Buffer:
    """Bytes of one buffer. Close it when the buffer is dropped."""

    def __init__(self, shared: SharedAccount, on_cut: Callable[[OverBudget], None]) -> None:
        self._shared = shared
        self._on_cut = on_cut
        self._reservation = shared.budget.reserve(shared.account, 0, shared.what)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes in this buffer."""
        return self._reservation.num_bytes

    def add(self, num_bytes: int) -> None:
        """Count new bytes. While the account is full, cut off the largest buffer. Does nothing after `close`.

        Raises OverBudget, and counts nothing, if this buffer would be the largest.
        """
        while not self._is_closed:
            try:
                return self._reservation.grow(num_bytes)
            except OverBudget as error:
                largest = self._shared.largest(asking=self, num_bytes=num_bytes)
                if largest is self:
                    raise
                largest.cut(error)

    def resize(self, num_bytes: int) -> None:
        """Count `num_bytes` in all. Raises OverBudget if this buffer would be the largest."""
        if num_bytes > self.num_bytes:
            self.add(num_bytes - self.num_bytes)
        else:
            self.remove(self.num_bytes - num_bytes)

    def remove(self, num_bytes: int) -> None:
        """Count bytes that have left the buffer."""
        self._reservation.resize(max(0, self._reservation.num_bytes - num_bytes))

    def cut(self, error: OverBudget) -> None:
        """Close the buffer because a smaller one needs its bytes, and tell its owner.

        error: why the other buffer could not grow.
        """
        on_cut = self._on_cut
        self.close()
        on_cut(error)

    def close(self) -> None:
        """Give all bytes back. Closing twice has no effect."""
        self._is_closed = True
        self._on_cut = _ignore  # its owner is freed at once, not by a garbage collection
        self._reservation.release()
        self._shared.discard(self)


def _ignore(error: OverBudget) -> None:
    """Ignore that a closed buffer is cut off."""
