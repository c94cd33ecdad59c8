"""Tests of when a worker asks to be replaced, and of when it drains without an answer."""

from random import Random

from baton.worker.quarantine_limit import REPLACEMENT_WAIT_DRAINS, QuarantineLimit

DRAIN_S = 5.0


def test_replacement_is_requested_while_the_worker_is_over_the_limit() -> None:
    quarantine_limit = QuarantineLimit(drain_s=DRAIN_S, rng=Random(0))
    for is_over_limit in (False, True, True, False, True):
        assert not quarantine_limit.update(is_over_limit=is_over_limit, num_quarantined_blocks=7, now_s=1.0)
        assert quarantine_limit.needs_replacement == is_over_limit


def test_worker_drains_without_an_answer_after_the_replacement_wait() -> None:
    quarantine_limit = QuarantineLimit(drain_s=DRAIN_S, rng=Random(0))
    assert not quarantine_limit.update(is_over_limit=True, num_quarantined_blocks=7, now_s=100.0)
    assert not quarantine_limit.update(
        is_over_limit=True, num_quarantined_blocks=7, now_s=100.0 + REPLACEMENT_WAIT_DRAINS * DRAIN_S - 0.1
    )
    assert quarantine_limit.update(
        is_over_limit=True, num_quarantined_blocks=7, now_s=100.0 + 2 * REPLACEMENT_WAIT_DRAINS * DRAIN_S
    )


def test_workers_without_an_answer_drain_at_different_times() -> None:
    def drains_at_s(seed: int) -> int:
        quarantine_limit = QuarantineLimit(drain_s=DRAIN_S, rng=Random(seed))
        return next(
            now_s
            for now_s in range(1000)
            if quarantine_limit.update(is_over_limit=True, num_quarantined_blocks=7, now_s=float(now_s))
        )

    times = sorted(drains_at_s(seed) for seed in range(8))
    assert len(set(times)) > 4
    assert times[-1] - times[0] > 4 * DRAIN_S
