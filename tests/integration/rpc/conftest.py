"""Fixtures that the tests of internal ports share."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.cluster import process_cluster
from tests.integration.rpc.checked_cluster import NAMES, CheckedCluster, log_lines
from tests.malformed_connections import internal_errors


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[CheckedCluster]:
    async with process_cluster(
        prefill=0,
        decode=0,
        hybrid=1,
        admin_port=0,
        heartbeat_s=2.0,
        detection_s=10.0,
        scheduler_wait_s=30.0,
        step_limit_s=60.0,
    ) as processes:
        checked = CheckedCluster(processes, (await processes.status()).workers[0].worker)
        await checked.start()
        yield checked
        await processes.until(lambda status: not status.workers[0].links, 60, "links to unreachable owners are dropped")
        await checked.check()
        await checked.aclose()
        await processes.check_clean()
        assert internal_errors(line for name in NAMES for line in log_lines(processes, name)) == [], (
            "invalid input is not logged as an internal error"
        )
