"""What `baton explain` shows: the decisions about one request, attempt by attempt."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.cli.formatting import seconds, size, table
from baton.core.cluster.decision_record import Candidate, DecisionRecord
from baton.core.cluster.placement import Placement, Rejection

PREDICTIONS = {
    "queue_s": "queue",
    "prefix_pull_s": "prefix pull",
    "prefill_s": "prefill",
    "transfer_s": "exposed KV",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
}
"""The fields of a `Placement` that are seconds, as they are shown."""

TERMS = {
    "cost_s": "cost",
    "queue_s": "queue",
    "prefix_pull_s": "prefix pull",
    "prefill_s": "prefill",
    "transfer_s": "exposed KV",
    "decode_delay_s": "delays decodes",
    "tpot_s": "TPOT",
    "kv_pull_s": "KV pull",
    "overlap_blocks": "blocks held",
    "pulled_blocks": "pulled",
    "peer_costs": "peer costs",
}
"""Terms of a candidate in the order and under the names in which they are shown; others follow by their own
names."""


def policy_rules() -> dict[str, str]:
    """What each policy goes by, in the words of its own documentation."""
    from baton.scheduler.policies import POLICIES

    return {name: " ".join((inspect.getdoc(policy) or "").split()) for name, policy in POLICIES.items()}


def render_decisions(records: Sequence[DecisionRecord], rules: Mapping[str, str]) -> RenderableType:
    """`records`: all of one request's, in order of their attempts. `rules`: `policy_rules()`."""
    parts: list[RenderableType] = [Text(f"request {records[0].request_id.hex()}", style="bold")]
    for record in records:
        parts += ["", *_attempt(record, rules)]
    return Group(*parts)


def _attempt(record: DecisionRecord, rules: Mapping[str, str]) -> Iterator[RenderableType]:
    yield Text.assemble((f"attempt {record.attempt + 1}: ", "bold"), _answer(record))
    rule = rules.get(record.policy, "")
    yield _facts(
        ("asked", _asked(record)),
        ("policy", f"{record.policy}, at {record.scheduler_id}" + (f": {rule}" if rule else "")),
    )
    if record.candidates:
        yield Padding(_candidates(record), (0, 0, 0, 2))
    facts: list[tuple[str, str]] = []
    if record.num_excluded:
        facts.append(("excluded", ", ".join(f"{number} {why}" for why, number in sorted(record.num_excluded.items()))))
    if record.placement is not None:
        if predicted := _predicted(record.placement):
            facts.append(("predicted", predicted))
        facts += _actual(record.actuals)
    if facts:
        yield _facts(*facts)


def _facts(*facts: tuple[str, str]) -> Padding:
    """Labels, and sentences that wrap beside them."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True, min_width=9)
    made.add_column()
    for label, text in facts:
        made.add_row(label, Text(text))
    return Padding.indent(made, 2)


def _answer(record: DecisionRecord) -> str:
    if record.rejection is not None:
        return _rejection(record.rejection)
    placement = record.placement
    if placement is None:
        return "no answer recorded"
    prefill, decode = placement.prefill, placement.decode
    if prefill is None and decode is None:
        return "placed nowhere"
    if decode is None and prefill is not None:
        return f"prefill {prefill.worker_id}, which makes the one token that is wanted"
    if prefill is None and decode is not None:
        return f"prefill and decode {decode.worker_id}, so no KV moves"
    assert prefill is not None
    assert decode is not None
    source = placement.prefix_source
    pulled = f", prefix of {source.num_blocks} blocks from {source.worker.worker_id}" if source is not None else ""
    return f"prefill {prefill.worker_id}, decode {decode.worker_id}{pulled}"


def _rejection(rejection: Rejection) -> str:
    numbers = ""
    if rejection.predicted_s is not None and rejection.limit_s is not None:
        numbers = (
            f" ({rejection.term or 'predicted'} {seconds(rejection.predicted_s)}, limit {seconds(rejection.limit_s)})"
        )
    return f"refused, {rejection.reason.value}: {rejection.message}{numbers}"


def _asked(record: DecisionRecord) -> str:
    query = record.query
    parts = [f"{query.num_prompt_tokens:,} tokens to prefill"]
    if query.num_output_tokens:
        parts.append(f"{query.num_output_tokens:,} of them made by an earlier attempt")
    parts.append(f"at most {query.max_tokens:,} to make")
    if query.sample_count > 1:
        parts.append(f"{query.sample_count} samples")
    if query.priority:
        parts.append(f"priority {query.priority}")
    limits = {"TTFT": query.slo.ttft_s, "TPOT": query.slo.tpot_s}
    parts += [f"{name} within {seconds(limit)}" for name, limit in limits.items() if limit is not None]
    if query.avoid:
        parts.append(f"not by {', '.join(w.worker_id for w in query.avoid)}, which failed it")
    return ", ".join(parts)


def _candidates(record: DecisionRecord) -> Table:
    """One row a candidate and side; the columns are the terms that the policy named, the chosen rows
    marked."""
    named = {term for candidate in record.candidates for term in candidate.terms}
    terms = [*(term for term in TERMS if term in named), *sorted(named - TERMS.keys())]
    made = table(
        "candidate", "for", *(f">{TERMS.get(term, term.removesuffix('_s').replace('_', ' '))}" for term in terms), ""
    )
    for candidate in record.candidates:
        values = (_term(term, candidate.terms.get(term)) for term in terms)
        made.add_row(candidate.worker.worker_id, candidate.side, *values, _mark(candidate, record.placement))
    return made


def _term(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if name.endswith("_s") else f"{value:,.10g}"


def _mark(candidate: Candidate, placement: Placement | None) -> str:
    if placement is None:
        return candidate.excluded
    chosen = placement.prefill if candidate.side == "prefill" else placement.decode
    is_chosen = chosen is not None and chosen.is_same_incarnation(candidate.worker)
    return "◀ chosen" if is_chosen else candidate.excluded


def _predicted(placement: Placement) -> str:
    values = {name: getattr(placement, field) for field, name in PREDICTIONS.items()}
    return ", ".join(f"{name} {seconds(value)}" for name, value in values.items() if value is not None)


def _actual(actuals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`actuals`: as in `RequestActuals`, perhaps written by another release: what is missing is not shown."""
    if not actuals:
        yield "actual", "not known: it still runs, or its gateway is gone"
        return
    times = {"TTFT": actuals.get("ttft_s"), "TPOT": actuals.get("tpot_s")}
    parts = [f"{name} {seconds(value)}" for name, value in times.items() if value is not None]
    parts.append(f"{int(actuals.get('num_output_tokens') or 0):,} tokens")
    if cached := int(actuals.get("num_cached_tokens") or 0):
        parts.append(f"{cached:,} tokens of the prompt from cache")
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
            f" ({seconds(number('kv_exposed_s'))} of it after the last chunk), waited {seconds(number('kv_wait_s'))} for it"
        )
    if number("decode_s"):
        parts.append(f"decoded for {seconds(number('decode_s'))}")
    return f"{leg.get('worker_id', '?')} (pid {number('pid'):.0f}): {', '.join(parts) or 'nothing'}"
