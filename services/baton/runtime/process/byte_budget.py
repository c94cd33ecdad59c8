"""The memory budget of a process: bytes that requests may hold, by account.

A buffer that grows with what clients send reserves its bytes here before it takes them, so that no mix of
requests can exhaust the memory of the process. Interpreter, code, tokenizer, connections, weights, KV blocks
and the prefix index are not part of the budget.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Self

from baton.core.errors import Code, Failure, Reason, Refused

RETRY_S = 1.0
"""Seconds after which a client should retry a request that did not fit."""


class Account(Enum):
    """Use of budgeted memory. The value is the metric label."""

    HEADS = "heads"
    """HTTP requests that the application has not seen yet: unfinished heads, and requests that a client sent
    before the response to an earlier one."""
    UNREAD_CALLS = "unread_calls"
    """gRPC calls whose message is not read yet, with the beginning of it."""
    KEYLESS_CALLS = "keyless_calls"
    """Open gRPC calls that need no key: health checks."""
    RECEIVING = "receiving"
    """Request bodies and messages that are being read and parsed."""
    REQUESTS = "requests"
    """Open requests: prompts, delivered tokens, and the largest response that may be collected."""
    UNSENT = "unsent"
    """Output that clients have not read yet."""
    QUERIES = "queries"
    """Placement queries that a scheduler is answering, those that wait included."""
    WAITING = "waiting"
    """Requests in the queue of a scheduler, and answers that no gateway has fetched yet."""
    PLACEMENTS = "placements"
    """Placements of a scheduler whose requests have not ended."""
    RECORDS = "records"
    """Recent decisions of a scheduler, with their records."""
    JOBS = "jobs"
    """Jobs of a worker until the gateway has acknowledged their end: prompts, block hashes and outputs."""
    SESSIONS = "sessions"
    """Messages of a worker that gateways have not acknowledged."""
    STREAMS = "streams"
    """Messages on streams between services: not sent yet, or received and not handled yet."""


class OverBudget(Refused):
    """A reservation does not fit. The message has the arithmetic.

    fits_later: True if it would fit into the empty account, so that a retry can succeed.
    """

    def __init__(self, message: str, *, fits_later: bool) -> None:
        super().__init__(
            Failure(
                code=Code.RESOURCE_EXHAUSTED if fits_later else Code.INVALID_ARGUMENT,
                reason=Reason.MEMORY_BUDGET,
                message=message,
                retry_after_s=RETRY_S if fits_later else None,
            )
        )
        self.fits_later = fits_later


class ByteBudget:
    """Bytes that a process may hold, with one limit per account."""

    def __init__(self, limits: Mapping[Account, int], service: str = "process") -> None:
        """Create a budget.

        limits: bytes by account. An account without a limit takes no reservation.
        service: name of the process in error messages.
        """
        self.limits: Mapping[Account, int] = MappingProxyType(dict(limits))
        self.service = service
        self._used = dict.fromkeys(self.limits, 0)

    def used(self, account: Account) -> int:
        """Return the reserved bytes of an account."""
        return self._used.get(account, 0)

    def reserve(self, account: Account, num_bytes: int, what: str) -> "Reservation":
        """Reserve bytes until the result is released. `what` names the user of the bytes in error messages.

        Raises OverBudget if they do not fit.
        """
        reservation = Reservation(self, account, what)
        reservation.resize(num_bytes)
        return reservation

    def change(self, account: Account, old_bytes: int, new_bytes: int, what: str) -> None:
        """Change a reservation from `old_bytes` to `new_bytes`. Raises OverBudget if it does not fit."""
        limit, used = self.limits.get(account, 0), self.used(account)
        if new_bytes > old_bytes and used - old_bytes + new_bytes > limit:
            fits_later = new_bytes <= limit
            free = f"{max(0, limit - used + old_bytes):,} of {limit:,} bytes for {account.value} are free"
            raise_it = f"raise --memory-budget of the {self.service}"
            remedy = "retry later" if fits_later else f"send a smaller request or {raise_it}"
            raise OverBudget(f"{what} needs {new_bytes:,} bytes; {free}; {remedy}", fits_later=fits_later)
        self._used[account] = used - old_bytes + new_bytes


class Reservation:
    """Reserved bytes of one account. Use as `with`, or call `release`; releasing twice has no effect."""

    __slots__ = ("_account", "_budget", "_what", "num_bytes")

    def __init__(self, budget: ByteBudget, account: Account, what: str) -> None:
        self._budget = budget
        self._account = account
        self._what = what
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Reserve `num_bytes` in all. Raises OverBudget, and keeps the old size, if they do not fit."""
        self._budget.change(self._account, self.num_bytes, num_bytes, self._what)
        self.num_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more. Raises OverBudget, and keeps the old size, if they do not fit."""
        self.resize(self.num_bytes + num_bytes)

    def release(self) -> None:
        """Give all bytes back."""
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def shares(total_bytes: int, weights: Mapping[Account, int]) -> dict[Account, int]:
    """Return the limits of accounts that divide `total_bytes` in proportion to `weights`."""
    total_weight = sum(weights.values())
    return {account: total_bytes * weight // total_weight for account, weight in weights.items()}
