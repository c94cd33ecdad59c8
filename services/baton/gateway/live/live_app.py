"""The HTTP application (ASGI) of a gateway's admin port: the live view, and metrics, traces and probes.

`/metrics`, `/health` and `/ready` are open, as on the admin ports of other services. Everything else needs an
allowed Host header and, if the gateway has API keys, a session or an admin key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request_limits import printable
from baton.gateway.auth.api_keys import KeyRing, key_digest
from baton.gateway.http.asgi_io import (
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    WhileConnected,
    caller_of,
    respond,
    respond_json,
)
from baton.gateway.http.openai_errors import Headers, error_body, error_headers
from baton.gateway.live.cluster_metrics import ClusterMetrics
from baton.gateway.live.live_feed import TooManyViewers
from baton.gateway.live.live_source import LiveSource
from baton.gateway.live.static_files import CONTENT_SECURITY_POLICY, StaticFile, static_files
from baton.gateway.live.view_auth import SESSION_S, AllowedHosts, LoginLimit, ViewSessions
from baton.runtime.config.durations import parse_durations
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import CONTENT_TYPE

log = get_logger(__name__)

MAX_FORM_BYTES = 4_096
MAX_FIELDS = 8
DEFAULT_TRACE = "60s"
REQUESTS = "/live/requests/"
STATIC = "/static/"
OPEN_PATHS = ("/metrics", "/health", "/ready")
_HTML = b"text/html; charset=utf-8"
_MESSAGE = b"<!-- message -->"
SECURITY_HEADERS: Headers = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer, browsers send forms with `Origin: null`
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NO_STORE = (b"cache-control", b"no-store")

Handler = Callable[["_Exchange"], Awaitable[None]]


@dataclass(slots=True)
class _Exchange:
    """One HTTP request and the channel for its response."""

    scope: Scope
    receive: Receive
    send: Send

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    def header(self, name: bytes) -> str:
        """Return a header's value; empty if it was not sent."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), "")

    async def redirect(self, to: bytes, *headers: tuple[bytes, bytes]) -> None:
        await respond(self.send, 303, b"", headers=[*SECURITY_HEADERS, NO_STORE, (b"location", to), *headers])


class LiveApp:
    """Serves every request of the admin port."""

    def __init__(
        self,
        view: LiveSource,
        metrics: ClusterMetrics,
        probes: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        keys: KeyRing,
        hosts: AllowedHosts,
        port: int,
        is_tls: bool,
    ) -> None:
        """Create the application.

        probes: serves `OPEN_PATHS`.
        port: part of the cookie's name, because the ports of a machine share their cookies.
        """
        self._view = view
        self._metrics = metrics
        self._probes = probes
        self._keys = keys
        self._hosts = hosts
        self._cookie = f"baton_view_{port}"
        self._is_tls = is_tls
        self._sessions = ViewSessions()
        self._logins = LoginLimit()
        self._files: Mapping[str, StaticFile] = static_files()
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/": ("GET", self._page),
            "/live/events": ("GET", self._events),
            REQUESTS: ("GET", self._request),
            "/metrics/cluster": ("GET", self._cluster_metrics),
            "/debug/trace": ("GET", self._trace),
            "/logout": ("POST", self._logout),
        }

    def count_rejected(self, failure: Failure) -> None:
        """Do nothing: the admin port does not count rejected requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            return await self._probes(scope, receive, send)
        exchange = _Exchange(scope, receive, send)
        try:
            await self._serve(exchange)
        except ClientDisconnected:
            pass
        except Refused as refused:
            failure = refused.failure
            headers = [*SECURITY_HEADERS, NO_STORE, *error_headers(failure)]
            await respond(send, failure.code.http, error_body(failure), headers=headers)

    async def _serve(self, exchange: _Exchange) -> None:
        path, method = exchange.path, exchange.scope["method"]
        if not self._is_admin_call(exchange):  # CSRF and DNS rebinding cannot set this header
            self._check_host(exchange)
        if path.startswith(STATIC):
            return await self._static(exchange)
        if path == "/login":
            return await self._login(exchange) if method == "POST" else await self._login_page(exchange)
        name = REQUESTS if path.startswith(REQUESTS) else path
        if name not in self._routes:
            raise _refused(Code.NOT_FOUND, f"the path {printable(path)} does not exist")
        wanted, handler = self._routes[name]
        if method != wanted and not (method == "HEAD" and wanted == "GET" and handler != self._events):
            raise _refused(
                Code.INVALID_ARGUMENT, f"the method is {printable(method)}; this path only supports {wanted}"
            )
        if self._keys.has_keys and not self._has_session(exchange):
            if path == "/":
                return await exchange.redirect(b"/login")
            self._keys.check_admin(self._keys.identify(exchange.header(b"authorization")))
        await handler(exchange)

    async def _page(self, exchange: _Exchange) -> None:
        """Show the live view."""
        await self._send_file(exchange, self._files["index.html"])

    async def _events(self, exchange: _Exchange) -> None:
        """Stream one snapshot a second as server-sent events, after the history of ten minutes."""
        feed = self._view.feed.watch()
        try:
            first = await anext(feed)
        except TooManyViewers:
            raise _refused(Code.RESOURCE_EXHAUSTED, "too many viewers; close another view") from None
        try:
            headers = [*SECURITY_HEADERS, NO_STORE, (b"content-type", b"text/event-stream; charset=utf-8")]
            await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
            await exchange.send({"type": "http.response.body", "body": first, "more_body": True})
            async with WhileConnected(exchange.receive):
                async for piece in feed:
                    if not self._may_view(exchange):
                        break
                    await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
            await exchange.send({"type": "http.response.body", "body": b""})
        finally:
            await feed.aclose()

    async def _request(self, exchange: _Exchange) -> None:
        """Return one request's waterfall, and why it was placed or refused as it was."""
        details = await self._view.request(exchange.path[len(REQUESTS) :])
        if details is None:
            raise _refused(Code.NOT_FOUND, "this request is not remembered; the last 512 are")
        await respond_json(exchange.send, 200, details, headers=[*SECURITY_HEADERS, NO_STORE])

    async def _cluster_metrics(self, exchange: _Exchange) -> None:
        """Return the metrics of all processes of the cluster, in Prometheus text format."""
        page = await self._metrics.page()
        headers = [*SECURITY_HEADERS, NO_STORE]
        await respond(exchange.send, 200, page, content_type=CONTENT_TYPE.encode(), headers=headers)

    async def _trace(self, exchange: _Exchange) -> None:
        """Return the requests of the last minute, or of `last`, as Chrome trace events for Perfetto."""
        text = _fields(exchange.scope["query_string"]).get("last", DEFAULT_TRACE)
        try:
            last_s = parse_durations(f"last={text}", ("last",))["last"]
        except (ValueError, KeyError):
            message = f"last is {printable(text)}; must be a duration such as 60s or 500ms"
            raise _refused(Code.INVALID_ARGUMENT, message) from None
        body = await self._view.chrome_trace(last_s)
        headers = [*SECURITY_HEADERS, NO_STORE, (b"content-disposition", b'attachment; filename="baton-trace.json"')]
        await respond(exchange.send, 200, body, headers=headers)

    async def _static(self, exchange: _Exchange) -> None:
        file = self._files.get(exchange.path[len(STATIC) :])
        if file is None:
            raise _refused(Code.NOT_FOUND, f"the path {printable(exchange.path)} does not exist")
        await self._send_file(exchange, file)

    async def _send_file(self, exchange: _Exchange, file: StaticFile) -> None:
        headers = [*SECURITY_HEADERS, (b"cache-control", b"no-cache"), (b"etag", file.etag)]
        if exchange.header(b"if-none-match").encode() == file.etag:
            await respond(exchange.send, 304, b"", content_type=file.content_type, headers=headers)
        else:
            await respond(exchange.send, 200, file.body, content_type=file.content_type, headers=headers)

    async def _login_page(self, exchange: _Exchange, status: int = 200, message: str = "") -> None:
        if not self._keys.has_keys:
            return await exchange.redirect(b"/")
        text = f'<p class="problem" role="alert">{message}</p>'.encode() if message else b""
        body = self._files["login.html"].body.replace(_MESSAGE, text)
        await respond(exchange.send, status, body, content_type=_HTML, headers=[*SECURITY_HEADERS, NO_STORE])

    async def _login(self, exchange: _Exchange) -> None:
        """Exchange an admin key for a session."""
        self._check_origin(exchange)
        now_s = asyncio.get_running_loop().time()
        client = exchange.scope.get("client") or ("",)
        wait_s = self._logins.wait_s(str(client[0]), now_s)
        if wait_s:
            message = f"Too many attempts. Try again in {wait_s:.0f} s."
            return await self._login_page(exchange, 429, message)
        key = _fields(await _read_form(exchange)).get("key", "").strip()
        try:
            identity = self._keys.identify(f"Bearer {key}")
            self._keys.check_admin(identity)
        except Refused as refused:
            log.warning("view_login_refused", client=str(client[0]), reason=refused.failure.reason)
            is_known = refused.failure.reason is Reason.FORBIDDEN
            message = "This key is not an admin's." if is_known else "This key is unknown."
            return await self._login_page(exchange, refused.failure.code.http, message)
        log.info("view_login_accepted", client=str(client[0]), key=identity.name)
        session = self._sessions.create(key_digest(key), now_s)
        await exchange.redirect(b"/", self._set_cookie(session, round(SESSION_S)))

    async def _logout(self, exchange: _Exchange) -> None:
        """End the session."""
        self._check_origin(exchange)
        self._sessions.end(self._session_id(exchange))
        await exchange.redirect(b"/login", self._set_cookie("", 0))

    def _set_cookie(self, value: str, max_age_s: int) -> tuple[bytes, bytes]:
        secure = "; Secure" if self._is_tls else ""
        text = f"{self._cookie}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"
        return b"set-cookie", text.encode()

    def _session_id(self, exchange: _Exchange) -> str:
        # Not SimpleCookie: it stops at the first cookie that it cannot parse, and other applications of this host
        # may set any.
        pairs = (cookie.strip().partition("=") for cookie in exchange.header(b"cookie").split(";"))
        return next((value for name, _, value in pairs if name == self._cookie), "")

    def _may_view(self, exchange: _Exchange) -> bool:
        """Return True if the request is still allowed. Its session or key may have ended since it began."""
        return not self._keys.has_keys or self._has_session(exchange) or self._is_admin_call(exchange)

    def _has_session(self, exchange: _Exchange) -> bool:
        """Return True if the request has a session whose key is still an admin's."""
        digest = self._sessions.key_of(self._session_id(exchange), asyncio.get_running_loop().time())
        identity = None if digest is None else self._keys.find(digest)
        return identity is not None and identity.is_admin

    def _is_admin_call(self, exchange: _Exchange) -> bool:
        """Return True if the request carries an admin key itself."""
        if not self._keys.has_keys or not exchange.header(b"authorization"):
            return False
        try:
            return self._keys.identify(caller_of(exchange.scope).authorization).is_admin
        except Refused:
            return False

    def _check_host(self, exchange: _Exchange) -> None:
        host = exchange.header(b"host")
        if not self._hosts.allows(host):
            message = f"the host {printable(host)} is not allowed here; add its name to --view-hosts"
            raise _refused(Code.PERMISSION_DENIED, message, Reason.FORBIDDEN)

    def _check_origin(self, exchange: _Exchange) -> None:
        """Raise Refused if a form of another site was sent."""
        origin = exchange.header(b"origin")
        if origin and origin.partition("://")[2] != exchange.header(b"host"):
            raise _refused(Code.PERMISSION_DENIED, "the form is of another site", Reason.FORBIDDEN)


async def _read_form(exchange: _Exchange) -> bytes:
    body = bytearray()
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client disconnected before its form had arrived")
        body += message.get("body", b"")
        if len(body) > MAX_FORM_BYTES:
            raise _refused(
                Code.BODY_TOO_LARGE, f"the form is larger than {MAX_FORM_BYTES} bytes", Reason.BODY_TOO_LARGE
            )
        if not message.get("more_body"):
            return bytes(body)


def _fields(text: bytes) -> dict[str, str]:
    """Return the fields of a form or query, the last of each name. Raises Refused if there are too many."""
    try:
        found = parse_qs(text.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise _refused(Code.INVALID_ARGUMENT, f"there are more than {MAX_FIELDS} fields") from None
    return {name: values[-1] for name, values in found.items()}


def _refused(code: Code, message: str, reason: Reason = Reason.INVALID_REQUEST) -> Refused:
    return Refused(Failure(code=code, reason=reason, message=message))
