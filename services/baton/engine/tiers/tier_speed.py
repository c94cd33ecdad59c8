"""The measured speed of one tier, and what it predicts."""

from baton.engine.tiers.copy_speed import CopySpeed
from baton.engine.tiers.load_times import LoadTimes


class TierSpeed:
    """Predicts the time of stores and loads of a tier from those that have ended. The caller passes the time.

    loads: measures loads. Before the first, stores tell their speed.
    """

    def __init__(self, block_bytes: int) -> None:
        self.loads = LoadTimes()
        self._stores = CopySpeed()
        self._block_bytes = block_bytes

    def stored(self, num_blocks: int, seconds: float) -> None:
        """Record a store."""
        self._stores.observe(num_blocks * self._block_bytes, seconds)

    def store_s(self, num_blocks: int) -> float | None:
        """Return the predicted time of a store; None before the first."""
        s_per_byte = self._stores.s_per_byte
        return None if s_per_byte is None else s_per_byte * num_blocks * self._block_bytes

    def load_s(self, num_blocks: int, now_s: float) -> float | None:
        """Return the predicted time of a load; None before the first store or load."""
        predicted_s = self.loads.predicted_s(num_blocks, now_s)
        return self.store_s(num_blocks) if predicted_s is None else predicted_s

    def load_block_s(self, now_s: float) -> float | None:
        """Return the predicted time that one more block adds to a load; None if nothing was measured."""
        cost = self.loads.cost(now_s)
        return self.store_s(1) if cost is None else cost.block_s

    def load_fixed_s(self, now_s: float) -> float:
        """Return the predicted time of a load that does not depend on its blocks; 0 before the first."""
        cost = self.loads.cost(now_s)
        return 0.0 if cost is None else cost.fixed_s
