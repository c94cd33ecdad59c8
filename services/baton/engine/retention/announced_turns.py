"""The budget of `next_in_s`: blocks of the device that the announced turns of a tenant may take."""

from collections.abc import Callable, Hashable

LATE_SHARE, LATE_S = 0.5, 1.0
"""An announced turn that is later by more than this share of its pause and this time is not expected."""


def end_of_turn_s(ended_s: float, next_in_s: float) -> float:
    """Return until when a turn is expected that was announced at `ended_s`."""
    return ended_s + (1 + LATE_SHARE) * next_in_s + LATE_S


class AnnouncedTurns:
    """The turns whose time clients have announced, within the budgets of their tenants.

    A turn is known by the owner of its content.
    num_refused: turns for which a tenant had no budget left
    """

    def __init__(self, tenant_blocks: int, clock: Callable[[], float]) -> None:
        """tenant_blocks: device blocks that the announced turns of one tenant may take"""
        self.num_refused = 0
        self._tenant_blocks, self._clock = tenant_blocks, clock
        self._by_tenant: dict[str, dict[Hashable, tuple[int, float]]] = {}  # blocks, and until when

    def num_blocks_of(self, tenant: str) -> int:
        """Return how many blocks the turns of a tenant take now."""
        now_s = self._clock()
        turns = self._by_tenant.get(tenant, {})
        for owner in [owner for owner, (_, until_s) in turns.items() if until_s <= now_s]:
            self.release(tenant, owner)
        return sum(count for count, _ in turns.values())

    def take(self, tenant: str, owner: Hashable, num_blocks: int, until_s: float) -> int:
        """Return how many of `num_blocks` an owner's next turn may take, until it is released or too late.

        What the owner had before is released.
        """
        self.release(tenant, owner)
        granted = min(num_blocks, self._tenant_blocks - self.num_blocks_of(tenant))
        if granted > 0:
            self._by_tenant.setdefault(tenant, {})[owner] = (granted, until_s)
        self.num_refused += num_blocks > 0 >= granted
        return max(0, granted)

    def release(self, tenant: str, owner: Hashable) -> None:
        """Give back what an owner's turn has taken, if anything."""
        turns = self._by_tenant.get(tenant)
        if turns is not None and turns.pop(owner, None) is not None and not turns:
            del self._by_tenant[tenant]
