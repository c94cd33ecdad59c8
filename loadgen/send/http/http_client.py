"""Client for OpenAI's completions and chat API over HTTP, with streamed responses."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from loadgen.loadgen_errors import LoadgenError, Unreachable
from loadgen.send.client import Exchange, ResolvedRequest
from loadgen.send.dialects import BodyMaker, Dialect
from loadgen.send.http.http_connection import DEFAULT_LIMITS, ConnectionLimits, HttpConnection
from loadgen.send.timers import DueCheck, now_s

IDLE_S = 2.0
"""Idle connections older than this are not reused. The shortest keep-alive of common servers is 5 s
(uvicorn)."""
FRESH_S = 15.0
"""Unused connections are closed after this time, before servers time out while waiting for the first request.
"""
CONNECT_S = 30.0
_RETRY_S = 0.25
"""After a failed attempt, no spare connections are opened for this long."""
_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""Connect errors caused by exhausted resources of this machine."""


class BadUrl(LoadgenError):
    """A server address is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of an `HttpClient`.

    - `urls`: base addresses, with or without `/v1`
    - `more`: the user's additional body fields
    - `timeout_s`: sent to servers that accept a deadline
    """

    urls: Sequence[str]
    model: str
    dialect: Dialect
    is_chat: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    is_insecure: bool = False
    max_connections: int = 1 << 30
    limits: ConnectionLimits = DEFAULT_LIMITS


class HttpClient:
    """Implements `Client` over HTTP."""

    def __init__(self, settings: HttpSettings, clock: Callable[[], float] = now_s) -> None:
        """Raises BadUrl."""
        headers = dict(settings.headers)
        if settings.dialect.timeout_header:
            headers.setdefault(settings.dialect.timeout_header, str(max(1, round(settings.timeout_s * 1e3))))
        self._bodies = BodyMaker(
            model=settings.model, dialect=settings.dialect, is_chat=settings.is_chat, more=settings.more
        )
        path = "/v1/chat/completions" if settings.is_chat else "/v1/completions"
        budget = _Budget(settings.max_connections)
        self.due_check = DueCheck()
        context = tls_context(settings.is_insecure)
        self._pools = [
            Pool(split_url(url), path, headers, context, clock, self.due_check, budget, settings.limits)
            for url in settings.urls
        ]

    async def open(self) -> None:
        for pool in self._pools:
            await pool.open()

    def prepare(self, request: ResolvedRequest) -> tuple[Pool, bytes]:
        pool = self._pools[request.index % len(self._pools)]
        return pool, pool.request(self._bodies.body(request))

    def send(self, prepared: tuple[Pool, bytes], exchange: Exchange) -> None:
        pool, data = prepared
        pool.send(data, exchange)

    def preconnect(self, num_requests: int, at_most: int) -> bool:
        has_more = False
        for pool in self._pools:
            has_more |= pool.preconnect(-(-num_requests // len(self._pools)), -(-at_most // len(self._pools)))
        return has_more

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


class _Budget:
    """The limit of open connections over all endpoints."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Pool:
    """The connections to one endpoint, each used for one request at a time.

    Connections are opened ahead of time, so that sending a request does not wait for a handshake.
    """

    def __init__(
        self,
        url: SplitResult,
        path: str,
        headers: Mapping[str, str],
        context: ssl.SSLContext,
        clock: Callable[[], float],
        due_check: DueCheck,
        budget: _Budget,
        limits: ConnectionLimits,
    ) -> None:
        self.url = f"{url.scheme}://{url.netloc}{url.path}"
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = context if url.scheme == "https" else None
        fields = {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "loadgen",
            **headers,
        }
        head = f"POST {url.path}{path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._head = head.encode("latin-1", "replace") + b"Content-Length: "
        self._clock = clock
        self._due_check = due_check
        self._budget = budget
        self._limits = limits
        self._address: tuple[str, int] | None = None
        self._idle: list[HttpConnection] = []  # most recently used last
        self._open: set[HttpConnection] = set()
        self._waiting: deque[tuple[bytes, Exchange]] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._may_connect_s = 0.0
        self._sweep_s = 0.0

    def request(self, body: bytes) -> bytes:
        """Return the bytes of a request with this body."""
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    async def open(self) -> None:
        """Find an address of the host that accepts connections. Raises Unreachable."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unreachable(f"{self.url}: the host name cannot be resolved ({error.strerror})") from error
        problem = ""
        for address in dict.fromkeys(entry[4][:2] for entry in found):
            self._budget.used += 1
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._connect(address)
            except OSError as error:  # TimeoutError is one
                self._budget.used -= 1
                problem = problem or _reason(error)
            else:
                self._address = (str(address[0]), int(address[1]))
                return
        raise Unreachable(
            f"no server answers at {self.url}: {problem}; start the server or correct its address (--url)"
        )

    def send(self, data: bytes, exchange: Exchange) -> None:
        """Send a request on an idle connection, or on the next one that becomes available."""
        exchange.endpoint = self.url
        connection = self._take_idle()
        if connection is not None:
            connection.start(data, exchange)
            return
        self._waiting.append((data, exchange))
        if len(self._connecting) < len(self._waiting) and not self._start_connecting():
            self._waiting.pop()
            exchange.not_sent = True
            limit = self._budget.limit
            exchange.fail(
                self._clock(), f"not sent: all {limit} connections that this process may open are in use (ulimit -n)"
            )

    def preconnect(self, num_requests: int, at_most: int) -> bool:
        """Open connections until `num_requests` are ready, at most `at_most` in this call.

        Connections that are too old are closed. Returns True if some are still missing.
        """
        now_s = self._clock()
        while self._idle and self._is_old(self._idle[0], now_s):
            self._idle.pop(0).close()
        if now_s > self._sweep_s:
            self._sweep_s = now_s + 1.0
            for connection in [c for c in self._open if c.is_lingering(now_s)]:
                connection.close()
        missing = num_requests + len(self._waiting) - len(self._idle) - len(self._connecting)
        if now_s < self._may_connect_s:
            return False
        for _ in range(min(missing, at_most)):
            if not self._start_connecting():
                return False
        return missing > at_most

    async def aclose(self) -> None:
        for task in self._connecting:
            task.cancel()
        for connection in tuple(self._open):
            connection.close()
        if self._connecting:
            await asyncio.wait(self._connecting)
        for _ in range(100):  # let the loop deliver connection_lost to every connection
            if not self._open:
                break
            await asyncio.sleep(0)

    # Implementation of http_connection.Owner.

    def connected(self, connection: HttpConnection) -> None:
        self._open.add(connection)
        self.idle(connection)

    def idle(self, connection: HttpConnection) -> None:
        while self._waiting:
            data, exchange = self._waiting.popleft()
            if not exchange.is_over:
                connection.start(data, exchange)
                return
        self._idle.append(connection)

    def lost(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        self._budget.used -= 1
        if connection in self._idle:
            self._idle.remove(connection)

    def resend(self, data: bytes, exchange: Exchange) -> None:
        exchange.sent_s = None
        self.send(data, exchange)

    # Internals.

    def _take_idle(self) -> HttpConnection | None:
        now_s = self._clock()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and not self._is_old(connection, now_s):
                return connection
            connection.close()
        return None

    def _is_old(self, connection: HttpConnection, now_s: float) -> bool:
        return now_s - connection.since_s > (IDLE_S if connection.num_served else FRESH_S)

    def _start_connecting(self) -> bool:
        if self._budget.used >= self._budget.limit:
            return False
        self._budget.used += 1
        task = asyncio.get_running_loop().create_task(self._connect_one())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect_one(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connect(self._address or (self._host, self._port))
        except OSError as error:  # TimeoutError is one
            self._budget.used -= 1
            self._failed(error)
        except asyncio.CancelledError:
            self._budget.used -= 1
            raise

    async def _connect(self, address: tuple[Any, ...]) -> None:
        """Open one connection. Raises OSError, which ssl's errors are."""
        await asyncio.get_running_loop().create_connection(
            lambda: HttpConnection(self, self._clock, self._due_check, is_plain=self._tls is None, limits=self._limits),
            str(address[0]),
            int(address[1]),
            ssl=self._tls,
            server_hostname=self._host if self._tls is not None else None,
        )

    def _failed(self, error: OSError) -> None:
        now_s = self._clock()
        self._may_connect_s = now_s + _RETRY_S
        while self._waiting:
            _, exchange = self._waiting.popleft()
            if not exchange.is_over:
                exchange.not_sent = error.errno in _LOCAL_ERRORS
                exchange.fail(now_s, f"{'not sent: ' if exchange.not_sent else 'no connection: '}{_reason(error)}")
                return


def split_url(url: str) -> SplitResult:
    """Parse an endpoint's base address and remove `/v1`. Raises BadUrl."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
        (parts.hostname or "").encode("idna")
        parts.path.encode("ascii")
    except ValueError as error:  # a UnicodeError is one
        raise BadUrl(f"{url!r} is not a valid address: {error}") from error
    if parts.username is not None:
        raise BadUrl(
            "the address contains a password, which would be stored in the result; use --header 'Authorization: "
            "Basic …'"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadUrl(f"{url!r} is not an HTTP address; write http://host:port")
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"), query="", fragment="")


def tls_context(is_insecure: bool) -> ssl.SSLContext:
    """Return a TLS context; without certificate checks if `is_insecure`."""
    context = ssl.create_default_context()
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the connection attempt timed out"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
