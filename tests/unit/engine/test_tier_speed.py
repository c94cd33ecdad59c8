"""`TierSpeed`: predictions before the first load come from stores, later ones from loads."""

import pytest

from baton.engine.tiers.tier_speed import TierSpeed


def test_nothing_is_predicted_before_the_first_store() -> None:
    speed = TierSpeed(1000)
    assert (speed.store_s(1), speed.load_s(1, 0.0), speed.load_block_s(0.0)) == (None, None, None)
    assert speed.load_fixed_s(0.0) == 0


def test_stores_tell_the_speed_of_loads_until_the_first_load() -> None:
    speed = TierSpeed(1000)
    speed.stored(4, 0.008)
    assert speed.store_s(3) == speed.load_s(3, 0.0) == pytest.approx(0.006)
    assert speed.load_block_s(0.0) == pytest.approx(0.002)
    speed.loads.observe(2, 0.1, 1.0)
    speed.loads.observe(20, 0.28, 2.0)
    assert speed.load_s(10, 3.0) == pytest.approx(0.18)
    assert speed.load_block_s(3.0) == pytest.approx(0.01)
    assert speed.load_fixed_s(3.0) == pytest.approx(0.08)
    assert speed.store_s(1) == pytest.approx(0.002)
