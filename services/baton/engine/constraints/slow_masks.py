"""Computes masks of grammars that may be slow in threads of their own, so that a step need not wait for them.

A sequence whose mask is not ready in time is deferred: its token is drawn in a later step. So time decides
when a token is drawn, and never which.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from baton.core.errors import Failure, Refused
from baton.core.kv.block_hash import TokenIds
from baton.engine.constraints.sampling_rules import SamplingRules

MAX_WAIT_S = 0.004
"""Time that the first step with a slow mask waits for it, after its forward pass was launched."""
SLOW_MASK_S = 0.002
"""A mask that took longer is slow."""
NUM_FAST_MASKS = 8
"""Masks in a row that must be fast until a grammar's masks are computed together with others. A new grammar
has none."""
_NUM_THREADS = 2


class SlowMasks:
    """Threads that compute masks. Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the time in seconds, in any thread."""
        self._clock = clock
        self._has_new = False  # since the last wait
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="masks")

    def now_s(self) -> float:
        """Return the time of the clock."""
        return self._clock()

    def start(self, rules: SamplingRules, seq_id: int, outputs: TokenIds) -> Future[None]:
        """Compute the mask of a sequence, unless it is being computed. Its matcher then has the mask."""
        known = rules.pending.get(seq_id)
        if known is not None and known[0] == len(outputs):
            return known[1]
        self._has_new = True
        pending = self._threads.submit(self._compute, rules, seq_id, outputs)
        rules.pending[seq_id] = len(outputs), pending
        return pending

    def wait(self, pending: Mapping[int, Future[None]]) -> tuple[frozenset[int], dict[int, Failure]]:
        """Wait for masks by row, unless a step has waited for all of them before.

        Returns the rows whose mask is not ready, and the failures of others.
        """
        if self._has_new:
            wait(pending.values(), timeout=MAX_WAIT_S)
        self._has_new = False
        failures: dict[int, Failure] = {}
        for row, future in pending.items():
            error = future.exception() if future.done() else None
            if isinstance(error, Refused):
                failures[row] = error.failure
            elif error is not None:
                raise error
        return frozenset(row for row, future in pending.items() if not future.done()), failures

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compute(self, rules: SamplingRules, seq_id: int, outputs: TokenIds) -> None:
        began_s = self._clock()
        try:
            rules.compute_ahead(seq_id, outputs)
        finally:
            took_s = self._clock() - began_s
            rules.count_fast_mask(took_s <= SLOW_MASK_S)
