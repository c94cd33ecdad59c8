"""The history checker reports each violation by its kind, and accepts a correct history."""

from copy import deepcopy

import pytest

from tests.nemesis.history import (
    END_SLACK_S,
    Answer,
    ChoiceOutput,
    End,
    Interval,
    Record,
    Surroundings,
    check_history,
    count_ends,
)

RIGHT = Answer(
    choices={
        0: ChoiceOutput(text="abcd", token_ids=[5, 6, 7, 8], logprobs=[-0.5, -0.25, -1.5, -2.0], finishes=["length"]),
        1: ChoiceOutput(text="xy", token_ids=[9, 10], logprobs=[-0.1, -0.2], finishes=["stop"]),
    },
    usage=(3, 6),
    num_ends=1,
)
EXPECTED = {"case 0": RIGHT}


def record_with(end: End | None = End.COMPLETE, answer: Answer = RIGHT, **more: object) -> Record:
    record = Record(number=1, case="case 0", way="SSE", gateway="gateway", begin_s=10.0, deadline_s=70.0)
    record.answer = deepcopy(answer)
    if end is not None:
        record.end(end, 12.0, **more)  # type: ignore[arg-type]
    return record


def kinds_of(record: Record, surroundings: Surroundings = Surroundings()) -> list[str]:  # noqa: B008
    return [problem.kind for problem in check_history([record], EXPECTED, surroundings)]


def begun() -> Answer:
    """The first part of the right answer."""
    return Answer(choices={0: ChoiceOutput(text="ab", token_ids=[5, 6], logprobs=[-0.5, -0.25])})


def test_correct_answer_is_accepted() -> None:
    assert kinds_of(record_with()) == []
    rounded = deepcopy(RIGHT)
    rounded.choices[0].logprobs[1] += 1e-6
    assert kinds_of(record_with(answer=rounded)) == []


def test_request_without_an_end_is_lost() -> None:
    assert kinds_of(record_with(None, begun())) == ["lost"]


def test_wrong_token_is_reported() -> None:
    wrong = deepcopy(RIGHT)
    wrong.choices[0].token_ids[2] = 4
    assert kinds_of(record_with(answer=wrong)) == ["wrong"]


def test_wrong_token_of_a_cancelled_request_is_reported() -> None:
    wrong = begun()
    wrong.choices[0].token_ids[1] = 4
    assert kinds_of(record_with(End.CANCELLED, wrong)) == ["wrong"]


@pytest.mark.parametrize(("name", "value"), [("logprobs", [-0.5, -0.3, -1.5, -2.0]), ("finishes", ["stop"])])
def test_wrong_logprob_or_finish_reason_is_reported(name: str, value: list[object]) -> None:
    wrong = deepcopy(RIGHT)
    setattr(wrong.choices[0], name, value)
    assert kinds_of(record_with(answer=wrong)) == ["wrong"]


def test_doubled_event_is_reported() -> None:
    doubled = deepcopy(RIGHT)
    doubled.choices[0].token_ids = [5, 6, 5, 6, 7, 8]
    assert kinds_of(record_with(answer=doubled)) == ["doubled"]
    doubled.choices[0].token_ids = [5, 6, 7, 8, 8]
    assert kinds_of(record_with(answer=doubled)) == ["doubled"]


def test_second_end_is_reported() -> None:
    twice = deepcopy(RIGHT)
    twice.num_ends = 2
    assert kinds_of(record_with(answer=twice)) == ["doubled"]
    ended_twice = record_with()
    ended_twice.end(End.COMPLETE, 13.0)
    assert kinds_of(ended_twice) == ["doubled"]
    late_event = deepcopy(RIGHT)
    late_event.choice(1)
    assert kinds_of(record_with(answer=late_event)) == ["doubled"]
    two_finishes = deepcopy(RIGHT)
    two_finishes.choices[1].finishes = ["stop", "stop"]
    assert kinds_of(record_with(answer=two_finishes)) == ["doubled"]


def test_error_after_the_end_of_an_answer_is_a_second_end() -> None:
    assert kinds_of(record_with(End.ERROR, RIGHT, reason="worker_lost")) == ["doubled"]
    assert kinds_of(record_with(End.ERROR, RIGHT, reason="deadline")) == ["doubled"]


def test_grpc_call_may_end_at_its_deadline_between_the_last_message_and_the_status() -> None:
    record = record_with(End.ERROR, RIGHT, reason="deadline")
    record.way = "gRPC"
    assert kinds_of(record) == []
    wrong = record_with(End.ERROR, RIGHT, reason="worker_lost")
    wrong.way = "gRPC"
    assert kinds_of(wrong) == ["doubled"]


def test_truncated_answer_is_reported() -> None:
    short = deepcopy(RIGHT)
    short.choices[0].token_ids.pop()
    assert kinds_of(record_with(answer=short)) == ["truncated"]
    without_end = deepcopy(RIGHT)
    without_end.num_ends = 0
    assert kinds_of(record_with(answer=without_end)) == ["truncated"]
    without_choice = deepcopy(RIGHT)
    del without_choice.choices[1]
    assert kinds_of(record_with(answer=without_choice)) == ["truncated"]


def test_other_usage_and_an_additional_choice_are_wrong() -> None:
    other = deepcopy(RIGHT)
    other.usage = (3, 7)
    assert kinds_of(record_with(answer=other)) == ["wrong"]
    more = deepcopy(RIGHT)
    more.choices[2] = ChoiceOutput()
    assert kinds_of(record_with(answer=more)) == ["wrong"]


@pytest.mark.parametrize("end", [End.CANCELLED, End.ERROR])
def test_prefix_of_the_right_answer_is_accepted_of_a_request_that_did_not_complete(end: End) -> None:
    assert kinds_of(record_with(end, begun(), reason="worker_lost")) == []


def test_choice_that_ended_is_compared_whole_even_if_the_request_did_not_complete() -> None:
    part = Answer(choices={1: ChoiceOutput(text="x", token_ids=[9], logprobs=[-0.1], finishes=["stop"])})
    assert set(kinds_of(record_with(End.CANCELLED, part))) == {"truncated"}


def late_by(seconds: float) -> Record:
    record = record_with(End.ERROR, Answer(), reason="deadline")
    record.end_s = record.deadline_s + seconds
    return record


def during(begin_s: float, end_s: float, name: str = "gateway") -> Interval:
    return Interval(name=name, begin_s=begin_s, end_s=end_s)


def test_end_a_few_seconds_after_the_deadline_is_late() -> None:
    assert END_SLACK_S <= 3.0
    assert kinds_of(late_by(1.0)) == []
    assert kinds_of(late_by(4.0)) == ["late"]


@pytest.mark.parametrize(
    ("begin_s", "end_s", "kinds"),
    [
        (9.0, 15.0, []),  # the gateway learns the deadline when it goes on
        (20.0, 35.0, ["late"]),  # over long before the deadline
        (65.0, 71.0, ["late"]),  # only a second of it is after the deadline
        (65.0, 73.0, []),
    ],
)
def test_pause_of_the_gateway_excuses_a_late_end_only_at_the_begin_and_after_the_deadline(
    begin_s: float, end_s: float, kinds: list[str]
) -> None:
    assert kinds_of(late_by(4.5), Surroundings(paused=[during(begin_s, end_s)])) == kinds
    assert kinds_of(late_by(4.5), Surroundings(paused=[during(begin_s, end_s, "gateway1")])) == ["late"]
    assert kinds_of(late_by(4.5), Surroundings(stalls=[during(begin_s, end_s, "machine")])) == kinds


def test_stall_during_a_pause_excuses_no_more_than_the_pause() -> None:
    both = Surroundings(paused=[during(70.0, 72.0)], stalls=[during(70.5, 71.5, "machine")])
    assert kinds_of(late_by(4.5), both) == []
    assert kinds_of(late_by(5.5), both) == ["late"]


@pytest.mark.parametrize("end", [End.BROKEN, End.UNREACHABLE])
def test_lost_connection_needs_a_gateway_that_was_down(end: End) -> None:
    record = record_with(end, Answer())
    assert kinds_of(record) == ["unexplained"]
    assert kinds_of(record, Surroundings(down=[Interval(name="gateway", begin_s=11.5, end_s=20.0)])) == []
    assert kinds_of(record, Surroundings(down=[Interval(name="gateway1", begin_s=11.5, end_s=20.0)])) == ["unexplained"]


def test_client_cannot_connect_to_a_paused_gateway_but_keeps_its_connections() -> None:
    paused = Surroundings(paused=[Interval(name="gateway", begin_s=11.5, end_s=20.0)])
    assert kinds_of(record_with(End.UNREACHABLE, Answer()), paused) == []
    assert kinds_of(record_with(End.BROKEN, Answer()), paused) == ["unexplained"]


@pytest.mark.parametrize("reason", ["poison", "invalid_request", ""])
def test_error_that_no_fault_may_cause_is_reported(reason: str) -> None:
    assert kinds_of(record_with(End.ERROR, Answer(), reason=reason)) == ["forbidden"]


def test_address_of_a_worker_in_an_error_text_is_reported() -> None:
    record = record_with(End.ERROR, Answer(), reason="worker_lost", message="lost 127.0.0.1:4711")
    assert kinds_of(record, Surroundings(secrets=frozenset({"127.0.0.1:4711"}))) == ["leaked"]


def test_ends_are_counted_by_reason() -> None:
    records = [record_with(), record_with(), record_with(End.ERROR, Answer(), reason="no_workers")]
    assert count_ends(records) == {"complete": 2, "error no_workers": 1}
