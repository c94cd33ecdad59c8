"""Black-box probes of a cluster: memory, latency and availability under hostile and extreme requests."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.cluster import ProcessCluster, process_cluster
from tests.probes.__main__ import PROBES
from tests.probes.target import Target

# `make test` covers each point by a test of the gateway alone, in tests/integration/gateway.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    async with process_cluster(prefill=2, decode=2, receive_deadline_s=5.0) as running:
        yield running


@pytest.mark.parametrize("name", PROBES)
async def test_gateway_stays_within_the_limits_of_the_probe(cluster: ProcessCluster, name: str) -> None:
    target = Target(
        url=cluster.url,
        grpc_port=urlsplit(f"//{cluster.grpc_address}").port or 0,
        pid=cluster.pid("gateway"),
        redis_url=str(cluster.settings["redis_url"]),
    )
    findings = await PROBES[name](target)
    await target.http.aclose()
    assert findings
    assert [str(finding) for finding in findings if not finding.is_good] == []
    await cluster.check_clean()
