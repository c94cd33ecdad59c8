"""One-line builders of test inputs. Every argument has a valid default."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from loadgen.measure.records import Arrival, Record, RunInfo
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.slo_target import SloTarget


def record(index: int = 0, tokens: Sequence[float | tuple[float, int]] = (1.5, 1.6, 1.8), **changes: Any) -> Record:
    """A complete response, due at 1 s and sent at 1.1 s.

    `tokens` has the time of each message with one token, or (time, number of tokens).
    """
    arrivals = tuple(
        Arrival(at_s=at[0], num_tokens=at[1]) if isinstance(at, tuple) else Arrival(at_s=at, num_tokens=1)
        for at in tokens
    )
    total = sum(arrival.num_tokens for arrival in arrivals)
    fields: dict[str, Any] = {
        "index": index,
        "intended_s": 1.0,
        "sent_s": 1.1,
        "ended_s": arrivals[-1].at_s if arrivals else 2.0,
        "planned_prompt_tokens": 10,
        "planned_output_tokens": total,
        "arrivals": arrivals,
        "status": 200,
        "finish_reason": "length",
        "is_complete": True,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 0,
        "num_output_tokens": total,
    }
    return Record(**(fields | changes))


def refused(index: int = 0, after_s: float = 0.1, **changes: Any) -> Record:
    """A rejection with status 429 and a reason, `after_s` after it was due."""
    fields: dict[str, Any] = {
        "tokens": (),
        "ended_s": 1.0 + after_s,
        "planned_output_tokens": 3,
        "status": 429,
        "reason": "ttft_slo",
        "is_complete": False,
        "finish_reason": "",
        "num_prompt_tokens": None,
        "num_cached_tokens": None,
        "num_output_tokens": None,
    }
    return record(index, **(fields | changes))


def rules(slo: str = "ttft=600ms,tpot=200ms", **changes: Any) -> OutcomeRules:
    return OutcomeRules(slos={"default": SloTarget.parse(slo)}, **changes)


def run(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "plan_hash": "5e" * 32,
        "plan_name": "chat",
        "started_at": "2025-11-21T12:00:00Z",
        "duration_s": 10.0,
        "url": "http://127.0.0.1:8000",
        "protocol": "http",
        "model": "demo",
        "num_offered": 1,
        "slos": {"default": SloTarget.parse("ttft=600ms,tpot=200ms")},
    }
    return RunInfo(**(fields | changes))


SECONDS = st.floats(0, 1e4)
any_record = st.builds(
    Record,
    index=st.integers(0, 9),
    intended_s=SECONDS,
    ended_s=SECONDS,
    planned_prompt_tokens=st.none() | st.integers(0, 9),
    planned_output_tokens=st.integers(0, 9),
    sent_s=st.none() | SECONDS,
    arrivals=st.lists(st.builds(Arrival, at_s=SECONDS, num_tokens=st.integers(0, 3)), max_size=4).map(
        lambda arrivals: tuple(sorted(arrivals, key=lambda arrival: arrival.at_s))
    ),
    status=st.sampled_from([None, 200, 400, 429, 500, 503, 504]),
    reason=st.sampled_from(["", "queue_full"]),
    error=st.sampled_from(["", "reset"]),
    finish_reason=st.sampled_from(["", "stop", "length"]),
    is_complete=st.booleans(),
    left_early=st.booleans(),
    timed_out=st.booleans(),
    num_output_tokens=st.none() | st.integers(0, 9),
)
any_terms = st.builds(
    OutcomeRules,
    slos=st.fixed_dictionaries(
        {
            "default": st.builds(
                SloTarget, ttft_s=st.none() | SECONDS, tpot_s=st.none() | SECONDS, e2e_s=st.none() | SECONDS
            )
        }
    ),
    ignore_eos=st.booleans(),
)
