"""API keys: who a caller is, and how much it may ask for. A file of them has their hashes, never the keys.

    salt: 6f1c…                      # 32 hex digits or more: tenants' prefixes are kept apart by it
    keys:
      - name: alice-laptop           # for refusals, and the log of what admins do
        tenant: search               # shares its cached prefixes, and takes its turns, with the tenant's other keys
        sha256: 5994471a…            # of the key, 64 hex digits
        admin: false                 # whether it may see /metrics and /debug, and call baton.v1.Admin
        max_open_requests: 16        # requests at a time; without it as many as the gateway takes
        requests_per_minute: 600     # with bursts of a tenth of it
        min_priority: 0              # it may ask for this one and for higher numbers, which go later; without it 0

Sources: RFC 6750 for the header; the rate is a leaky bucket as a meter (GCRA, ITU-T I.371).
"""

import hmac
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

from baton.core.errors import Code, ConfigError, Failure, Reason, Refused
from baton.gateway.input.client_call import ANYBODY, Identity

KEY_PREFIX = "baton-"
KEY_BYTES = 32
MIN_SALT_BYTES = 16
SALT_BYTES = 16
"""Of a tenant's own."""
BURST_PART = 0.1
OPEN_RETRY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_FIELDS = frozenset(("name", "tenant", "sha256", "admin", "max_open_requests", "requests_per_minute", "min_priority"))


Keys: TypeAlias = Mapping[bytes, Identity]
"""Whose key it is, by the key's hash."""


def new_key() -> str:
    """A key to be given to somebody."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Keys are long and random, so a plain hash is as good as a slow one."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def tenant_salt(salt: bytes, tenant: str) -> bytes:
    """Part of the root of the tenant's hash chains: nobody else's prompt finds its blocks, and nobody without
    the secret can name them."""
    return hmac.new(salt, tenant.encode(), sha256).digest()[:SALT_BYTES]


def parse_keys(content: object) -> Keys:
    """Raises ConfigError naming the entry and what would be right."""
    if not isinstance(content, Mapping) or set(content) - {"salt", "keys"}:
        raise ConfigError("a file of keys has `salt` and `keys`, and nothing else")
    salt, entries = content.get("salt"), content.get("keys")
    if not isinstance(salt, str) or not _HEX.fullmatch(salt) or len(salt) < 2 * MIN_SALT_BYTES:
        raise ConfigError(
            f"`salt` must be at least {2 * MIN_SALT_BYTES} hex digits, in quotes, such as `baton key new` writes"
        )
    if not isinstance(entries, list) or not entries:
        raise ConfigError("`keys` must be a list with at least one key; without any, leave the file out")
    found = [_key(entry, f"key {number}", bytes.fromhex(salt)) for number, entry in enumerate(entries, 1)]
    for what, values in (
        ("name", [identity.name for _, identity in found]),
        ("sha256", [digest for digest, _ in found]),
    ):
        if len(set(values)) < len(found):
            raise ConfigError(f"two keys have the same {what}")
    return dict(found)


def _key(entry: object, where: str, salt: bytes) -> tuple[bytes, Identity]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must have the fields {', '.join(sorted(_FIELDS))}")
    if unknown := set(map(str, entry)) - _FIELDS:
        raise ConfigError(f"{where} has the unknown field {min(unknown)!r}; there are {', '.join(sorted(_FIELDS))}")
    texts = {field: _text(entry, field, where) for field in ("name", "tenant")}
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest) or len(digest) != 64:
        raise ConfigError(
            f"{where}: `sha256` must be the 64 hex digits of the key's hash, in quotes, never the key itself"
        )
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}: `admin` must be true or false, not {admin!r}")
    return bytes.fromhex(digest), Identity(
        name=texts["name"],
        tenant=texts["tenant"],
        cache_salt=tenant_salt(salt, texts["tenant"]),
        is_admin=admin,
        max_open_requests=_limit(entry, "max_open_requests", where),
        requests_per_minute=_limit(entry, "requests_per_minute", where),
        min_priority=_priority(entry, where),
    )


def _text(entry: Mapping[Any, Any], field: str, where: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{where}: `{field}` must be 1 to 64 letters, digits, dots, dashes and underscores, not {value!r}"
        )
    return value


def _limit(entry: Mapping[Any, Any], field: str, where: str) -> int | None:
    value = entry.get(field)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{where}: `{field}` must be a whole number from 1 on, not {value!r}")
    return value


def _priority(entry: Mapping[Any, Any], where: str) -> int:
    value = entry.get("min_priority", 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: `min_priority` must be a whole number, not {value!r}")
    return value


class KeyRing:
    """The keys that a gateway takes, and what each has open. Single owner: its event loop. Without a file,
    everybody may do everything."""

    def __init__(self, keys: Keys | None = None) -> None:
        self._num_open: Counter[str] = Counter()
        self._full_at_s: dict[str, float] = {}
        self._keys = keys

    def replace(self, keys: Keys) -> None:
        """From now on these. What is open goes on, and counts where the name is still there."""
        self._keys = keys
        names = {identity.name for identity in keys.values()}
        self._full_at_s = {name: at_s for name, at_s in self._full_at_s.items() if name in names}

    def identify(self, authorization: str) -> Identity:
        """Who sends this header. Raises Refused (401)."""
        if self._keys is None:
            return ANYBODY
        scheme, _, given = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise _unknown("send an API key: the header `Authorization: Bearer KEY`")
        digest = digest_of(given.strip())
        found = self._keys.get(digest)  # of hashes: how long that takes says nothing about a key
        if found is None:
            raise _unknown("this API key is not known here")
        return found

    def check_admin(self, identity: Identity) -> None:
        """Raises Refused (403)."""
        if not identity.is_admin:
            message = f"the key {identity.name!r} may not do this: it takes a key with `admin: true`"
            raise Refused(Failure(code=Code.PERMISSION_DENIED, reason=Reason.FORBIDDEN, message=message))

    def admit(self, identity: Identity, now_s: float) -> None:
        """A request has come: it counts for the rate. Raises Refused (429) where the key has too much open,
        or asks too often."""
        self._check_open(identity, 1)
        if identity.requests_per_minute is not None:
            interval_s = 60.0 / identity.requests_per_minute
            burst_s = interval_s * max(1.0, BURST_PART * identity.requests_per_minute)
            over_s = self._full_at_s.get(identity.name, now_s) + interval_s - now_s - burst_s
            if over_s > interval_s * 1e-6:
                raise _too_many(
                    f"the key {identity.name!r} may send {identity.requests_per_minute} requests a minute", over_s
                )
            self.charge(identity, 1, now_s)

    def charge(self, identity: Identity, num_requests: int, now_s: float) -> None:
        """So many more have come in one call, which is let in whole: the key's next calls wait for them,
        too."""
        if identity.requests_per_minute is not None:
            full_at_s = max(now_s, self._full_at_s.get(identity.name, now_s))
            self._full_at_s[identity.name] = full_at_s + num_requests * 60.0 / identity.requests_per_minute

    def opened(self, identity: Identity, num_requests: int) -> None:
        """So many run for it from now on; `closed` with as many when they have ended. Raises Refused (429)
        where they are too many."""
        self._check_open(identity, num_requests)
        self._num_open[identity.name] += num_requests

    def closed(self, identity: Identity, num_requests: int) -> None:
        self._num_open[identity.name] -= num_requests
        if not self._num_open[identity.name]:
            del self._num_open[identity.name]

    def _check_open(self, identity: Identity, num_more: int) -> None:
        most = identity.max_open_requests
        if most is not None and self._num_open[identity.name] + num_more > most:
            raise _too_many(f"the key {identity.name!r} may have {most} requests open at a time", OPEN_RETRY_S)


def new_file() -> dict[str, Sequence[Any] | str]:
    """A file without keys yet, as it is written."""
    return {"salt": secrets.token_hex(MIN_SALT_BYTES), "keys": []}


def _unknown(message: str) -> Refused:
    return Refused(Failure(code=Code.UNAUTHENTICATED, reason=Reason.INVALID_API_KEY, message=message))


def _too_many(message: str, retry_after_s: float) -> Refused:
    failure = Failure(
        code=Code.RESOURCE_EXHAUSTED,
        reason=Reason.TENANT_QUOTA,
        message=f"{message}; retry later",
        retry_after_s=retry_after_s,
    )
    return Refused(failure)
