"""Checks the history of all requests of a run against the answers of an undisturbed run.

Every request must have exactly one end within its deadline: a complete answer, a cancel by its client, a
typed error, or a lost connection to a gateway that was down. A complete answer must equal the undisturbed one
in text, token ids, logprobs, finish reasons and usage. What a client got of any other answer must be a prefix
of the undisturbed one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.core.errors import Reason

NEVER_REASONS = frozenset(
    {"poison", "numerical_error", "invalid_request", "unsupported_field", "context_length_exceeded"}
)
"""Reasons of typed errors that no fault of a plan may cause."""
END_SLACK_S = 3.0
"""Time after its deadline within which a request must end.

The product's limit is one second. The rest is for a busy machine, whose stalls are measured and subtracted.
"""
BEGIN_S = 1.0
"""Time within which a gateway that runs has learned the deadline of a request."""
LOGPROB_TOLERANCE = 1e-4


class End(Enum):
    """How a request ended at its client.

    BROKEN: the connection ended before the answer. UNREACHABLE: there was no connection.
    """

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    ERROR = "error"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"


@dataclass(slots=True)
class ChoiceOutput:
    """Output of one choice as a client received it.

    logprobs: one entry per token, in the form of the API.
    finishes: finish reasons; a correct answer has one.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """An answer as a client received it.

    choices: by index.
    usage: (prompt tokens, completion tokens), None before it arrived.
    num_ends: how often the end of the answer was seen.
    after_end: number of events after the end.
    """

    choices: dict[int, ChoiceOutput] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    num_ends: int = 0
    after_end: int = 0

    def choice(self, index: int) -> ChoiceOutput:
        """Return the output of a choice, which may be added by this call."""
        if self.num_ends:
            self.after_end += 1
        return self.choices.setdefault(index, ChoiceOutput())


@dataclass(slots=True, kw_only=True)
class Record:
    """One request of a run.

    case: key of the undisturbed answer.
    way: how it was sent, for messages.
    begin_s, deadline_s, end_s: times of one clock; `end_s` is None while the request runs.
    ends: each end that was recorded; a correct history has one per request.
    reason, message: reason code and text of an error.
    """

    number: int
    case: str
    way: str
    gateway: str
    begin_s: float
    deadline_s: float
    end_s: float | None = None
    ends: list[End] = field(default_factory=list)
    reason: str = ""
    message: str = ""
    answer: Answer = field(default_factory=Answer)

    def end(self, how: End, now_s: float, *, reason: str = "", message: str = "") -> None:
        """Record the end of the request."""
        self.ends.append(how)
        self.end_s, self.reason, self.message = now_s, reason, message

    def __str__(self) -> str:
        return f"request {self.number} ({self.case}, {self.way}, {self.gateway}, begun at {self.begin_s:.1f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A time in which a process was down or paused."""

    name: str
    begin_s: float
    end_s: float

    def overlaps(self, begin_s: float, end_s: float) -> bool:
        """Return True if it shares a moment with another interval."""
        return self.begin_s < end_s and begin_s < self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A violation. kind: lost, doubled, wrong, truncated, late, unexplained, forbidden or leaked."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the cluster did meanwhile.

    down: times in which a gateway had no process.
    paused: times in which a gateway was stopped.
    stalls: times in which the client's event loop, or the whole machine, did not run.
    secrets: texts that no client may see, such as addresses of workers.
    """

    down: Sequence[Interval] = ()
    paused: Sequence[Interval] = ()
    stalls: Sequence[Interval] = ()
    secrets: frozenset[str] = frozenset()


def check_history(
    records: Iterable[Record], expected: Mapping[str, Answer], surroundings: Surroundings
) -> list[Problem]:
    """Return all violations. `expected`: the undisturbed answers by case."""
    problems: list[Problem] = []
    for record in records:
        problems += _check_end(record, surroundings)
        problems += _check_answer(record, expected[record.case])
        problems += [
            Problem(kind="leaked", text=f"{record}: the client saw {secret}: {record.message!r}")
            for secret in surroundings.secrets
            if secret in record.message
        ]
    return problems


def count_ends(records: Iterable[Record]) -> Counter[str]:
    """Return the number of requests by end, and of errors by reason."""
    return Counter(
        f"error {record.reason}" if end is End.ERROR else end.value for record in records for end in record.ends
    )


def _check_end(record: Record, surroundings: Surroundings) -> list[Problem]:
    if not record.ends or record.end_s is None:
        return [Problem(kind="lost", text=f"{record} has no end")]
    problems = []
    if len(record.ends) > 1:
        problems.append(Problem(kind="doubled", text=f"{record} ended {len(record.ends)} times: {record.ends}"))
    if (late_s := _late_s(record, record.end_s, surroundings)) > END_SLACK_S:
        problems.append(Problem(kind="late", text=f"{record} ended {late_s:.1f} s after its deadline"))
    how = record.ends[0]
    if how in (End.BROKEN, End.UNREACHABLE) and not _is_explained(record, how, surroundings):
        problems.append(
            Problem(kind="unexplained", text=f"{record}: {how.value} while its gateway was up: {record.message}")
        )
    if how is End.ERROR and (record.reason in NEVER_REASONS or not record.reason):
        problems.append(Problem(kind="forbidden", text=f"{record}: {record.reason or 'no reason'}: {record.message}"))
    return problems


def _late_s(record: Record, end_s: float, surroundings: Surroundings) -> float:
    """Return by how many seconds a request ended after its deadline, without what its gateway cannot change.

    A pause of its gateway, or a stall of the machine, at the begin of the request delays the moment at which
    the gateway learns the deadline. One after the deadline delays the end. One between them delays nothing.
    """
    begin_s, deadline_s = record.begin_s, record.deadline_s
    if end_s - deadline_s <= END_SLACK_S:
        return end_s - deadline_s  # nothing needs to be excused, and a run has many stalls
    stopped = [*surroundings.stalls, *(i for i in surroundings.paused if i.name == record.gateway)]
    excused = []
    for each in stopped:
        from_s = begin_s if each.overlaps(begin_s, begin_s + BEGIN_S) else deadline_s
        if each.overlaps(from_s, end_s):
            excused.append((max(from_s, each.begin_s), min(end_s, each.end_s)))
    return end_s - deadline_s - _union_s(excused)


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are in at least one of these times."""
    total_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def _is_explained(record: Record, how: End, surroundings: Surroundings) -> bool:
    """Return True if the gateway was down, or paused while a client could not connect to it.

    A paused process accepts no connection, so a gRPC client gives up its attempt. It breaks no open one.
    """
    assert record.end_s is not None
    causes = [*surroundings.down, *(surroundings.paused if how is End.UNREACHABLE else ())]
    return any(
        i.name == record.gateway and i.begin_s <= record.end_s + 1.0 and i.end_s >= record.begin_s - 1.0 for i in causes
    )


def _check_answer(record: Record, expected: Answer) -> list[Problem]:
    answer, is_complete = record.answer, End.COMPLETE in record.ends
    found: list[tuple[str, str]] = []
    if answer.num_ends > 1 or answer.after_end:
        found.append(("doubled", f"{answer.num_ends} ends, {answer.after_end} events after the first"))
    if answer.num_ends and End.ERROR in record.ends and not _ends_at_its_deadline(record):
        found.append(("doubled", f"an error after the end of the answer: {record.reason}"))
    if is_complete and answer.num_ends == 0:
        found.append(("truncated", "no end of the answer"))
    if is_complete and answer.usage != expected.usage:
        found.append(("wrong", f"usage {answer.usage}, expected {expected.usage}"))
    if is_complete and (missing := expected.choices.keys() - answer.choices.keys()):
        found.append(("truncated", f"choices {sorted(missing)} are missing"))
    for index, actual in sorted(answer.choices.items()):
        if index not in expected.choices:
            found.append(("wrong", f"choice {index} was not requested"))
            continue
        found += [
            (kind, f"choice {index}: {text}")
            for kind, text in compare_choice(actual, expected.choices[index], is_complete=is_complete)
        ]
    return [Problem(kind=kind, text=f"{record}: {text}") for kind, text in found]


def _ends_at_its_deadline(record: Record) -> bool:
    """True if gRPC may have ended the call at its deadline between the last message and the status."""
    return record.way.startswith("gRPC") and record.reason == Reason.DEADLINE.value


def compare_choice(actual: ChoiceOutput, expected: ChoiceOutput, *, is_complete: bool) -> list[tuple[str, str]]:
    """Return (kind, text) of each difference. Output that is not complete may be a prefix."""
    found: list[tuple[str, str]] = []
    if len(actual.finishes) > 1:
        found.append(("doubled", f"finish reasons {actual.finishes}"))
    has_ended = is_complete or bool(actual.finishes)
    if has_ended and actual.finishes[:1] != expected.finishes:
        kind = "truncated" if not actual.finishes else "wrong"
        found.append((kind, f"finish reasons {actual.finishes}, expected {expected.finishes}"))
    pairs: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
        ("token ids", actual.token_ids, expected.token_ids),
        ("text", actual.text, expected.text),
        ("logprobs", actual.logprobs, expected.logprobs),
    )
    for what, got, right in pairs:
        if (difference := _difference(got, right, is_whole=has_ended)) is not None:
            found.append((difference[0], f"{what}: {difference[1]}"))
    return found


def _difference(got: Sequence[Any], right: Sequence[Any], *, is_whole: bool) -> tuple[str, str] | None:
    """Return (kind, text) of the first difference, or None."""
    for position, (a, b) in enumerate(zip(got, right, strict=False)):
        if not _is_close(a, b):
            return _kind_of_excess(got, right, position), f"position {position} is {a!r}, expected {b!r}"
    if len(got) > len(right):
        return "doubled", f"{len(got)} items, expected {len(right)}; the next is {got[len(right)]!r}"
    if is_whole and len(got) < len(right):
        return "truncated", f"{len(got)} items, expected {len(right)}"
    return None


def _kind_of_excess(got: Sequence[Any], right: Sequence[Any], position: int) -> str:
    """Return `doubled` if leaving out a repeated run of items at `position` repairs the sequence."""
    for length in range(1, position + 1):
        if got[position : position + length] == got[position - length : position]:
            rest = got[position + length :]
            if rest == right[position : position + len(rest)]:
                return "doubled"
    return "wrong"


def _is_close(a: Any, b: Any) -> bool:
    """Return True if two entries are equal, numbers up to rounding."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= LOGPROB_TOLERANCE
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_close(a[key], b[key]) for key in a)
    return bool(a == b)
