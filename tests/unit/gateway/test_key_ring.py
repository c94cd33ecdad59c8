"""API keys: identities, the key file, and the limits of each key."""

from typing import Any

import pytest

from baton.core.errors import Code, ConfigError, Reason, Refused
from baton.gateway.auth.api_keys import KeyRing, key_digest, new_key, parse_keys, tenant_salt
from baton.gateway.input.client_call import ANONYMOUS, Identity

SALT = "0123456789abcdef" * 2


def entry(name: str = "alice", key: str = "secret-a", **fields: Any) -> dict[str, Any]:
    return {"name": name, "tenant": "search", "sha256": key_digest(key).hex(), **fields}


def ring(*entries: dict[str, Any], salt: str = SALT) -> KeyRing:
    return KeyRing(parse_keys({"salt": salt, "keys": list(entries)}))


def refusal(*args: Any) -> Refused:
    call, *rest = args
    with pytest.raises(Refused) as refused:
        call(*rest)
    return refused.value


def test_without_keys_every_caller_is_admin() -> None:
    assert KeyRing().identify("") == ANONYMOUS
    KeyRing().check_admin(ANONYMOUS)
    KeyRing().admit(ANONYMOUS, 0.0)
    assert (ANONYMOUS.tenant, ANONYMOUS.cache_salt) == ("default", b"")


def test_key_identifies_its_caller() -> None:
    keys = ring(entry(), entry("bob", "secret-b", tenant="ads", admin=True))
    alice, bob = keys.identify("Bearer secret-a"), keys.identify("bearer  secret-b ")
    assert (alice.name, alice.tenant, alice.is_admin) == ("alice", "search", False)
    assert (bob.name, bob.tenant, bob.is_admin) == ("bob", "ads", True)
    keys.check_admin(bob)
    forbidden = refusal(keys.check_admin, alice).failure
    assert (forbidden.code, forbidden.reason) == (Code.PERMISSION_DENIED, Reason.FORBIDDEN)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "secret-a", "Basic secret-a", "Bearer secret-", "Bearer secret-a secret-a"]
)
def test_unknown_and_malformed_keys_are_rejected(header: str) -> None:
    failure = refusal(ring(entry()).identify, header).failure
    assert (failure.code, failure.reason) == (Code.UNAUTHENTICATED, Reason.INVALID_API_KEY)
    assert "secret" not in failure.message


def test_each_tenant_has_its_own_salt() -> None:
    keys = ring(entry(), entry("bob", "secret-b"), entry("eve", "secret-e", tenant="ads"))
    salts = [keys.identify(f"Bearer secret-{who}").cache_salt for who in "abe"]
    assert salts[0] == salts[1] != salts[2]
    assert len(salts[0]) == 16
    assert tenant_salt(bytes(16), "search") != salts[0], "the file's secret is in it"


def test_open_requests_per_key_are_limited() -> None:
    keys = ring(entry(max_open_requests=3), entry("bob", "secret-b"))
    alice, bob = keys.identify("Bearer secret-a"), keys.identify("Bearer secret-b")
    keys.acquire(alice, 2)
    assert refusal(keys.acquire, alice, 2).failure.reason is Reason.TENANT_QUOTA
    keys.acquire(alice, 1)
    failure = refusal(keys.admit, alice, 0.0).failure
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, Reason.TENANT_QUOTA)
    assert failure.retry_after_s
    keys.acquire(bob, 100)
    keys.admit(bob, 0.0)
    keys.release(alice, 2)
    keys.admit(alice, 0.0)
    keys.release(alice, 1)
    assert not keys._num_open.keys() - {"bob"}, "nothing is kept of who has nothing open"


def test_request_rate_is_limited_with_bursts_of_a_tenth() -> None:
    keys = ring(entry(requests_per_minute=60))
    alice = keys.identify("Bearer secret-a")

    def taken(now_s: float) -> int:
        for count in range(1000):
            try:
                keys.admit(alice, now_s)
            except Refused:
                return count
        raise AssertionError("there is no limit")

    assert taken(0.0) == 6
    assert taken(0.5) == 0
    assert taken(1.0) == 1
    assert taken(3.0) == 2
    assert taken(1000.0) == 6


def test_call_with_many_prompts_delays_later_calls() -> None:
    keys = ring(entry(requests_per_minute=60))
    alice = keys.identify("Bearer secret-a")
    keys.admit(alice, 0.0)
    keys.charge(alice, 29, 0.0)
    over_s = refusal(keys.admit, alice, 0.0).failure.retry_after_s
    assert over_s == pytest.approx(30 + 1 - 6)
    refusal(keys.admit, alice, 24.9)
    keys.admit(alice, 25.0)


def test_retry_after_the_reported_time_is_admitted() -> None:
    keys = ring(entry(requests_per_minute=7))
    alice, now_s = keys.identify("Bearer secret-a"), 0.0
    for _ in range(20):
        keys.admit(alice, now_s)
        now_s += refusal(keys.admit, alice, now_s).failure.retry_after_s or 0.0
    assert now_s == pytest.approx(20 * 60 / 7)


def test_keys_can_change_while_requests_run() -> None:
    keys = ring(entry(max_open_requests=1), entry("bob", "secret-b"))
    alice = keys.identify("Bearer secret-a")
    keys.acquire(alice, 1)
    keys.replace(parse_keys({"salt": SALT, "keys": [entry(key="new", max_open_requests=1)]}))
    for removed in ("secret-a", "secret-b"):
        assert refusal(keys.identify, f"Bearer {removed}").failure.reason is Reason.INVALID_API_KEY
    again = keys.identify("Bearer new")
    assert again.name == alice.name
    assert refusal(keys.admit, again, 0.0).failure.reason is Reason.TENANT_QUOTA, "its request still runs"
    keys.release(alice, 1)
    keys.admit(again, 0.0)


def test_new_keys_are_long_and_random() -> None:
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert min(map(len, keys)) > 40


def one(**changes: Any) -> dict[str, Any]:
    return {"salt": SALT, "keys": [{key: value for key, value in (entry() | changes).items() if value is not ...}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "`salt` and `keys`"),
        ({"salt": SALT, "keys": [], "more": 1}, "`salt` and `keys`"),
        ({"salt": "abc", "keys": [entry()]}, "32 hex digits"),
        ({"salt": 12345678901234567890123456789012, "keys": [entry()]}, "in quotes"),
        ({"salt": SALT, "keys": []}, "omit the key file"),
        ({"salt": SALT, "keys": ["alice"]}, "key 1 must have the fields"),
        ({"salt": SALT, "keys": [entry(), entry(key="x")]}, "two keys have the same `name`"),
        ({"salt": SALT, "keys": [entry(), entry("bob")]}, "two keys have the same `sha256`"),
        (one(name=...), "`name` is None; must be"),
        (one(name="a b"), "`name` is 'a b'; must be"),
        (one(tenant=""), "`tenant` is ''; must be"),
        (one(sha256="secret-a"), "not the key itself"),
        (one(sha256=...), "64 hex digits"),
        (one(admin="yes"), "`admin` is 'yes'; must be true or false"),
        (one(max_open_requests=0), "`max_open_requests` is 0; must be an integer of at least 1"),
        (one(requests_per_minute=True), "`requests_per_minute` is True; must be an integer of at least 1"),
        (one(key="secret"), "unknown field 'key'"),
        (one(min_priority="high"), "`min_priority` is 'high'; must be an integer"),
    ],
)
def test_invalid_key_file_is_rejected_with_the_rule(content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(content)


def test_limits_are_parsed() -> None:
    keys = ring(entry(max_open_requests=2, requests_per_minute=30, admin=True))
    assert keys.identify("Bearer secret-a") == Identity(
        name="alice",
        tenant="search",
        cache_salt=tenant_salt(bytes.fromhex(SALT), "search"),
        is_admin=True,
        max_open_requests=2,
        requests_per_minute=30,
        min_priority=0,
    )
    assert ring(entry(min_priority=-3)).identify("Bearer secret-a").min_priority == -3
