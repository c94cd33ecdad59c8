"""One-line builders of plans."""

from typing import Any

from loadgen.plan.plan import AnswerOf, Exact, Generated, Plan, PlannedRequest, Segment, Text, Vocabulary
from loadgen.slo_target import SloTarget

VOCABULARY = Vocabulary(low=3, high=4096)


def segment(part: Any) -> Segment:
    """Return a segment: `(17, 512)` generated, a list exact tokens, a string text, an integer an earlier
    response."""
    if isinstance(part, tuple):
        return Generated(segment_id=part[0], num_tokens=part[1])
    if isinstance(part, list):
        return Exact(token_ids=tuple(part))
    return Text(text=part) if isinstance(part, str) else AnswerOf(index=part)


def request(index: int, *parts: Any, output: int = 8, **fields: Any) -> PlannedRequest:
    """Return a request due `index` seconds into the run, unless it follows another."""
    if "after" not in fields:
        fields.setdefault("at_s", float(index))
    return PlannedRequest(index=index, segments=tuple(segment(part) for part in parts), output_tokens=output, **fields)


def plan(*requests: PlannedRequest, vocabulary: Vocabulary = VOCABULARY, **fields: Any) -> Plan:
    fields.setdefault("slos", {"default": SloTarget()})
    return Plan(name="test", seed=fields.pop("seed", 0), vocabulary=vocabulary, requests=requests, **fields)


def chat_plan(**fields: Any) -> Plan:
    """Return a session of two turns with another request in between."""
    return plan(
        request(0, (0, 40), (1, 20), session="s", output=10),
        request(1, (0, 40), (2, 30)),
        request(2, (0, 40), (1, 20), 0, (3, 5), session="s", turn=1, after=0, think_s=2.5),
        **fields,
    )
