"""Decides when a worker asks to be replaced because of quarantined blocks, and when it drains without an
answer.

A scheduler replaces such workers one at a time. A peer that pauses for a moment could otherwise make all
workers of a role drain together. If no scheduler answers for a long time, the worker drains on its own.
"""

from random import Random

from baton.runtime.logging import get_logger

log = get_logger(__name__)

REPLACEMENT_WAIT_DRAINS = 10
"""The wait for a scheduler is this many drain times, plus up to as many again at random, so that workers
without an answer do not drain together."""


class QuarantineLimit:
    """The replacement request of one worker.

    `needs_replacement` is True while the worker asks to be replaced.
    """

    def __init__(self, *, drain_s: float, rng: Random) -> None:
        self._drain_s = drain_s
        self._rng = rng
        self._drain_at_s: float | None = None

    @property
    def needs_replacement(self) -> bool:
        return self._drain_at_s is not None

    def update(self, *, is_over_limit: bool, num_quarantined_blocks: int, now_s: float) -> bool:
        """Record the current state; call it at every check.

        Returns True if the worker must drain now, unasked.
        """
        if not is_over_limit:
            if self._drain_at_s is not None:
                log.info("replacement_withdrawn", num_blocks=num_quarantined_blocks)
            self._drain_at_s = None
            return False
        if self._drain_at_s is None:
            wait_s = REPLACEMENT_WAIT_DRAINS * self._drain_s * self._rng.uniform(1.0, 2.0)
            self._drain_at_s = now_s + wait_s
            log.error("replacement_requested", num_blocks=num_quarantined_blocks, wait_s=wait_s)
        return now_s >= self._drain_at_s
