"""`/metrics/cluster`: one page of all processes, in which a missing process is visible."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from baton.core.interfaces import Member, MemberKind
from baton.gateway.live import cluster_metrics
from baton.gateway.live.cluster_metrics import (
    REMEMBER_S,
    ClusterMetrics,
    KnownTargets,
    MetricsTarget,
    read_metrics,
    target_of,
)
from baton.gateway.live.metrics_page import ProcessMetricsPage, merge_pages
from baton.runtime.network.announcements import process_details
from baton.runtime.observability.metrics import expose
from baton.store.memory.memory_stores import MemoryMembership


@pytest.fixture(autouse=True)
def long_read_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers in the event loop of the test are as slow as the machine."""
    monkeypatch.setattr(cluster_metrics, "read_metrics", partial(read_metrics, timeout_s=60.0))


def page_text(number: int) -> str:
    registry = CollectorRegistry()
    Counter("baton_steps", "Steps.", ("kind",), registry=registry).labels('a "b" {c} d').inc(number)
    Histogram("baton_step_seconds", "Duration.", registry=registry, buckets=(1.0,)).observe(number)
    return expose(registry).decode()


def member(name: str, port: int | None, address: str = "127.0.0.1:7000") -> Member:
    info = process_details(1, "here", port)
    return Member(kind=MemberKind.WORKER, member_id=name, epoch=1, address=address, info=info)


@asynccontextmanager
async def served(answer: Callable[[], bytes]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def ok(text: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n" + text.encode()


def samples(page: str) -> dict[tuple[str, str], float]:
    """Return the values by (metric name, process)."""
    return {
        (sample.name, sample.labels["process"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("le", "1.0") == "1.0"
    }


def test_merged_page_keeps_families_together_and_names_processes() -> None:
    pages = [
        ProcessMetricsPage(kind="worker", process=f"w{i}", instance=f"h:{i}", text=page_text(i) if i else None)
        for i in range(3)
    ]
    page = merge_pages(pages)
    found = samples(page)
    assert [found["baton_process_up", f"w{i}"] for i in range(3)] == [0.0, 1.0, 1.0]
    assert (found["baton_steps_total", "w1"], found["baton_steps_total", "w2"]) == (1.0, 2.0)
    assert found["baton_step_seconds_sum", "w2"] == 2.0
    assert ("baton_steps_total", "w0") not in found
    assert page.count("# TYPE baton_steps_total counter") == 1
    names = [line.split("{")[0] for line in page.splitlines() if not line.startswith("#")]
    lines = [name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in names]
    assert len([name for name, before in pairwise([*lines, ""]) if name != before]) == len(set(lines))  # adjacent


@pytest.mark.parametrize(
    ("member", "instance"),
    [
        (member("w", 9000), "127.0.0.1:9000"),
        (member("w", 9000, "[::1]:7000"), "[::1]:9000"),
        (member("w", None), None),
        (member("w", 70000), None),
    ],
)
def test_target_is_at_the_members_own_host(member: Member, instance: str | None) -> None:
    found = target_of(member)
    assert (found.instance if found else None) == instance


async def test_dead_process_is_down_until_it_is_forgotten() -> None:
    membership, now = MemoryMembership(), [0.0]
    async with served(lambda: ok(page_text(1))) as port:
        alive, dead = member("alive", port), member("dead", 1)
        await membership.announce(alive, 1e6)
        await membership.announce(dead, 1e6)
        known = KnownTargets(membership, lambda: now[0])
        metrics = ClusterMetrics(known, MetricsTarget("gateway", "g", "h:1"), lambda: page_text(5))
        found = samples((await metrics.page()).decode())
        assert [found["baton_process_up", name] for name in ("g", "alive", "dead")] == [1.0, 1.0, 0.0]
        assert (found["baton_steps_total", "g"], found["baton_steps_total", "alive"]) == (5.0, 1.0)
        await membership.withdraw(dead)
        assert [target.process for target in await known.targets()] == ["alive", "dead"]
        now[0] = REMEMBER_S + 1
        assert [target.process for target in await known.targets()] == ["alive"]


async def test_concurrent_readers_share_one_collection() -> None:
    reads = []
    metrics = ClusterMetrics(
        KnownTargets(None, lambda: 0.0), MetricsTarget("gateway", "g", "h:1"), lambda: reads.append(1) or ""
    )
    pages = await asyncio.gather(*(metrics.page() for _ in range(20)))
    assert (len(reads), len(set(pages))) == (1, 1)


async def test_pages_that_exceed_the_total_are_dropped() -> None:
    membership = MemoryMembership()
    async with served(lambda: ok(page_text(1))) as port:
        for number in range(8):
            await membership.announce(member(f"w{number}", port), 1e6)
        metrics = ClusterMetrics(
            KnownTargets(membership, lambda: 0.0),
            MetricsTarget("gateway", "g", "h:1"),
            lambda: "",
            max_total_bytes=3 * len(page_text(1)) + 1,
        )
        found = samples((await metrics.page()).decode())
    assert 1 <= sum(found["baton_process_up", f"w{number}"] for number in range(8)) <= 3
    assert found["baton_process_up", "g"] == 1.0


async def test_slow_large_or_failing_pages_count_as_down() -> None:
    async with served(lambda: ok("x" * 5000)) as port:
        assert await read_metrics(f"127.0.0.1:{port}", max_bytes=1000) is None
    async with served(lambda: b"HTTP/1.1 503 Down\r\n\r\nmetric 1\n") as port:
        assert await read_metrics(f"127.0.0.1:{port}") is None
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with silent:
        assert await read_metrics(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}", timeout_s=0.05) is None
    assert await read_metrics("127.0.0.1:1") is None
