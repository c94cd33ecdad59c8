"""Renders the output of `baton explain`: the decisions about one request, attempt by attempt."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.cli.admin.explain_verdict import FINISHED, verdict
from baton.cli.formatting import seconds, size, table
from baton.core.cluster.decision_record import DecisionRecord, MissingPrefix, MissingReason
from baton.core.cluster.decision_terms import PREDICTIONS, TERMS, in_display_order, label_of
from baton.core.cluster.placement import Placement, Rejection


def policy_rules() -> dict[str, str]:
    """Return a description of each policy, the first paragraph of its docstring."""
    from baton.scheduler.policies import POLICIES

    return {
        name: " ".join((inspect.getdoc(policy) or "").partition("\n\n")[0].split()) for name, policy in POLICIES.items()
    }


def render_decisions(
    records: Sequence[DecisionRecord], rules: Mapping[str, str], *, is_verbose: bool = False
) -> RenderableType:
    """Render all decisions about one request, in order of attempts, after a verdict in one line.

    rules: the result of `policy_rules`; empty to leave the policies' descriptions out.
    is_verbose: show all terms, also those that are 0 for every candidate.
    """
    last = records[-1]
    is_failed = last.rejection is not None or last.actuals.get("outcome", FINISHED) != FINISHED
    parts: list[RenderableType] = [
        Text(verdict(records), style="bold red" if is_failed else "bold"),
        Text(f"request {records[0].request_id.hex()}"),
    ]
    for record in records:
        parts += ["", *_attempt(record, rules, is_verbose)]
    return Group(*parts)


def _attempt(record: DecisionRecord, rules: Mapping[str, str], is_verbose: bool) -> Iterator[RenderableType]:
    yield Text.assemble((f"attempt {record.attempt + 1}: ", "bold"), _result(record))
    rule = rules.get(record.policy, "")
    yield _facts(
        ("request", _query(record)),
        *_session(record),
        ("policy", f"{record.policy}, at {record.scheduler_id}" + (f": {rule}" if rule else "")),
    )
    if record.candidates:
        yield Padding(_candidates(record, is_verbose), (0, 0, 0, 2))
    facts: list[tuple[str, str]] = []
    if record.num_excluded:
        facts.append(("excluded", ", ".join(f"{number} {why}" for why, number in sorted(record.num_excluded.items()))))
    if record.missing is not None:
        facts.append(("computed", _missing(record.missing)))
    if record.placement is not None:
        if predicted := _predicted(record.placement):
            facts.append(("predicted", predicted))
        facts += _actual(record.actuals)
    if facts:
        yield _facts(*facts)


def _facts(*facts: tuple[str, str]) -> Padding:
    """Two columns: labels, and sentences that wrap."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column()
    for label, text in facts:
        grid.add_row(label, Text(text))
    return Padding.indent(grid, 2)


def _result(record: DecisionRecord) -> str:
    if record.rejection is not None:
        return _rejection(record.rejection)
    placement = record.placement
    if placement is None:
        return "no result recorded"
    prefill, decode = placement.prefill, placement.decode
    if prefill is None and decode is None:
        return "not placed"
    if decode is None and prefill is not None:
        return f"prefill {prefill.worker_id}, without decode because one token is requested{_pulled(placement)}"
    if prefill is None and decode is not None:
        return f"prefill and decode {decode.worker_id}, without KV transfer{_pulled(placement)}"
    assert prefill is not None
    assert decode is not None
    return f"prefill {prefill.worker_id}, decode {decode.worker_id}{_pulled(placement)}"


def _pulled(placement: Placement) -> str:
    """Say from where a prefix is pulled, if it is."""
    source = placement.prefix_source
    if source is None:
        return ""
    counts = {"in host memory": source.num_host_blocks, "on its disk": source.num_disk_blocks}
    tiers = ", ".join(f"{count} of them {where}" for where, count in counts.items() if count)
    return f", prefix of {source.num_blocks} blocks from {source.worker.worker_id}{f' ({tiers})' if tiers else ''}"


def _rejection(rejection: Rejection) -> str:
    numbers = ""
    if rejection.predicted_s is not None and rejection.limit_s is not None:
        numbers = (
            f" ({rejection.term or 'predicted'} {seconds(rejection.predicted_s)}, limit {seconds(rejection.limit_s)})"
        )
    return f"refused, {rejection.reason.value}: {rejection.message}{numbers}"


def _query(record: DecisionRecord) -> str:
    query = record.query
    parts = [f"{query.num_prompt_tokens:,} tokens to prefill"]
    if query.num_output_tokens:
        parts.append(f"{query.num_output_tokens:,} of them generated by an earlier attempt")
    parts.append(f"at most {query.max_tokens:,} to generate")
    if query.sample_count > 1:
        parts.append(f"{query.sample_count} samples")
    if query.priority:
        parts.append(f"priority {query.priority}")
    limits = {"TTFT": query.slo.ttft_s, "TPOT": query.slo.tpot_s}
    parts += [f"{name} within {seconds(limit)}" for name, limit in limits.items() if limit is not None]
    if query.avoid:
        parts.append(f"avoiding {', '.join(w.worker_id for w in query.avoid)} after a failure")
    return ", ".join(parts)


def _candidates(record: DecisionRecord, is_verbose: bool) -> Table:
    """Table with one row per candidate and side, and one column per term of the policy."""
    named = {
        term
        for candidate in record.candidates
        for term, value in candidate.terms.items()
        if is_verbose or value or term not in TERMS or not TERMS[term].is_detail
    }
    terms = in_display_order(named)
    result = table("candidate", "for", *(f">{label_of(term)}" for term in terms), "")
    for candidate in record.candidates:
        values = (_term(term, candidate.terms.get(term)) for term in terms)
        mark = "◀ chosen" if record.is_chosen(candidate) else candidate.excluded
        result.add_row(candidate.worker.worker_id, candidate.side, *values, mark)
    return result


def _term(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if name.endswith("_s") else f"{value:,.10g}"


def _session(record: DecisionRecord) -> Iterator[tuple[str, str]]:
    """Describe the request's place in its client's session, if it has one."""
    session = record.session
    if session is None:
        return
    text = f"{record.query.session_key}, turn {session.turn:,}"
    if session.gap_s is not None:
        text += f", {seconds(session.gap_s)} after the turn before"
    if session.median_gap_s is not None:
        text += f" (median {seconds(session.median_gap_s)})"
    if session.attained_s:
        text += f"; {seconds(session.attained_s)} computed for it so far"
    yield "session", text


def _missing(missing: MissingPrefix) -> str:
    """Say how many full blocks of the prompt are not reused, and why."""
    why = {
        MissingReason.HELD_ELSEWHERE: f"{missing.worker_id} holds {missing.known_blocks:,} of them, but pulling them "
        "was predicted to take longer than computing them",
        MissingReason.DEMOTED: f"{missing.worker_id} holds {missing.known_blocks:,} of them in a slower tier, from "
        "which they were predicted to come later",
        MissingReason.EVICTED: f"{missing.worker_id} evicted at least {missing.known_blocks:,} of them "
        f"{seconds(missing.ago_s or 0.0)} before",
        MissingReason.OTHER_TENANT: "equal first tokens are known of another tenant, whose cache is separate",
        MissingReason.OTHER_MODEL: "equal first tokens are known for another model",
        MissingReason.OTHER_SALT: "equal first tokens are known with another cache salt",
        MissingReason.NEVER_SEEN: "never seen, or forgotten",
    }
    return f"{missing.num_blocks:,} full blocks of the prompt: {why[missing.reason]}"


def _predicted(placement: Placement) -> str:
    values = {name: getattr(placement, field) for field, name in PREDICTIONS.items()}
    return ", ".join(f"{name} {seconds(value)}" for name, value in values.items() if value is not None)


def _actual(actuals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Describe `RequestActuals` as JSON, possibly of another release; missing fields are not shown."""
    if not actuals:
        yield "actual", "unknown: the request is still running, or its gateway is gone"
        return
    times = {"TTFT": actuals.get("ttft_s"), "TPOT": actuals.get("tpot_s")}
    parts = [f"{name} {seconds(value)}" for name, value in times.items() if value is not None]
    parts.append(f"{int(actuals.get('num_output_tokens') or 0):,} tokens")
    if cached := int(actuals.get("num_cached_tokens") or 0):
        parts.append(f"{cached:,} prompt tokens from cache")
    yield "actual", f"{', '.join(parts)}; ended: {actuals.get('outcome', 'unknown')}"
    for leg in actuals.get("legs") or ():
        yield "", _leg(leg)


def _leg(leg: Mapping[str, Any]) -> str:
    def number(name: str) -> float:
        return float(leg.get(name) or 0)

    parts = [f"waited {seconds(number('queue_s'))}"] if number("queue_s") else []
    if number("compute_s") or number("num_computed_tokens"):
        cached = f" ({number('num_cached_tokens'):,.0f} more from cache)" if number("num_cached_tokens") else ""
        parts.append(f"computed {number('num_computed_tokens'):,.0f} tokens in {seconds(number('compute_s'))}{cached}")
    if number("kv_bytes") or number("kv_wait_s"):
        over = f" over {leg['transport']}" if leg.get("transport") else ""
        parts.append(
            f"pulled {size(number('kv_bytes'))}{over} in {seconds(number('kv_transfer_s'))}"
            f" ({seconds(number('kv_exposed_s'))} of it after the last chunk), waited {seconds(number('kv_wait_s'))} "
            f"for it"
        )
    if number("decode_s"):
        drafts = number("num_draft_tokens")
        accepted = f" ({number('num_accepted_tokens'):,.0f} of {drafts:,.0f} draft tokens accepted)" if drafts else ""
        parts.append(f"decoded for {seconds(number('decode_s'))}{accepted}")
    if preemptions := number("num_preemptions"):
        recomputed = number("num_recomputed_tokens")
        parts.append(f"preempted {preemptions:,.0f} times, computed {recomputed:,.0f} tokens again")
    return f"{leg.get('worker_id', '?')} (pid {number('pid'):.0f}): {', '.join(parts) or 'nothing'}"
