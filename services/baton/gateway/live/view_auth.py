"""Access to the live view: the Host header, login attempts and sessions. Time is passed in."""

import secrets
from collections import OrderedDict
from collections.abc import Collection
from hashlib import sha256
from ipaddress import IPv6Address, ip_address

from baton.runtime.network.addresses import EVERY_ADDRESS

SESSION_S = 12 * 3600.0
MAX_SESSIONS = 64
SESSION_BYTES = 32
ATTEMPT_S = 6.0
"""Average time between two login attempts, of one address."""
MAX_BURST = 5
"""Attempts of one address that may follow at once."""
MAX_ADDRESSES = 1_024
NETWORK_BITS = 64
"""Prefix of an IPv6 address that counts as one address: hosts choose the rest themselves."""


class AllowedHosts:
    """Host names at which the view may be opened.

    A page of another site can make its own name resolve to this server (DNS rebinding). The browser then
    sends that name as Host, which is refused.
    """

    def __init__(self, listen_host: str, more: Collection[str] = ()) -> None:
        """Allow loopback names, the listen address, and `more`. A wildcard allows all IP addresses."""
        self._names = {_normalized(name) for name in (listen_host, *more) if name not in EVERY_ADDRESS}
        self._any_address = listen_host in EVERY_ADDRESS

    def allows(self, header: str) -> bool:
        """Return True if a Host header, with or without a port, is allowed."""
        host = _host_of(header)
        if not host:
            return False
        if host in self._names or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or self._any_address


def _host_of(header: str) -> str:
    """Return the normalized host of a Host header; empty if it is malformed."""
    text = header.strip()
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        is_valid = bool(bracket) and (not port or (port[0] == ":" and port[1:].isdigit()))
        return _normalized(host) if is_valid else ""
    host, colon, port = text.partition(":")
    return "" if colon and not (port.isascii() and port.isdigit()) else _normalized(host)


def _normalized(host: str) -> str:
    return host.lower().rstrip(".")


class ViewSessions:
    """Sessions of the live view, each of one API key. Only hashes of the session ids are kept.

    A session is found by the hash of its id, so the time of the lookup reveals nothing about other ids.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, key_digest: bytes, now_s: float) -> str:
        """Return the id of a new session. If there are too many, the oldest ends."""
        session_id = secrets.token_urlsafe(SESSION_BYTES)
        self._sessions[_digest(session_id)] = now_s + SESSION_S, key_digest
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session_id

    def key_of(self, session_id: str, now_s: float) -> bytes | None:
        """Return the digest of the API key of a session; None if there is no such session any more."""
        digest = _digest(session_id)
        until_s, key_digest = self._sessions.get(digest, (0.0, b""))
        if now_s < until_s:
            return key_digest
        self._sessions.pop(digest, None)
        return None

    def end(self, session_id: str) -> None:
        """End a session, if it exists."""
        self._sessions.pop(_digest(session_id), None)


def _digest(session_id: str) -> bytes:
    return sha256(session_id.encode("utf-8", "surrogateescape")).digest()


class LoginLimit:
    """Limits login attempts per address, IPv6 per /64 network. A leaky bucket (GCRA).

    There is no limit for all addresses together: a few addresses could use it up and lock out every operator.
    It would not bound guessing either, because the API refuses unknown keys without a limit. The length of
    the keys does: they have 32 random bytes.
    """

    def __init__(self) -> None:
        self._full_at_s: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Count an attempt and return 0, or return the seconds until one is allowed, without counting it."""
        name = _network_of(address)
        full_at_s = max(now_s, self._full_at_s.get(name, now_s)) + ATTEMPT_S
        wait_s = full_at_s - now_s - ATTEMPT_S * MAX_BURST
        if wait_s > 1e-6:
            return wait_s
        self._full_at_s[name] = full_at_s
        self._full_at_s.move_to_end(name)
        while len(self._full_at_s) > MAX_ADDRESSES:
            self._full_at_s.popitem(last=False)
        return 0.0


def _network_of(address: str) -> str:
    """Return an IPv6 address's network, an IPv4 address as it is."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Address(int(parsed) >> NETWORK_BITS << NETWORK_BITS))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
