"""Reads a server's own timing of a request from Baton's timeline object.

It has durations only, each measured by one clock. Durations that the server does not report are None, so that
nothing unmeasured is shown or averaged as zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Durations of a request's stages inside the server, in seconds.

    - `waiting_s`: at the scheduler until a worker had capacity
    - `placement_s`: the rest of the time from receipt until workers were chosen
    - `queue_s`, `prefill_s`: queueing and computing at the prefill worker
    - `kv_wait_s`: at the decode worker, until the first KV block was ready
    - `transfer_s`: while a KV read was in progress
    - `exposed_s`: from the last block computed to the last block received
    - `admission_s`: from there to the first decode step
    - `first_decode_s`: the first decode step
    - `decode_s`: from the decode worker's first token to its last
    - `predicted_ttft_s`, `predicted_tpot_s`: predicted at the last placement, and counted from there
    """

    waiting_s: float | None = None
    placement_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    kv_wait_s: float | None = None
    transfer_s: float | None = None
    exposed_s: float | None = None
    admission_s: float | None = None
    first_decode_s: float | None = None
    decode_s: float | None = None
    kv_bytes: int | None = None
    early_bytes: int | None = None
    transport: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int | None = None
    policy: str = ""
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    placed_ttft_s: float | None = None
    """Measured from the placement to the first token. None after a retry, because the times are of different
    attempts."""
    placed_tpot_s: float | None = None
    """Mean gap between tokens measured by the server. None after a retry, because the recovery is also a gap.
    """
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_handed_off(self) -> bool:
        """True if prefill and decode ran on different workers."""
        return bool(self.prefill_worker and self.decode_worker and self.prefill_worker != self.decode_worker)

    @property
    def wait_s(self) -> float | None:
        """Wait for the prefill worker, at the scheduler and at the worker. None if unknown."""
        return None if self.queue_s is None else self.queue_s + (self.waiting_s or 0.0)

    @property
    def handoff_s(self) -> float | None:
        """Exposed transfer plus admission: the delay that the handoff added for the client."""
        parts = [part for part in (self.exposed_s, self.admission_s) if part is not None]
        return sum(parts) if parts else None

    @classmethod
    def of(cls, timeline: Mapping[str, Any] | None) -> Stages:
        """Return the stages of Baton's `baton` object (HTTP) or `Timeline` message (gRPC).

        Values that are not understood are left out; nothing is raised.
        """
        if not isinstance(timeline, Mapping):
            return cls()
        legs = [leg for leg in _list(timeline.get("legs")) if isinstance(leg, Mapping)]
        prefill = next((leg for leg in reversed(legs) if _number(leg, "num_computed_tokens")), None)
        decode = next(
            (leg for leg in reversed(legs) if any(_number(leg, key) for key in ("decode_s", "kv_wait_s", "kv_bytes"))),
            None,
        )
        pulled = decode if decode is not None and decode is not prefill and _number(decode, "kv_bytes") else None
        attempts, placed_s, waiting_s = (
            _integer(timeline, "attempts"),
            _number(timeline, "placed_s"),
            _number(timeline, "waiting_s"),
        )
        ttft_s, is_one = _number(timeline, "ttft_s"), attempts == 1
        return cls(
            waiting_s=waiting_s,
            placement_s=max(0.0, placed_s - (waiting_s or 0.0)) if placed_s is not None and is_one else placed_s,
            queue_s=_number(prefill, "queue_s"),
            prefill_s=_number(prefill, "compute_s"),
            kv_wait_s=_number(pulled, "kv_wait_s"),
            transfer_s=_number(pulled, "kv_transfer_s"),
            exposed_s=_number(pulled, "kv_exposed_s"),
            admission_s=_number(pulled, "kv_admission_s"),
            first_decode_s=_number(decode, "first_decode_s"),
            decode_s=_number(decode, "decode_s"),
            kv_bytes=_integer(pulled, "kv_bytes"),
            early_bytes=_integer(pulled, "kv_early_bytes"),
            transport=_text(pulled, "transport"),
            prefill_worker=_text(prefill, "worker_id"),
            decode_worker=_text(decode, "worker_id"),
            attempts=attempts,
            policy=_text(timeline, "policy"),
            predicted_ttft_s=_number(timeline, "predicted_ttft_s"),
            predicted_tpot_s=_number(timeline, "predicted_tpot_s"),
            placed_ttft_s=ttft_s - placed_s
            if is_one and ttft_s is not None and placed_s is not None and ttft_s > placed_s
            else None,
            placed_tpot_s=_number(timeline, "tpot_s") if is_one else None,
            cached_by_tier=_counts(timeline.get("cached_tokens_by_tier")),
        )


def _number(data: Mapping[str, Any] | None, key: str) -> float | None:
    """Return a finite number of at least zero, or None. Protobuf's JSON writes large integers as strings."""
    value = data.get(key) if data else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _counts(value: Any) -> dict[str, int]:
    return (
        {str(key): number for key in value if (number := _integer(value, key)) is not None}
        if isinstance(value, Mapping)
        else {}
    )


def _integer(data: Mapping[str, Any] | None, key: str) -> int | None:
    number = _number(data, key)
    return None if number is None else int(number)


def _text(data: Mapping[str, Any] | None, key: str) -> str:
    value = data.get(key) if data else None
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
