"""Limits and intervals of retries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """Limits and intervals of retries.

    max_attempts: failed attempts after which the request fails.
    pause_s: pause before the third attempt; doubles with each further one, up to `max_pause_s`.
    retry_placement_s: interval at which a running request asks again for a placement while it gets none.
    dead_worker_s: time during which a placement on an incarnation that died is not accepted.
    """

    max_attempts: int
    pause_s: float
    max_pause_s: float
    retry_placement_s: float
    dead_worker_s: float
