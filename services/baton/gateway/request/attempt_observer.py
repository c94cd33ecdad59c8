"""Protocol of an object that is told about the attempts of requests, for the live view."""

from typing import Protocol

from baton.core.cluster.placement import Placement, Rejection
from baton.gateway.cluster.attempt_errors import AttemptFailed
from baton.gateway.request.attempt import Attempt


class AttemptObserver(Protocol):
    """Is told about attempts as they happen. Its methods return at once and raise nothing.

    `request_id` is the id of the client's request, also for samples that continue on their own.
    """

    def started(self, request_id: bytes, attempt: Attempt) -> None:
        """An attempt begins to ask for a placement."""
        ...

    def placed(self, request_id: bytes, attempt: int, placement: Placement) -> None:
        """An attempt was placed."""
        ...

    def rejected(self, request_id: bytes, attempt: int, rejection: Rejection) -> None:
        """A scheduler rejected an attempt. A first attempt then fails; a later one asks again."""
        ...

    def lost(self, request_id: bytes, attempt: int, failed: AttemptFailed, num_output_tokens: int) -> None:
        """An attempt failed after the request had delivered `num_output_tokens`."""
        ...


class NoAttemptObserver:
    """Ignores everything."""

    def started(self, request_id: bytes, attempt: Attempt) -> None: ...

    def placed(self, request_id: bytes, attempt: int, placement: Placement) -> None: ...

    def rejected(self, request_id: bytes, attempt: int, rejection: Rejection) -> None: ...

    def lost(self, request_id: bytes, attempt: int, failed: AttemptFailed, num_output_tokens: int) -> None: ...


NO_ATTEMPT_OBSERVER: AttemptObserver = NoAttemptObserver()
