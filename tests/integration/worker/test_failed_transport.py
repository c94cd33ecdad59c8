"""A worker process whose transport fails is replaced: it reports UNHEALTHY and exits non-zero."""

from pathlib import Path

import pytest

from baton.core.cluster.worker_report import WorkerState
from tests.integration.worker.processes import worker_processes

pytestmark = pytest.mark.integration


@pytest.mark.fault("F-11")
async def test_worker_whose_notification_calls_keep_failing_exits_unhealthy(tmp_path: Path) -> None:
    async with worker_processes(tmp_path) as processes:
        failing = {"BATON_FAILPOINTS": "transfer.notifications=raise:injected"}
        worker = await processes.spawn("w", {"device": "emulated", "transfer": "nixl"}, failing)
        assert await worker.exit_code(within_s=60) not in (0, -9)
        assert processes.scheduler.reports["w"][-1].state is WorkerState.UNHEALTHY
        log = worker.log.read_text()
        assert log.count("kv_notifications_failed") == 8
        assert "KV transfers have stopped: injected" in log
