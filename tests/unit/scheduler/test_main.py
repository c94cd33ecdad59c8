"""The scheduler's main without Redis or processes: its times."""

from baton.runtime.settings import SchedulerConfig
from baton.scheduler.main import times_of
from tests.times import TEST_TIMES


def test_times_follow_the_settings() -> None:
    config = SchedulerConfig(heartbeat_s=TEST_TIMES["heartbeat_s"], detection_s=TEST_TIMES["detection_s"])
    times = times_of(config)
    assert times.silence_s == config.detection_s
    assert times.reservation_s > config.detection_s, "a report has had every chance to count the placement"
    assert times.watch_interval_s < config.heartbeat_s / 2, "gateways see a change before they would miss a heartbeat"
