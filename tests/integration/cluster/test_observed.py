"""Queries of the dashboard and the rules over the metrics of a loaded cluster: each finds series and has a
value.

Values are computed by `tests.deploy.promql`, not by a real Prometheus.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import promql_parser as ast
import pytest
import pytest_asyncio

from tests.cluster import ProcessCluster, process_cluster
from tests.deploy.dashboard_queries import queries
from tests.deploy.exported import selectors
from tests.deploy.promql import NAME, Database
from tests.deploy.test_rules import ALERTS, RECORDED
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

SERVICES = ("gateway", "scheduler", "p0", "d0")
RANGE = "60s"
LATE_MS = 2000
"""Deadline of a request that decodes for 15 s. Its pull ends long before, or it would count as failed."""
NEEDS_A_FAULT = {
    "baton_attempts_total",
    'baton_requests_total{reason=~"poison|numerical_error"}',
    'baton_transfers_total{outcome!~"received|cancelled"}',
}
"""Selectors without series as long as no fault occurs."""
OF_A_FLEET = {'baton_fleet_workers{state=~"waiting|failing"}'}
"""Selectors of fleet metrics, which this cluster does not export. `tests/unit/fleet/test_fleet_main.py`
does."""
OF_A_CHOICE = {"baton_link_backend_bytes_per_second"}
"""Selectors of metrics that only `--transfer auto` exports."""


@dataclass
class Recorded:
    """Two scrapes of all services.

    last_s: time of the second scrape, relative to the first.
    num_moved: number of answers whose KV was transferred.
    """

    database: Database
    last_s: float
    num_moved: int


async def complete(cluster: ProcessCluster, prompt: str, **changes: Any) -> httpx.Response:
    headers = {"x-baton-timeout-ms": str(changes.pop("timeout_ms"))} if "timeout_ms" in changes else {}
    async with httpx.AsyncClient(timeout=60.0) as client:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "timeline": True} | changes
        return await client.post(f"{cluster.url}/v1/completions", json=body, headers=headers)


async def load(cluster: ProcessCluster) -> int:
    """Send requests with a shared prefix, with SLOs, one that is refused and one that exceeds its deadline.

    Returns the number of answers whose KV was transferred. On a busy machine some are prefilled locally.
    """
    prefix = "Everybody begins like this, and goes on for a while. " * 40
    answers = await asyncio.gather(*(complete(cluster, f"{prefix}{number}") for number in range(6)))
    answers += [await complete(cluster, prefix + "again", slo={"tpot_ms": 60_000})]
    assert [answer.status_code for answer in answers] == [200] * 7
    assert (await complete(cluster, "Impossible. " * 200, slo={"ttft_ms": 0.01})).status_code == 429
    assert (await complete(cluster, "Too late. " * 20, max_tokens=3000, timeout_ms=LATE_MS)).status_code == 504
    return sum(answer.json()["baton"].get("kv_bytes", 0) > 0 for answer in answers)


async def scrape(cluster: ProcessCluster, database: Database, at_s: float) -> None:
    for name in SERVICES:
        for sample in await cluster.scrape(name):
            database.add({**sample.labels, NAME: sample.name, "instance": name, "job": "baton"}, at_s, sample.value)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Recorded]:
    settings = {
        "device": "emulated",
        "emulated_costs": "step=5ms,prefill_token=100us,decode_seq=100us",
        "policy": "kv_centric",
        "admission": "predictive",
        "slo": "ttft=30s,tpot=5s",
        "transfer": "local",
        "host_kv_memory": 1 << 20,
        "disk_kv": str(tmp_path_factory.mktemp("kv")),
        "disk_kv_size": 1 << 20,
        "admin_port": 0,
        **LONG_TIMES,  # a fault would add series
    }
    async with process_cluster(prefill=1, decode=1, **settings) as cluster:
        loop, database = asyncio.get_running_loop(), Database()
        num_moved = await load(cluster)
        began_s = loop.time()
        await scrape(cluster, database, 0.0)
        num_moved += await load(cluster)
        await asyncio.sleep(max(0.0, 2.0 - (loop.time() - began_s)))
        last_s = loop.time() - began_s
        await scrape(cluster, database, last_s)
        yield Recorded(database, last_s, num_moved)


def bare(selector: ast.VectorSelector) -> str:
    """Return the selector without the namespace matcher."""
    matchers = [str(m) for m in selector.matchers.matchers if m.name != "namespace"]
    return f"{selector.name}{{{','.join(matchers)}}}" if matchers else str(selector.name)


async def test_every_selector_finds_a_series(recorded: Recorded) -> None:
    all_queries = [query for _, query in queries(RANGE)] + [
        rule["expr"] for rule in (*ALERTS.values(), *RECORDED.values())
    ]
    found, missing = set(), set()
    for selector in (one for query in all_queries for one in selectors(query)):
        if selector.name not in RECORDED:
            (found if list(recorded.database.matching(selector)) else missing).add(bare(selector))
    assert missing == NEEDS_A_FAULT | OF_A_FLEET | OF_A_CHOICE
    assert len(found) > 50


@pytest.mark.parametrize(("name", "query"), [pytest.param(name, query, id=name) for name, query in queries(RANGE)])
async def test_every_dashboard_query_has_a_value(recorded: Recorded, name: str, query: str) -> None:
    has_none = any(bare(selector) in NEEDS_A_FAULT | OF_A_CHOICE for selector in selectors(query))
    assert bool(recorded.database.vector(query, recorded.last_s)) is not has_none, name


async def test_every_process_exports_its_memory_budget_and_the_stalls_of_its_loop(recorded: Recorded) -> None:
    for metric in ("memory_budget_used_bytes", "memory_budget_limit_bytes", "event_loop_stall_seconds_count"):
        found = recorded.database.vector(f"count by (instance) (baton_{metric})", recorded.last_s)
        assert len(found) == len(SERVICES), metric


async def test_metrics_equal_the_requests_that_were_sent(recorded: Recorded) -> None:
    """Check some values that are known exactly."""

    def value(query: str) -> float:
        (found,) = recorded.database.vector(query, recorded.last_s).values()
        return found

    assert value('sum(baton_requests_total{code="200"})') == 14
    assert value('sum(baton_requests_total{code="429", reason="ttft_slo"})') == 2
    assert value('sum(baton_rejections_total{reason="ttft_slo"})') == 2
    assert value('sum(baton_slo_attainment_total{term="tpot", outcome="met"})') == 14
    assert value('sum(baton_kv_blocks * on (instance) group_left (role) baton_worker_info{role="prefill"})') > 0
    assert value('sum(baton_transfers_total{outcome="received"})') >= recorded.num_moved > 0
    assert value("sum(baton_transfer_bytes_total) / sum(baton_transfer_read_seconds_total)") > 1e6
    actual, requested = (value(f'baton_prefix_hit_tokens_total{{kind="{kind}"}}') for kind in ("actual", "asked"))
    assert 0.3 < actual / requested < 1.0
