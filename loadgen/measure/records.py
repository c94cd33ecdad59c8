"""The observations of each request, as the client saw it. Metrics are derived in `request_metrics`.

A result is a directory:

    plan.jsonl       the plan that was run
    run.json         server, machine, settings and validity of the run (`RunInfo`)
    records.jsonl    one line per request (`Record`), in the order in which they ended

All times are seconds from the start of the run by one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.slo_target import SloTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The tokens of one message: the number of its token ids, or 1 for a text message without ids."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Observations of one request.

    - `intended_s`: when it was due; for a later turn, the end of the earlier one plus the think time
    - `sent_s`: when its last byte was passed to the kernel; None if never
    - `status`: HTTP status, or gRPC status mapped to HTTP; None without a response
    - `reason`: the server's reason code of a rejection (`ttft_slo`, `queue_full`, …)
    - `is_complete`: the response ended properly (`[DONE]` or gRPC OK) after a finish reason
    - `left_early`: cancelled by the client before or after sending: by the plan, because an earlier turn
      failed, or by Ctrl-C
    - `timed_out`: the client timeout was reached
    - `num_prompt_tokens`, `num_cached_tokens`, `num_output_tokens`: usage reported by the server, or None
    - `token_ids`: the response's token ids, if the server returns them
    - `timeline`: Baton's timeline as a JSON object
    """

    index: int
    intended_s: float
    ended_s: float
    planned_prompt_tokens: int | None
    planned_output_tokens: int
    sent_s: float | None = None
    arrivals: tuple[Arrival, ...] = ()
    status: int | None = None
    reason: str = ""
    error: str = ""
    finish_reason: str = ""
    is_complete: bool = False
    left_early: bool = False
    timed_out: bool = False
    retry_after_s: float | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    request_id: str = ""
    endpoint: str = ""
    session: str = ""
    turn: int = 0
    tenant: str = ""
    priority: int = 0
    slo_class: str = "default"
    timeline: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts about a run.

    - `num_offered`: requests that were due; all of the plan unless the run ended early
    - `slos`, `ignore_eos`: rules for evaluating responses, by SLO class
    - `flags`: effective arguments; `label` is the system's name in reports
    - `machine`: facts about the client's host: cores, memory, load, versions
    - `server`: facts about the server; `workers` or `gpus` for goodput per worker, `kv_tokens` for the KV
      cache size
    - `invalid`: reasons why the run is invalid; empty if it is valid
    - `notes`: remarks that do not make it invalid
    - `interrupted`: ended early by the user or by a capacity search
    - `check`: result of repeating the requests (`loadgen.send.run.recheck`), or empty
    """

    plan_hash: str
    plan_name: str
    started_at: str
    duration_s: float
    url: str
    protocol: str
    model: str
    num_offered: int
    slos: Mapping[str, SloTarget] = field(default_factory=dict)
    ignore_eos: bool = True
    flags: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    invalid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    check: Mapping[str, Any] = field(default_factory=dict)
    warmup_requests: int = 0
    processes: int = 1
    version: str = ""
