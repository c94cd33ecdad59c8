"""The scheduler's times are derived from the heartbeat settings."""

import pytest

from baton.runtime.config.settings import SchedulerConfig
from baton.scheduler.state.worker_streams import SchedulerTimes
from tests.times import TEST_TIMES


@pytest.mark.parametrize(
    ("heartbeat_s", "detection_s"),
    [
        (2.0, 5.0),
        (TEST_TIMES["heartbeat_s"], TEST_TIMES["detection_s"]),
        pytest.param(1.0, 2.0, id="the shortest allowed"),
    ],
)
def test_times_follow_the_heartbeat_settings(heartbeat_s: float, detection_s: float) -> None:
    times = SchedulerTimes.of(SchedulerConfig(heartbeat_s=heartbeat_s, detection_s=detection_s))
    assert times.silence_s == detection_s
    assert times.settle_s >= 2 * heartbeat_s, (
        "a worker has looked for this scheduler, and had as long again to be heard"
    )
    assert times.reservation_s > detection_s, "a report has had every chance to count the placement"
    assert times.watch_interval_s < heartbeat_s / 2, "gateways see a change before they would miss a heartbeat"
