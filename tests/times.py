"""Intervals and timeouts for tests: about a tenth of the defaults, so that every timeout fits into a test."""

TEST_TIMES: dict[str, float] = {
    "heartbeat_s": 0.2,
    "detection_s": 1.0,
    "lease_s": 2.0,
    "kv_claim_timeout_s": 2.0,
    "transfer_reorder_window_s": 0.5,
    "pull_wait_s": 2.0,
    "session_grace_s": 2.0,
    "scheduler_wait_s": 2.0,
    "transfer_deadline_min_s": 0.5,
    "transfer_deadline_max_s": 3.0,
    "drain_s": 5.0,
    "step_limit_s": 3.0,
    "receive_deadline_s": 3.0,
}
"""Values by setting. The bounds of the fault model are tested with these values."""

LONG_TIMES: dict[str, float] = {
    "heartbeat_s": 2.0,
    "detection_s": 20.0,
    "lease_s": 10.0,
    "kv_claim_timeout_s": 10.0,
    "transfer_reorder_window_s": 10.0,
    "pull_wait_s": 30.0,
    "session_grace_s": 20.0,
    "scheduler_wait_s": 30.0,
    "transfer_deadline_min_s": 10.0,
    "transfer_deadline_max_s": 40.0,
    "step_limit_s": 60.0,
    "receive_deadline_s": 30.0,
}
"""Values with which a process that a busy machine stops for seconds is not taken for lost. So placements,
transfers and attempts are those of a cluster without faults. A killed process is still seen at once."""

LONG_LIMIT_S = 60.0
"""Time limit of calls and waits where none is tested: a busy machine must not end them."""
