"""Measures how often drafts are right, for each sequence and for the whole worker."""

UNKNOWN_RATE = 0.5
"""Acceptance of a kind of drafts that was never seen."""
PRIOR_WEIGHT = 4.0
"""The rate of all sequences counts like this many drafts of a sequence of which little is known."""
SEQUENCE_MEMORY, WORKER_MEMORY = 24.0, 512.0
"""Drafts over which the rate of one sequence, and of the worker, is averaged."""
Kind = tuple[str, int]
"""Name of the drafter, and strength of the draft."""


class AcceptanceRate:
    """Exponential average over right and wrong draft tokens."""

    __slots__ = ("_kept", "_num_right", "_num_seen")

    def __init__(self, memory: float) -> None:
        self._kept = 1 - 1 / memory
        self._num_right = 0.0
        self._num_seen = 0.0

    def count(self, num_right: int, *, is_wrong: bool) -> None:
        """Count draft tokens that were right, one after the other, and then one that was wrong, if any."""
        kept = self._kept
        for _ in range(num_right):
            self._num_right = self._num_right * kept + 1
            self._num_seen = self._num_seen * kept + 1
        if is_wrong:
            self._num_right *= kept
            self._num_seen = self._num_seen * kept + 1

    def rate(self, prior: float) -> float:
        """Return the rate, 0 to 1. `prior`: what it is taken for while little was seen."""
        return (self._num_right + PRIOR_WEIGHT * prior) / (self._num_seen + PRIOR_WEIGHT)


class AcceptanceRates:
    """The rates of each kind of drafts, for one sequence or for the worker."""

    __slots__ = ("_memory", "_of_kind", "_prior")

    def __init__(self, memory: float, prior: "AcceptanceRates | None" = None) -> None:
        """prior: rates of the worker, which stand for those of a sequence until it has its own."""
        self._memory = memory
        self._prior = prior
        self._of_kind: dict[Kind, AcceptanceRate] = {}  # bounded: a few kinds

    def count(self, kind: Kind, num_right: int, *, is_wrong: bool) -> None:
        """Count the tokens of a draft once it is known what came in their place, even if no step verified
        them."""
        rate = self._of_kind.get(kind)
        if rate is None:
            rate = self._of_kind[kind] = AcceptanceRate(self._memory)
        rate.count(num_right, is_wrong=is_wrong)
        if self._prior is not None:
            self._prior.count(kind, num_right, is_wrong=is_wrong)

    def rate(self, kind: Kind) -> float:
        """Return how likely a draft token of this kind is right if all drafts before it are."""
        prior = UNKNOWN_RATE if self._prior is None else self._prior.rate(kind)
        rate = self._of_kind.get(kind)
        return prior if rate is None else rate.rate(prior)
