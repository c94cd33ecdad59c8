"""Protocol of an object that is told about the requests of a gateway, for the live view."""

from typing import Protocol

from baton.core.errors import Failure
from baton.gateway.input.client_call import Identity
from baton.gateway.request.attempt_observer import AttemptObserver, NoAttemptObserver
from baton.gateway.request.open_request import OpenRequest


class RequestObserver(AttemptObserver, Protocol):
    """Is told about requests and their attempts. Its methods return at once and raise nothing."""

    def opened(self, request: OpenRequest, identity: Identity) -> None:
        """A validated request begins to run."""
        ...

    def closed(self, request: OpenRequest, failure: Failure | None) -> None:
        """A request has ended. `failure` is None if all of its samples are complete."""
        ...

    def counted(self, endpoint: str, failure: Failure | None) -> None:
        """The result of a client's call was counted. Calls that were refused early never opened a request."""
        ...


class _NoRequestObserver(NoAttemptObserver):
    def opened(self, request: OpenRequest, identity: Identity) -> None: ...

    def closed(self, request: OpenRequest, failure: Failure | None) -> None: ...

    def counted(self, endpoint: str, failure: Failure | None) -> None: ...


NO_REQUEST_OBSERVER: RequestObserver = _NoRequestObserver()
