"""A server's own account of a request, read out of Baton's timeline object. Durations only, each from one
clock of the server's; what it does not say stays None, so that nothing is drawn or averaged as zero that was
not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Where a request's time went inside.

    `waiting_s`: at the scheduler, until a worker had room. `placement_s`: all else from receipt until workers
    were chosen. `queue_s`, `prefill_s`: waiting and computing at the worker of the prompt. `kv_wait_s`,
    `transfer_s`, `exposed_s`, `admission_s`: at the worker that went on: until the first block was ready,
    while a read ran, from the last block computed to the last one landed, from there to its first step.
    `first_decode_s`: that step. `decode_s`: from its first token to its last.

    `predicted_ttft_s`: from the placement of the last attempt on; `predicted_tpot_s`: as it was predicted
    there.
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
    """From the placement to the first token, as the server measured it; None after a lost attempt, where the
    two are of different ones."""
    placed_tpot_s: float | None = None
    """The mean gap as the server measured it; None after a lost attempt, whose end is a gap, too."""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_handed_off(self) -> bool:
        return bool(self.prefill_worker and self.decode_worker and self.prefill_worker != self.decode_worker)

    @property
    def wait_s(self) -> float | None:
        """For the worker that computed the prompt: at the scheduler and at the worker itself."""
        return None if self.queue_s is None else self.queue_s + (self.waiting_s or 0.0)

    @property
    def handoff_s(self) -> float | None:
        """What the hand-off cost the client: exposed transfer and admission; all between prefill's end and
        decode's first step."""
        parts = [part for part in (self.exposed_s, self.admission_s) if part is not None]
        return sum(parts) if parts else None

    @classmethod
    def of(cls, timeline: Mapping[str, Any] | None) -> Stages:
        """Of Baton's object `baton` (HTTP) or message `Timeline` (gRPC). Anything that is not understood is
        left out, never raised."""
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
            _whole(timeline, "attempts"),
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
            kv_bytes=_whole(pulled, "kv_bytes"),
            early_bytes=_whole(pulled, "kv_early_bytes"),
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
    """None for what is absent, and for what is no finite number of at least zero. JSON of a message writes
    large integers as texts."""
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
        {str(key): whole for key in value if (whole := _whole(value, key)) is not None}
        if isinstance(value, Mapping)
        else {}
    )


def _whole(data: Mapping[str, Any] | None, key: str) -> int | None:
    number = _number(data, key)
    return None if number is None else int(number)


def _text(data: Mapping[str, Any] | None, key: str) -> str:
    value = data.get(key) if data else None
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
