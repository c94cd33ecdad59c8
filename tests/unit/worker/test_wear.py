"""How long a worn-out worker waits for its turn."""

from random import Random

from baton.worker.wear import PATIENCE_DRAINS, Wear

DRAIN_S = 5.0


def test_it_asks_as_long_as_it_is_worn_out() -> None:
    wear = Wear(drain_s=DRAIN_S, rng=Random(0))
    for is_worn_out in (False, True, True, False, True):
        assert not wear.look(is_worn_out=is_worn_out, num_blocks=7, now_s=1.0)
        assert wear.asks == is_worn_out


def test_it_goes_by_itself_when_nobody_answers_for_long() -> None:
    wear = Wear(drain_s=DRAIN_S, rng=Random(0))
    assert not wear.look(is_worn_out=True, num_blocks=7, now_s=100.0)
    assert not wear.look(is_worn_out=True, num_blocks=7, now_s=100.0 + PATIENCE_DRAINS * DRAIN_S - 0.1)
    assert wear.look(is_worn_out=True, num_blocks=7, now_s=100.0 + 2 * PATIENCE_DRAINS * DRAIN_S)


def test_those_whom_nobody_answers_do_not_go_at_once() -> None:
    def leaves_s(seed: int) -> int:
        wear = Wear(drain_s=DRAIN_S, rng=Random(seed))
        return next(now_s for now_s in range(1000) if wear.look(is_worn_out=True, num_blocks=7, now_s=float(now_s)))

    times = sorted(leaves_s(seed) for seed in range(8))
    assert len(set(times)) > 4
    assert times[-1] - times[0] > 4 * DRAIN_S
