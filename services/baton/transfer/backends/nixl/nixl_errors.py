"""Classifies NIXL's exceptions: which of them say that a read has ended, and which leave its handle usable.

NIXL's exceptions have no common base and are only importable where NIXL is, so they are told apart by name.
What each means was read from NIXL 1.5.1 with its UCX plugin:

- A read consists of one UCX request per address range. An error of one request says nothing about the others.
- When an endpoint fails, UCX completes all of its requests, and NIXL reports `nixlRemoteDisconnectError`.
- A post that fails after some ranges were posted cancels these. UCX documents a cancel as best effort.
- The status of a failed read is kept, so that asking again gives the same error.

An error of the notification call says nothing about reads. The call is retried a limited number of times.
"""

REMOTE_DISCONNECT = "nixlRemoteDisconnectError"
NOT_POSTED = "nixlNotPostedError"
NOT_FOUND = "nixlNotFoundError"

MAX_NOTIFICATION_ERRORS = 8
"""Errors of the notification call in a row after which it is not tried again."""
_RETRY_S = 0.002
"""Pause after the first error of the notification call. It doubles with each further one: seven pauses of
0.25 s in all."""

_ENDS_READ = frozenset({REMOTE_DISCONNECT, NOT_POSTED})
_ENDS_POST = _ENDS_READ | {NOT_FOUND}
_DELETES_HANDLE = frozenset({NOT_FOUND, "nixlRepostActiveError"})


def ends_read(error: BaseException) -> bool:
    """Return True if this error of a posted read says that nothing of it will be written any more."""
    return _name(error) in _ENDS_READ


def ends_post(error: BaseException) -> bool:
    """Return True if this error of posting a read says that nothing of it will be written.

    `nixlNotFoundError` comes from the search for the peer, before anything is posted.
    """
    return _name(error) in _ENDS_POST


def ends_connection(error: BaseException) -> bool:
    """Return True if this error says that the connection has failed, so that all of its reads have ended."""
    return _name(error) == REMOTE_DISCONNECT


def deletes_handle(error: BaseException) -> bool:
    """Return True if NIXL has deleted the read's handle, so that it must be neither polled nor released."""
    return _name(error) in _DELETES_HANDLE


def describe(error: BaseException) -> str:
    """Return the error with its type, for logs."""
    return f"{type(error).__name__}: {error}"


class NotificationErrors:
    """The errors of the notification call in a row, and when it may be tried again.

    retry_s: time of the next try, by the caller's clock
    """

    def __init__(self) -> None:
        self.num_in_a_row = 0
        self.retry_s = 0.0

    def add(self, now_s: float) -> bool:
        """Count an error. Returns False if the call may not be tried again."""
        self.num_in_a_row += 1
        self.retry_s = now_s + _RETRY_S * 2 ** (self.num_in_a_row - 1)
        return self.num_in_a_row < MAX_NOTIFICATION_ERRORS

    def clear(self) -> None:
        """Forget the errors, because a call has succeeded."""
        self.num_in_a_row = 0


def _name(error: BaseException) -> str:
    return type(error).__name__
