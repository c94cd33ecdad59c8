"""Definition of TTFT and TPOT. Timelines, decision records and metrics all read them from `TokenLatency`."""


class TokenLatency:
    """Delivery times of the tokens of one request, or of one attempt. All times are event loop times."""

    __slots__ = ("_counts", "_firsts", "_lasts", "first_s", "last_s")

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self._firsts: dict[int, float] = {}
        self._lasts: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def record(self, sample_index: int, num_tokens: int, now_s: float) -> None:
        """Record that `num_tokens` new tokens of a sample were delivered at `now_s`.

        The caller leaves out tokens that were delivered before, so each token counts once.
        """
        if not num_tokens:
            return
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        self._firsts.setdefault(sample_index, now_s)
        self._lasts[sample_index] = now_s
        self._counts[sample_index] = self._counts.get(sample_index, 0) + num_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens recorded, over all samples."""
        return sum(self._counts.values())

    def ttft_s(self, since_s: float) -> float | None:
        """Seconds from `since_s` to the first token; None if there is no token."""
        return None if self.first_s is None else self.first_s - since_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens of one sample, over all samples; None if no sample has two tokens.

        It is the sum of (last - first) over the samples, divided by the sum of (tokens - 1).
        """
        num_gaps = sum(count - 1 for count in self._counts.values())
        if not num_gaps:
            return None
        return sum(self._lasts[index] - self._firsts[index] for index in self._counts) / num_gaps
