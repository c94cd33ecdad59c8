"""API keys: identity and limits of callers. The key file contains hashes of the keys, never the keys
themselves.

    salt: 6f1c…                      # at least 32 hex digits; separates the cached prefixes of tenants
    keys:
      - name: alice-laptop           # used in error messages and in the log of admin calls
        tenant: search               # cached prefixes and fair queueing are shared within a tenant
        sha256: 5994471a…            # hash of the key, 64 hex digits
        admin: false                 # may read /metrics and /debug, and call baton.v1.Admin
        max_open_requests: 16        # requests open at a time; default: the gateway's limit
        requests_per_minute: 600     # bursts of up to a tenth of it are allowed
        min_priority: 0              # lowest priority number that the key may use; default 0

Sources: RFC 6750 for the header; the rate limit is a leaky bucket as a meter (GCRA, ITU-T I.371).
"""

import hmac
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

from baton.core.errors import Code, ConfigError, Failure, Reason, Refused
from baton.core.kv.block_hash import TENANT_SALT_BYTES
from baton.gateway.input.client_call import ANONYMOUS, Identity

KEY_PREFIX = "baton-"
KEY_BYTES = 32
MIN_SALT_BYTES = 16
BURST_FRACTION = 0.1
RETRY_AFTER_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_FIELDS = frozenset(("name", "tenant", "sha256", "admin", "max_open_requests", "requests_per_minute", "min_priority"))


Keys: TypeAlias = Mapping[bytes, Identity]
"""Identity of each key, by the key's SHA-256 digest."""


def new_key() -> str:
    """Return a new random API key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a key. Keys are long and random, so a slow password hash is not needed."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def tenant_salt(salt: bytes, tenant: str) -> bytes:
    """Return a tenant's cache salt, which is part of all its block hashes.

    Prompts of other tenants therefore never match its cached blocks, and its block hashes cannot be computed
    without the secret `salt`.
    """
    return hmac.new(salt, tenant.encode(), sha256).digest()[:TENANT_SALT_BYTES]


def parse_keys(content: object) -> Keys:
    """Parse the content of a key file. Raises ConfigError that names the entry and the rule."""
    if not isinstance(content, Mapping) or set(content) - {"salt", "keys"}:
        raise ConfigError("a key file must have the fields `salt` and `keys`, and no others")
    salt, entries = content.get("salt"), content.get("keys")
    if not isinstance(salt, str) or not _HEX.fullmatch(salt) or len(salt) < 2 * MIN_SALT_BYTES:
        raise ConfigError(
            f"`salt` must be at least {2 * MIN_SALT_BYTES} hex digits, in quotes; `baton key new` writes a valid one"
        )
    if not isinstance(entries, list) or not entries:
        raise ConfigError("`keys` must be a list with at least one key; omit the key file to run without keys")
    found = [_key(entry, f"key {number}", bytes.fromhex(salt)) for number, entry in enumerate(entries, 1)]
    for what, values in (
        ("name", [identity.name for _, identity in found]),
        ("sha256", [digest for digest, _ in found]),
    ):
        if len(set(values)) < len(found):
            raise ConfigError(f"two keys have the same `{what}`; it must be unique")
    return dict(found)


def _key(entry: object, where: str, salt: bytes) -> tuple[bytes, Identity]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must have the fields {', '.join(sorted(_FIELDS))}")
    if unknown := set(map(str, entry)) - _FIELDS:
        raise ConfigError(f"{where} has the unknown field {min(unknown)!r}; known are {', '.join(sorted(_FIELDS))}")
    texts = {field: _text(entry, field, where) for field in ("name", "tenant")}
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest) or len(digest) != 64:
        raise ConfigError(
            f"{where}: `sha256` must be the 64 hex digits of the key's hash, in quotes, not the key itself"
        )
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}: `admin` is {admin!r}; must be true or false")
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
            f"{where}: `{field}` is {value!r}; must be 1 to 64 letters, digits, dots, dashes and underscores"
        )
    return value


def _limit(entry: Mapping[Any, Any], field: str, where: str) -> int | None:
    value = entry.get(field)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{where}: `{field}` is {value!r}; must be an integer of at least 1")
    return value


def _priority(entry: Mapping[Any, Any], where: str) -> int:
    value = entry.get("min_priority", 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: `min_priority` is {value!r}; must be an integer")
    return value


class KeyRing:
    """The valid API keys, and the open requests and request rate of each.

    Used from the gateway's event loop only. Without keys, every caller may do everything.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._num_open: Counter[str] = Counter()
        self._full_at_s: dict[str, float] = {}
        self._keys = keys

    @property
    def has_keys(self) -> bool:
        """True if calls need a key."""
        return self._keys is not None

    def replace(self, keys: Keys) -> None:
        """Replace the valid keys. Open requests continue, and still count for keys with an unchanged name."""
        self._keys = keys
        names = {identity.name for identity in keys.values()}
        self._full_at_s = {name: at_s for name, at_s in self._full_at_s.items() if name in names}

    def identify(self, authorization: str) -> Identity:
        """Return the identity for an `Authorization` header. Raises Refused (401) if the key is missing or
        unknown."""
        if self._keys is None:
            return ANONYMOUS
        scheme, _, given = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise _unknown("no API key was sent; send the header `Authorization: Bearer KEY`")
        digest = key_digest(given.strip())
        found = self._keys.get(digest)  # digests are compared, so the time of the lookup reveals nothing about keys
        if found is None:
            raise _unknown("the API key is unknown; ask the operator for a valid one")
        return found

    def find(self, digest: bytes) -> Identity | None:
        """Return the identity of the key with this digest; None if no valid key has it."""
        return None if self._keys is None else self._keys.get(digest)

    def salt_of(self, tenant: str) -> bytes | None:
        """Return the cache salt of a tenant; None if no key belongs to it."""
        known = (ANONYMOUS,) if self._keys is None else self._keys.values()
        return next((identity.cache_salt for identity in known if identity.tenant == tenant), None)

    def check_admin(self, identity: Identity) -> None:
        """Raise Refused (403) unless the key is an admin's."""
        if not identity.is_admin:
            message = f"the key {identity.name!r} may not do this; use a key with `admin: true`"
            raise Refused(Failure(code=Code.PERMISSION_DENIED, reason=Reason.FORBIDDEN, message=message))

    def admit(self, identity: Identity, now_s: float) -> None:
        """Count one call for the key's rate.

        Raises Refused (429) if the key has too many open requests or exceeds its rate. `now_s` is event loop
        time.
        """
        self._check_open(identity, 1)
        if identity.requests_per_minute is not None:
            interval_s = 60.0 / identity.requests_per_minute
            burst_s = interval_s * max(1.0, BURST_FRACTION * identity.requests_per_minute)
            over_s = self._full_at_s.get(identity.name, now_s) + interval_s - now_s - burst_s
            if over_s > interval_s * 1e-6:
                raise _too_many(
                    f"the key {identity.name!r} exceeds its limit of {identity.requests_per_minute} requests a minute",
                    over_s,
                )
            self.charge(identity, 1, now_s)

    def charge(self, identity: Identity, num_requests: int, now_s: float) -> None:
        """Count further requests of an admitted call for the key's rate. The key's next calls wait for them
        too."""
        if identity.requests_per_minute is not None:
            full_at_s = max(now_s, self._full_at_s.get(identity.name, now_s))
            self._full_at_s[identity.name] = full_at_s + num_requests * 60.0 / identity.requests_per_minute

    def acquire(self, identity: Identity, num_requests: int) -> None:
        """Count requests as open for the key, until `release`. Raises Refused (429) if they exceed its
        limit."""
        self._check_open(identity, num_requests)
        self._num_open[identity.name] += num_requests

    def release(self, identity: Identity, num_requests: int) -> None:
        """End the count of requests that `acquire` began."""
        self._num_open[identity.name] -= num_requests
        if not self._num_open[identity.name]:
            del self._num_open[identity.name]

    def _check_open(self, identity: Identity, num_more: int) -> None:
        num_open, most = self._num_open[identity.name], identity.max_open_requests
        if most is not None and num_open + num_more > most:
            raise _too_many(
                f"the key {identity.name!r} has {num_open} open requests; at most {most} are allowed", RETRY_AFTER_S
            )


def new_key_file() -> dict[str, Sequence[Any] | str]:
    """Return the content of a new key file, without any key."""
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
