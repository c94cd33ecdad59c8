"""What happened to each request of a run, as the client saw it; nothing is derived here (that is
`loadgen.measure.request_metrics`).

A result is a directory:

    plan.jsonl       the plan that was run
    run.json         what it was run against, with what, and whether the run is valid (`RunInfo`)
    records.jsonl    one line a request (`Record`), in the order in which they ended

All times are seconds from the start of the run by one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.slo_target import SloTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Tokens that one message brought. `num_tokens` is what the message says (token ids), or 1 for a text
    message without them."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request.

    `intended_s`: when it was due (for a later turn: the earlier one's end + think time). `sent_s`: when its
    last byte was handed to the kernel, None if it never was. `status`: HTTP's code, or gRPC's mapped to it,
    None if none came. `reason`: the server's own word for a refusal (`ttft_slo`, `queue_full`, …).
    `is_complete`: the answer's proper end was seen (`[DONE]`, gRPC OK) after a finish reason. `left_early`:
    it was the client that gave it up, before or after sending: the plan's own cancel, an earlier turn that
    was not whole, the user's Ctrl-C. `timed_out`: the client's own time limit. `num_prompt_tokens`,
    `num_cached_tokens`, `num_output_tokens`: the server's usage, None where it said nothing. `token_ids`: the
    answer, where the server gives ids. `timeline`: Baton's, as its JSON object.
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
    """What was run.

    `flags`: the effective arguments; `label` among them is what a report calls the system. `machine`: host
    facts (cores, memory, load, versions). `server`: what is known of the other side; `workers` or `gpus`: how
    many of them share the goodput, `kv_tokens`: how many tokens its caches hold together. `slos`,
    `ignore_eos`: what the answers are held against, by class (`{}`: as the plan says). `invalid`: why the run
    must not be trusted, in words; empty if it may. `notes`: what befell it beside that. `interrupted`: ended
    early, by the user or by a search that had seen enough; then `num_offered` counts what had come due by
    then. `check`: what asking again, undisturbed, has shown (`loadgen.send.run.recheck`); empty if that was not
    done.
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
