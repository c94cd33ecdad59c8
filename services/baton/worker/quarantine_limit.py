"""A worker that too much quarantine has worn out: it asks to be let go, and serves on until a scheduler says
that it is its turn.

Else a peer that stands still for a moment could send every worker of a role away at once. Where nobody
answers for long, it goes by itself.
"""

from random import Random

from baton.runtime.logging import get_logger

log = get_logger(__name__)

PATIENCE_DRAINS = 10
"""A worn-out worker waits so many drain times for its turn, and up to as many again by chance: workers that
nobody answers do not all leave at once either."""


class QuarantineLimit:
    """`asks`: it wants to be let go."""

    def __init__(self, *, drain_s: float, rng: Random) -> None:
        self._drain_s = drain_s
        self._rng = rng
        self._leaves_s: float | None = None

    @property
    def asks(self) -> bool:
        return self._leaves_s is not None

    def look(self, *, needs_replacement: bool, num_blocks: int, now_s: float) -> bool:
        """To be called again and again; whether it must leave now without having been told. `num_blocks`: how
        many are quarantined."""
        if not needs_replacement:
            if self._leaves_s is not None:
                log.info("needs_replacement_no_more", num_blocks=num_blocks)
            self._leaves_s = None
            return False
        if self._leaves_s is None:
            patience_s = PATIENCE_DRAINS * self._drain_s * self._rng.uniform(1.0, 2.0)
            self._leaves_s = now_s + patience_s
            log.error("needs_replacement", num_blocks=num_blocks, patience_s=patience_s)
        return now_s >= self._leaves_s
