"""Synthetic runs of one prefill and two decode workers near their limit. Nothing is measured."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadgen.measure.records import Arrival, Record, RunInfo
from loadgen.measure.records_file import RECORDS, RecordWriter, read_records, write_run
from loadgen.measure.request_metrics import OutcomeRules, invalid_reasons
from loadgen.plan.plan import Generated, Plan, PlannedRequest, Vocabulary
from loadgen.plan.plan_file import write_plan
from loadgen.slo_target import SloTarget

SLOS = {"interactive": SloTarget.parse("ttft=500ms,tpot=50ms"), "batch": SloTarget.parse("ttft=4s,tpot=120ms")}
KV_BYTES_PER_TOKEN = 24_576


def make_plan(rate: float, seconds: float, seed: int = 1) -> Plan:
    """Return a plan with Poisson arrivals, eight system prompts of different popularity, and three
    tenants."""
    rng = random.Random(seed)
    requests: list[PlannedRequest] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        group = min(int(rng.paretovariate(0.9)) - 1, 7)
        is_batch = rng.random() < 0.2
        requests.append(
            PlannedRequest(
                index=len(requests),
                segments=(
                    Generated(segment_id=group, num_tokens=512),
                    Generated(
                        segment_id=100 + len(requests), num_tokens=max(16, min(3000, int(rng.lognormvariate(5.6, 0.9))))
                    ),
                ),
                output_tokens=max(1, min(400, int(rng.lognormvariate(4.0, 0.7)))),
                at_s=round(at_s, 6),
                tenant=rng.choice(["acme", "acme", "globex", "initech"]),
                slo_class="batch" if is_batch else "interactive",
                priority=1 if is_batch else 0,
                cancel_after_tokens=5 if rng.random() < 0.01 else None,
            )
        )
        at_s += rng.expovariate(rate)
    return Plan(
        name="chat-like", seed=seed, vocabulary=Vocabulary(low=10, high=5000), requests=tuple(requests), slos=SLOS
    )


def records_of(
    plan: Plan, *, speed: float = 1.0, seed: int = 1, lag_s: float = 0.0002, sheds: bool = True, timeline: bool = True
) -> list[Record]:
    """Return the records of that plan.

    `speed` is that of the workers, `lag_s` the mean send lag; `sheds` rejects requests that would be late.
    """
    rng = random.Random(seed)
    free_s, running, seen, records = 0.0, [[], []], set[int](), list[Record]()
    for request in plan.requests:
        assert request.at_s is not None
        intended = request.at_s
        sent = intended + rng.expovariate(1 / lag_s)
        prompt = sum(segment.num_tokens for segment in request.segments if isinstance(segment, Generated))
        head = request.segments[0]
        assert isinstance(head, Generated)
        cached = head.num_tokens if head.segment_id in seen and rng.random() < 0.93 else 0
        base: dict[str, Any] = {
            "index": request.index,
            "intended_s": intended,
            "planned_prompt_tokens": prompt,
            "planned_output_tokens": request.output_tokens,
            "tenant": request.tenant,
            "slo_class": request.slo_class,
            "priority": request.priority,
            "request_id": f"{rng.getrandbits(64):016x}",
            "endpoint": "http://127.0.0.1:8000",
        }
        placed = 0.0012 + rng.expovariate(1 / 0.0006)
        prefill_s = (0.006 + (prompt - cached) * 0.00021) / speed * rng.lognormvariate(0, 0.05)
        queue_s = max(0.0, free_s - sent - placed)
        slo = plan.slos[request.slo_class]
        if sheds and slo.ttft_s is not None and queue_s + prefill_s > slo.ttft_s:
            ended = sent + placed + 0.002
            records.append(
                Record(
                    **base, sent_s=sent, ended_s=ended, status=429, reason="ttft_slo", retry_after_s=round(queue_s, 3)
                )
            )
            continue
        seen.add(head.segment_id)
        free_s = sent + placed + queue_s + prefill_s
        first = free_s + 0.0015 + rng.expovariate(1 / 0.001)
        worker = min((0, 1), key=lambda side: len(running[side]))
        while running[worker] and running[worker][0] < first:
            heapq.heappop(running[worker])
        exposed = 0.0008 + (prompt - cached) * KV_BYTES_PER_TOKEN / 4e9 * 0.2 + rng.expovariate(1 / 0.0006)
        admission = rng.uniform(0.0, 0.02) / speed
        step = (0.011 + 0.0016 * len(running[worker])) / speed
        times, now = [first], first + exposed + admission
        for _ in range(request.output_tokens - 1):
            now += step * rng.lognormvariate(0, 0.12) + (0.05 if rng.random() < 0.004 else 0.0)
            times.append(now)
        heapq.heappush(running[worker], times[-1])
        legs = [
            {"worker_id": "prefill-0", "pid": 41, "queue_s": queue_s, "compute_s": prefill_s,
             "num_computed_tokens": prompt - cached,
             "num_cached_tokens": cached},
            {"worker_id": f"decode-{worker}", "pid": 42 + worker, "kv_wait_s": queue_s + prefill_s * 0.3,
             "kv_transfer_s": exposed * 3,
             "kv_exposed_s": exposed, "kv_bytes": (prompt - cached) * KV_BYTES_PER_TOKEN, "transport": "nixl",
             "kv_admission_s": admission,
             "kv_early_bytes": int((prompt - cached) * KV_BYTES_PER_TOKEN * 0.7), "decode_s": times[-1] - first,
             **({"first_decode_s": min(step, times[1] - first - exposed - admission)} if len(times) > 1 else {})},
        ]  # fmt: skip
        whole: dict[str, Any] = {
            "num_prompt_tokens": prompt,
            "num_cached_tokens": cached,
            "num_output_tokens": len(times),
            "finish_reason": "length",
            "is_complete": True,
            "status": 200,
            "timeline": {
                "request_id": base["request_id"],
                "attempts": 1,
                "cached_tokens_by_tier": {"device": cached},
                "policy": "kv_centric",
                "placed_s": placed,
                "waiting_s": placed / 2,
                "ttft_s": first - sent,
                "predicted_ttft_s": 1.1 * (first - sent - placed),
                **(
                    {"tpot_s": (times[-1] - first) / (len(times) - 1), "predicted_tpot_s": step}
                    if len(times) > 1
                    else {}
                ),
                "legs": legs,
            }
            if timeline
            else None,
        }
        chance = rng.random()
        if request.cancel_after_tokens is not None and len(times) > request.cancel_after_tokens:
            times = times[: request.cancel_after_tokens]
            whole = {"status": 200, "left_early": True}
        elif chance < 0.004:
            times = times[: len(times) // 2]
            whole = {"status": 200, "error": "the connection was reset in mid-answer"}
        elif chance < 0.007:
            times = times[: max(1, len(times) // 3)]
            whole = {"status": 200}
        elif chance < 0.009:
            times, whole = [], {"timed_out": True, "error": "no token within 10 s"}
        arrivals = [Arrival(at_s=at_s, num_tokens=1) for at_s in times]
        ended = (times[-1] + 0.0005) if times else intended + 10
        records.append(Record(**base, **whole, sent_s=sent, ended_s=ended, arrivals=tuple(arrivals)))
    return records


def warm(directory: Path) -> Path:
    """Change a result as if the server had cached every prompt before the run."""
    file = directory / RECORDS
    records, _ = read_records(file)
    file.unlink()
    with RecordWriter(file) as writer:
        for one in records:
            hit = None if one.num_prompt_tokens is None else one.num_prompt_tokens - 1
            writer.write(replace(one, num_cached_tokens=hit))
    return directory


def write_result(
    directory: Path, *, rate: float = 6.0, seconds: float = 60.0, seed: int = 1, label: str = "", **changes: Any
) -> Path:
    """Write a result directory like `loadgen run` does."""
    directory.mkdir(parents=True)
    plan = make_plan(rate, seconds, seed)
    plan_hash = write_plan(plan, directory / "plan.jsonl")
    records = records_of(plan, seed=seed, **changes)
    with RecordWriter(directory / "records.jsonl") as writer:
        for record in sorted(records, key=lambda record: record.ended_s):
            writer.write(record)
    rules = OutcomeRules(slos=plan.slos, ignore_eos=plan.ignore_eos)
    write_run(
        directory,
        RunInfo(
            plan_hash=plan_hash,
            plan_name=plan.name,
            started_at="2025-11-21T12:00:00Z",
            duration_s=max(record.ended_s for record in records),
            url="http://127.0.0.1:8000",
            protocol="http",
            model="demo",
            num_offered=len(records),
            slos=plan.slos,
            flags={"rate": rate, "seconds": seconds, "timeout_s": 10, **({"label": label} if label else {})},
            machine={"cpu": "2 cores", "memory_gib": 8, "load_before": 0.4, "python": "3.11.7", "os": "Linux 6.1"},
            server={"workers": 3, "kv_tokens": 60_000},
            invalid=invalid_reasons(records, rules, len(records)),
            warmup_requests=8,
            version="0.1.0",
        ),
    )
    return directory
