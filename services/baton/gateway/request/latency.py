"""When tokens came. TTFT and TPOT are defined here and nowhere else: timelines, decision records and metrics
read them off a `TokenLatency`."""


class TokenLatency:
    """The tokens of one request, or of one attempt at it, as they were delivered. Times are the event
    loop's."""

    __slots__ = ("_counts", "_firsts", "_lasts", "first_s", "last_s")

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self._firsts: dict[int, float] = {}
        self._lasts: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def took(self, sample_index: int, num_tokens: int, now_s: float) -> None:
        """These tokens went to the client for the first time; one that another leg repeats does not count
        again."""
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
        return sum(self._counts.values())

    def ttft_s(self, since_s: float) -> float | None:
        """From `since_s` to the first token; None without one."""
        return None if self.first_s is None else self.first_s - since_s

    @property
    def tpot_s(self) -> float | None:
        """The mean gap between a sample's tokens: (its last - its first) / (its tokens - 1), over all gaps of
        all samples. None where no sample has two tokens."""
        num_gaps = sum(count - 1 for count in self._counts.values())
        if not num_gaps:
            return None
        return sum(self._lasts[index] - self._firsts[index] for index in self._counts) / num_gaps
