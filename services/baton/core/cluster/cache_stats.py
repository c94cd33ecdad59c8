"""Prompt tokens that were reused from caches, and those that an infinite cache would have had."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReuse:
    """Prompt tokens of completed requests, and those of them that were reused instead of computed.

    worker_id: the worker that computed the rest of the prompts; empty for all workers together.
    cached_tokens: reused prompt tokens by cache tier. Those that were pulled from another worker are in
        `device`.
    """

    worker_id: str = ""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def num_cached_tokens(self) -> int:
        """Reused prompt tokens of all tiers."""
        return sum(self.cached_tokens.values())

    def __add__(self, other: "TokenReuse") -> "TokenReuse":
        """Return the use of both; the worker is that of `self`."""
        return TokenReuse(
            worker_id=self.worker_id,
            num_requests=self.num_requests + other.num_requests,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            cached_tokens=dict(Counter(self.cached_tokens) + Counter(other.cached_tokens)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Cache use of the requests that one scheduler has placed, or all schedulers of a cluster.

    since_s: seconds in which these requests were placed.
    total: of all requests. Has also requests of workers that are not in `workers` any more.
    ceiling_tokens: prompt tokens of the same requests that an infinite cache would have had. An estimate if
        `sampled_share` is below 1.
    sampled_share: share of the block hashes that the estimate is from.
    """

    since_s: float = 0.0
    total: TokenReuse = field(default_factory=TokenReuse)
    workers: tuple[TokenReuse, ...] = ()
    ceiling_tokens: float = 0.0
    sampled_share: float = 1.0

    @classmethod
    def merged(cls, parts: Sequence["CacheStats"]) -> "CacheStats":
        """Return the sum over schedulers.

        The ceiling is too low then: a scheduler does not know the prompts that another one has placed.
        """
        workers: dict[str, TokenReuse] = {}
        for use in (use for part in parts for use in part.workers):
            known = workers.get(use.worker_id)
            workers[use.worker_id] = use if known is None else known + use
        return cls(
            since_s=max((part.since_s for part in parts), default=0.0),
            total=sum((part.total for part in parts), TokenReuse()),
            workers=tuple(workers[worker_id] for worker_id in sorted(workers)),
            ceiling_tokens=sum(part.ceiling_tokens for part in parts),
            sampled_share=min((part.sampled_share for part in parts), default=1.0),
        )
