"""Reads the body of a call within the limits for bodies and memory."""

from collections.abc import Sequence

from baton.gateway.gateway_service import GatewayService
from baton.gateway.http.asgi_io import read_body
from baton.gateway.http.http_exchange import HttpExchange
from baton.runtime.process.byte_budget import Account, Reservation


class BodyReader:
    """Reads bodies of calls for one gateway."""

    def __init__(self, service: GatewayService, max_body_bytes: int) -> None:
        """Create the reader. `max_body_bytes` is the largest accepted request body."""
        self._service = service
        self._max_body_bytes = max_body_bytes

    def receiving(self) -> Reservation:
        """Return the reservation for one body. Release it when the body and what was parsed are dropped."""
        return self._service.budget.reserve(Account.RECEIVING, 0, "the body")

    async def body(self, exchange: HttpExchange, reservation: Reservation) -> bytearray:
        """Read the request's body. Raises Refused."""
        return await read_body(exchange.scope, exchange.receive, self._max_body_bytes, reservation)

    def ignored(self, exchange: HttpExchange, names: Sequence[str]) -> None:
        """Name ignored fields in the response, and count them."""
        exchange.ignored_fields = names
        self._service.count_ignored(names)
