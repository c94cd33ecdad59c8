"""A worker process whose transport fails is replaced: it reports UNHEALTHY and exits non-zero."""

from pathlib import Path

import pytest

from baton.core.cluster.worker_report import WorkerState
from tests.integration.worker.processes import START_S, worker_processes

pytestmark = pytest.mark.integration


@pytest.mark.long  # `make test` covers this by tests/contract/test_nixl_errors.py and test_worker_service.py
@pytest.mark.fault("F-11")
async def test_worker_whose_notification_calls_keep_failing_exits_unhealthy(tmp_path: Path) -> None:
    async with worker_processes(tmp_path) as processes:
        # It fails once the worker reports. One that fails at its start has only a second for that.
        rules = "transfer.notifications=sleep:5@1;transfer.notifications=raise:injected"
        failing = {"BATON_FAILPOINTS": rules}
        worker = await processes.spawn("w", {"device": "emulated", "transfer": "nixl"}, failing)
        assert await worker.exit_code(within_s=START_S) not in (0, -9)
        await processes.report("w", WorkerState.UNHEALTHY, may_have_ended=True)
        log = worker.log.read_text()
        assert log.count("kv_notifications_failed") == 8
        assert "KV transfers have stopped: injected" in log
