"""The admin port: access to the live view, its headers, and the pages beside it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.request import LegTimeline
from baton.gateway.auth.api_keys import KeyRing, key_digest
from baton.gateway.input.client_call import Identity
from baton.gateway.live import live_source
from baton.gateway.live.traces.chrome_trace import recent_traces, trace_pieces
from baton.gateway.live.traces.request_trace import AttemptTrace, RequestTrace
from baton.gateway.live.view_auth import (
    ATTEMPT_S,
    MAX_BURST,
    MAX_SESSIONS,
    SESSION_S,
    AllowedHosts,
    LoginLimit,
    ViewSessions,
)
from tests.unit.gateway.fakes import until
from tests.unit.gateway.live_rig import HOST, LiveRig, live_rig

ADMIN = Identity(name="operator", tenant="ops", is_admin=True)
USER = Identity(name="alice", tenant="search")


def key_ring() -> KeyRing:
    return KeyRing({key_digest("admin-key"): ADMIN, key_digest("user-key"): USER})


async def login(rig: LiveRig, key: str) -> tuple[int, str]:
    """Return the status and the cookie."""
    answer = await rig.get("/login", "POST", f"key={key}".encode())
    return answer.status, answer.headers.get("set-cookie", "")


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("127.0.0.1:8002", True),
        ("localhost", True),
        ("baton.localhost:8002", True),
        ("LOCALHOST.:8002", True),
        ("[::1]:8002", True),
        ("gw.example", True),
        ("view.example:1", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8002", False),
        ("10.1.2.3:8002", False),
        ("127.0.0.1:8002@evil.example", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_allowed_hosts(host: str, is_allowed: bool) -> None:
    assert AllowedHosts("gw.example", ("view.example",)).allows(host) == is_allowed


def test_wildcard_address_allows_addresses_but_no_names() -> None:
    hosts = AllowedHosts("0.0.0.0")
    assert [hosts.allows(host) for host in ("10.1.2.3:8002", "[fd00::1]", "evil.example")] == [True, True, False]


def test_sessions_expire_end_and_are_bounded() -> None:
    sessions = ViewSessions()
    first = sessions.create(b"digest", 0.0)
    assert sessions.key_of(first, SESSION_S - 1) == b"digest"
    assert sessions.key_of(first, SESSION_S) is None
    kept = [sessions.create(b"digest", 1.0) for _ in range(MAX_SESSIONS + 1)]
    assert len(sessions) == MAX_SESSIONS
    assert [sessions.key_of(each, 2.0) for each in (kept[0], kept[1], "unknown")] == [None, b"digest", None]
    sessions.end(kept[1])
    assert sessions.key_of(kept[1], 2.0) is None
    assert len(set(kept)) == len(kept)


def test_login_attempts_are_limited_per_address() -> None:
    limit = LoginLimit()
    assert [limit.wait_s("192.0.2.1", 0.0) for _ in range(MAX_BURST)] == [0.0] * MAX_BURST
    assert limit.wait_s("192.0.2.1", 0.0) == pytest.approx(ATTEMPT_S)
    assert limit.wait_s("::ffff:192.0.2.1", 0.0) > 0
    assert limit.wait_s("192.0.2.1", ATTEMPT_S) == 0.0


def test_attempts_of_an_ipv6_network_count_together() -> None:
    limit = LoginLimit()
    assert [limit.wait_s(f"2001:db8::{number}", 0.0) for number in range(MAX_BURST)] == [0.0] * MAX_BURST
    assert limit.wait_s("2001:db8::ffff:0:0:1", 0.0) > 0
    assert limit.wait_s("2001:db8:0:1::1", 0.0) == 0.0


def test_attempts_of_many_addresses_do_not_limit_others() -> None:
    limit = LoginLimit()
    for number in range(100):
        for _ in range(MAX_BURST + 1):
            limit.wait_s(f"192.0.2.{number}", 0.0)
    assert limit.wait_s("198.51.100.1", 0.0) == 0.0


async def test_login_gives_a_session_that_only_this_browser_sends() -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        assert (await rig.get("/")).headers["location"] == "/login"
        for path in ("/live/events", "/live/requests/00", "/debug/trace", "/metrics/cluster"):
            assert (await rig.get(path)).status == 401, path
        assert b"password" in (await rig.get("/login")).body
        assert await login(rig, "wrong") == (401, "")
        assert await login(rig, "user-key") == (403, "")
        status, cookie = await login(rig, "admin-key")
        value, *attributes = cookie.split("; ")
        assert (status, attributes) == (303, ["Path=/", f"Max-Age={SESSION_S:.0f}", "HttpOnly", "SameSite=Strict"])
        assert "admin-key" not in cookie
        page = await rig.get("/", cookie=value)
        assert (page.status, b"topology" in page.body) == (200, True)
        assert (await rig.get("/debug/trace", cookie=value)).status == 200
        assert (await rig.get("/debug/trace", authorization="Bearer admin-key")).status == 200
        assert (await rig.get("/debug/trace", authorization="Bearer user-key")).status == 403
        await rig.get("/logout", "POST", cookie=value)
        assert (await rig.get("/", cookie=value)).status == 303


async def test_session_ends_with_its_key() -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        _, cookie = await login(rig, "admin-key")
        value = cookie.split("; ")[0]
        assert (await rig.get("/debug/trace", cookie=value)).status == 200
        rig.cluster.gateway.keys.replace({key_digest("other"): ADMIN})
        assert (await rig.get("/debug/trace", cookie=value)).status == 401


@pytest.mark.parametrize(
    "others",
    ['a={"x": 1}; {}', "a=b c; {}", "flag; {}", "x[y]=1; {}", "a@b=1;{}", "{}; flag", "baton_view_80021=x; {}"],
)
async def test_cookies_of_other_applications_do_not_end_a_session(others: str) -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        _, cookie = await login(rig, "admin-key")
        cookies = others.replace("{}", cookie.split("; ")[0])
        assert (await rig.get("/", cookie=cookies)).status == 200


@pytest.mark.parametrize("end", ["logout", "key"])
async def test_open_stream_ends_with_its_session(end: str) -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        _, cookie = await login(rig, "admin-key")
        value = cookie.split("; ")[0]
        stream = asyncio.create_task(rig.get("/live/events", cookie=value))
        await until(lambda: rig.view.feed.num_viewers or stream.done())
        if end == "logout":
            await rig.get("/logout", "POST", cookie=value)
        else:
            rig.cluster.gateway.keys.replace({key_digest("other"): ADMIN})
        rig.view.feed._compute()
        answer = await asyncio.wait_for(stream, 60.0)
        assert (answer.status, rig.view.feed.num_viewers) == (200, 0)


async def test_stream_has_no_head() -> None:
    async with live_rig(("h0", "hybrid")) as rig:
        assert (await rig.get("/live/events", "HEAD")).status == 400


async def test_attempts_are_refused_before_the_key_is_looked_at() -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        for _ in range(MAX_BURST):
            assert (await login(rig, "wrong"))[0] == 401
        assert await login(rig, "admin-key") == (429, "")


async def test_host_and_origin_of_other_sites_are_refused() -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        refused = await rig.get("/", host="evil.example")
        assert (refused.status, "--view-hosts" in refused.json["error"]["message"]) == (403, True)
        assert (await rig.get("/metrics/cluster", host="evil.example")).status == 403
        assert (await rig.get("/metrics/cluster", host="baton.svc", authorization="Bearer admin-key")).status == 200
        assert (await rig.get("/health", host="10.0.0.1:9000")).status == 200
        assert (await rig.get("/login", "POST", b"key=admin-key", origin="http://evil.example")).status == 403
        for origin in ("null", "http://[::1"):
            assert (await rig.get("/login", "POST", b"key=admin-key", origin=origin)).status == 403
        assert (await rig.get("/login", "POST", b"key=admin-key", origin=f"http://{HOST}")).status == 303


async def test_without_keys_the_page_is_open_with_a_strict_policy() -> None:
    async with live_rig(("h0", "hybrid")) as rig:
        page = await rig.get("/")
        policy = page.headers["content-security-policy"]
        assert page.status == 200
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert b"<script>" not in page.body
        assert b" style=" not in page.body
        assert (await rig.get("/static/view.js")).headers["content-type"].startswith("text/javascript")
        tag = (await rig.get("/static/view.css")).headers["etag"]
        assert (await rig.get("/static/view.css", if_none_match=tag)).status == 304
        assert (await rig.get("/static/../live_app.py")).status == 404
        assert (await rig.get("/login")).headers["location"] == "/"


@pytest.mark.parametrize(
    ("path", "method", "body", "status"),
    [
        ("/nothing", "GET", b"", 404),
        ("/live/events", "POST", b"", 400),
        ("/live/requests/<b>", "GET", b"", 404),
        ("/debug/trace?last=soon", "GET", b"", 400),
        ("/debug/trace?" + "a=1&" * 50, "GET", b"", 400),
        ("/login", "POST", b"key=" + b"x" * 5000, 413),
    ],
)
async def test_bad_requests(path: str, method: str, body: bytes, status: int) -> None:
    async with live_rig(("h0", "hybrid"), keys=key_ring()) as rig:
        answer = await rig.get(
            path, method, body, **({} if path == "/login" else {"authorization": "Bearer admin-key"})
        )
        assert answer.status == status
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_chrome_trace_has_complete_nested_slices() -> None:
    async with live_rig(("p0", "prefill"), ("d0", "decode")) as rig:
        await asyncio.gather(*(rig.cluster.complete("hello", max_tokens=4) for _ in range(3)))
        trace = json.loads((await rig.get("/debug/trace?last=60s")).body)
        events = trace["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert names[1] == "gateway"
        slices = [event for event in events if event["ph"] == "X"]
        for event in slices:
            assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= event.keys()
            assert isinstance(event["ts"], int)
            assert event["dur"] >= 0
            assert event["pid"] in names
        requests = [event for event in slices if event["name"].startswith("request ")]
        assert len(requests) == 3
        assert len({event["tid"] for event in requests}) == 3  # they overlap, so each has its own lane
        for outer in requests:
            inner = [event for event in slices if (event["pid"], event["tid"]) == (1, outer["tid"])]
            assert {event["name"] for event in inner} >= {"placement", "prefill", "decode"}
            for event in inner:
                assert outer["ts"] <= event["ts"] + 1
                assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 2
        assert (await rig.get("/debug/trace?last=1ns")).json["otherData"] == {"requests": 0}


def test_chrome_trace_has_the_phases_of_the_workers() -> None:
    leg = LegTimeline(worker_id="d0", pid=1, kv_wait_s=0.2, kv_transfer_s=0.05, decode_s=0.5)
    trace = RequestTrace(request_id="ab", tenant="", num_prompt_tokens=1, max_tokens=9, received_s=0.0)
    trace.attempts.append(AttemptTrace(number=0, started_s=0.0, placed_s=0.1))
    trace.legs, trace.first_s, trace.last_s, trace.ended_s = ((0, leg),), 0.3, 1.5, 2.0
    events = json.loads(b"".join(trace_pieces([trace], 2.0, 0.0)))["traceEvents"]
    found = {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] == 2}
    times = {name: (event["ts"] // 1000, (event["ts"] + event["dur"]) // 1000) for name, event in found.items()}
    assert times == {"wait for first KV": (100, 300), "KV transfer": (300, 1000), "decode": (1000, 1500)}
    transfer = found["KV transfer"]["args"]
    assert (transfer["reported_ms"], transfer["attempt"]) == (50.0, 1)


async def test_chrome_trace_is_built_in_a_thread_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    sizes: list[int] = []
    gate = threading.Event()

    def watched(*given: Any) -> Iterator[bytes]:
        threads.append(threading.get_ident())
        gate.wait(60.0)
        for piece in trace_pieces(*given):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(live_source, "trace_pieces", watched)
    async with live_rig(("p0", "prefill"), ("d0", "decode")) as rig:
        await asyncio.gather(*(rig.cluster.complete("hello", max_tokens=4) for _ in range(10)))
        gets = [asyncio.create_task(rig.get("/debug/trace")) for _ in range(3)]
        await until(lambda: threads)
        for _ in range(20):  # turns of the event loop, in which the other two would begin
            await asyncio.sleep(0.001)
        assert len(threads) == 1
        gate.set()
        answers = await asyncio.gather(*gets)
    assert [len(answer.json["traceEvents"]) for answer in answers] == [len(sizes) // 3 - 2] * 3
    assert threading.get_ident() not in threads
    assert max(sizes) < 1000


def test_copied_trace_does_not_follow_its_request() -> None:
    trace = RequestTrace(request_id="ab", tenant="t", num_prompt_tokens=1, max_tokens=1, received_s=0.0)
    trace.attempt(0, 0.0)
    (copy,) = recent_traces([trace], 1.0, 0.0)
    trace.attempts[0].placed_s, trace.outcome = 1.0, "finished"
    trace.attempt(1, 2.0)
    assert ([attempt.placed_s for attempt in copy.attempts], copy.outcome) == ([None], "")
