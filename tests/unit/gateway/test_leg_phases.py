"""Where the phases of a leg lie in time, from the durations that its worker reported."""

from baton.core.request import LegTimeline
from baton.gateway.live.traces.leg_phases import leg_phases


def times(leg: LegTimeline, placed_s: float, last_s: float | None) -> dict[str, tuple[float, float, float]]:
    """Return (begin, end, reported duration) of each phase by name, in milliseconds."""
    return {
        phase.name: (round(1000 * phase.begin_s), round(1000 * phase.end_s), round(1000 * phase.reported_s))
        for phase in leg_phases(leg, placed_s, last_s)
    }


DECODE = LegTimeline(
    worker_id="d0",
    pid=1,
    kv_wait_s=0.2,
    kv_transfer_s=0.05,
    kv_admission_s=0.01,
    first_decode_s=0.02,
    decode_s=0.5,
)


def test_kv_of_several_chunks_arrives_until_decode_begins() -> None:
    """50 ms of reading, between waits for later chunks."""
    assert times(DECODE, 0.1, 1.5) == {
        "wait for first KV": (100, 300, 200),
        "KV transfer": (300, 970, 50),
        "KV admission": (970, 980, 10),
        "decode": (1000, 1500, 500),
    }


def test_phases_of_a_lost_attempt_follow_each_other() -> None:
    assert times(DECODE, 0.1, None) == {
        "wait for first KV": (100, 300, 200),
        "KV transfer": (300, 350, 50),
        "KV admission": (350, 360, 10),
        "decode": (380, 880, 500),
    }


def test_durations_that_exceed_the_time_until_the_last_token_are_kept() -> None:
    """Clocks of worker and gateway differ, and the last token may have arrived before the report."""
    assert times(DECODE, 0.1, 0.6)["decode"] == (380, 880, 500)


def test_prefill_begins_at_the_placement() -> None:
    leg = LegTimeline(worker_id="p0", pid=1, queue_s=0.1, compute_s=0.3)
    assert times(leg, 2.0, 9.0) == {"queue": (2000, 2100, 100), "prefill": (2100, 2400, 300)}
