"""Calls of llguidance without the GIL, so that an expensive grammar does not stop the other threads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from baton.core.kv.block_hash import TokenIds
from baton.engine.constraints.token_bits import Bits


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskClocks:
    """Clocks that tell the cost of masks: `wall_s` any time, `cpu_s` the CPU time of the calling thread."""

    wall_s: Callable[[], float]
    cpu_s: Callable[[], float]


NO_CLOCKS = MaskClocks(wall_s=lambda: 0.0, cpu_s=lambda: 0.0)
"""Masks cost nothing, for simulations."""


class MatcherExecutor:
    """Lets matchers consume tokens and compute masks. Used by one thread at a time.

    llguidance keeps the GIL while a single matcher consumes a token, which can take 40 ms. It releases the
    GIL for two, so each call has a second matcher, which is in an error state and does nothing.
    """

    def __init__(self, table: LLTokenizer, clocks: MaskClocks = NO_CLOCKS) -> None:
        self.clocks = clocks
        self._executor = LLExecutor(1)
        self._idle = LLMatcher(table, "", log_level=0)

    def consume(self, pairs: Sequence[tuple[LLMatcher, int]]) -> None:
        """Let each matcher consume one token. One that cannot is in an error state afterwards."""
        self._executor.consume_token_par([*pairs, (self._idle, 0)])

    def replay(self, matcher: LLMatcher, token_ids: TokenIds) -> int:
        """Let a matcher consume tokens, up to the first that it cannot. Returns the number before that."""
        for index, token_id in enumerate(token_ids):
            self.consume([(matcher, token_id)])
            if matcher.is_error():
                return index
        return len(token_ids)

    def fill(self, matchers: Sequence[LLMatcher], masks: Bits) -> None:
        """Set row i of `masks` to the tokens that matcher i allows next; C-contiguous.

        The row of a matcher that is in an error state afterwards is arbitrary.
        """
        address: int = masks.ctypes.data
        row_bytes = masks.shape[1] * masks.itemsize
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, address, row_bytes, len(masks))
