"""How long a worn-out worker waits for its turn."""

from random import Random

from baton.worker.quarantine_limit import PATIENCE_DRAINS, QuarantineLimit

DRAIN_S = 5.0


def test_it_asks_as_long_as_it_is_worn_out() -> None:
    quarantine_limit = QuarantineLimit(drain_s=DRAIN_S, rng=Random(0))
    for needs_replacement in (False, True, True, False, True):
        assert not quarantine_limit.look(needs_replacement=needs_replacement, num_blocks=7, now_s=1.0)
        assert quarantine_limit.asks == needs_replacement


def test_it_goes_by_itself_when_nobody_answers_for_long() -> None:
    quarantine_limit = QuarantineLimit(drain_s=DRAIN_S, rng=Random(0))
    assert not quarantine_limit.look(needs_replacement=True, num_blocks=7, now_s=100.0)
    assert not quarantine_limit.look(
        needs_replacement=True, num_blocks=7, now_s=100.0 + PATIENCE_DRAINS * DRAIN_S - 0.1
    )
    assert quarantine_limit.look(needs_replacement=True, num_blocks=7, now_s=100.0 + 2 * PATIENCE_DRAINS * DRAIN_S)


def test_those_whom_nobody_answers_do_not_go_at_once() -> None:
    def leaves_s(seed: int) -> int:
        quarantine_limit = QuarantineLimit(drain_s=DRAIN_S, rng=Random(seed))
        return next(
            now_s
            for now_s in range(1000)
            if quarantine_limit.look(needs_replacement=True, num_blocks=7, now_s=float(now_s))
        )

    times = sorted(leaves_s(seed) for seed in range(8))
    assert len(set(times)) > 4
    assert times[-1] - times[0] > 4 * DRAIN_S
