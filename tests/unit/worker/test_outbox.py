"""Tests of the outbox: which messages it keeps, and its limit in bytes."""

import pytest

from baton.core.ids import JobId
from baton.core.messages.jobs import Heartbeat, Step
from baton.core.request import TokenDelta, TokenLogprobs
from baton.worker.sessions.outbox import Outbox, OutboxFull, message_bytes


def beat(seq: int) -> Heartbeat:
    return Heartbeat(seq=seq, steps_done=0, step_age_s=0.0, draining=False)


def step(seq: int, *token_ids: int, logprobs: int = 0) -> Step:
    job = JobId(request_id=b"r", attempt=0)
    given = tuple(TokenLogprobs(logprob=-1.0, top=((1, -1.0),) * logprobs) for _ in token_ids) if logprobs else ()
    return Step(
        seq=seq, deltas=(TokenDelta(job=job, sample_index=0, output_index=0, token_ids=token_ids, logprobs=given),)
    )


def test_acknowledged_messages_are_dropped_and_the_rest_stays_in_order() -> None:
    outbox = Outbox(10_000)
    for seq in range(1, 6):
        outbox.append(step(seq, seq))
    outbox.acknowledge(2)
    outbox.acknowledge(1)
    assert (outbox.oldest_seq, outbox.next_seq) == (3, 6)
    assert [m.seq for m in outbox.after(3)] == [4, 5]


def test_acknowledging_all_messages_empties_the_outbox() -> None:
    outbox = Outbox(10_000)
    outbox.append(step(1, 7))
    outbox.acknowledge(99)
    assert (len(outbox), outbox.num_bytes, outbox.oldest_seq, outbox.next_seq) == (0, 0, 2, 2)


def test_message_out_of_order_is_refused() -> None:
    outbox = Outbox(10_000)
    with pytest.raises(ValueError, match="does not follow"):
        outbox.append(beat(2))


def test_outbox_limit_is_in_bytes_including_logprobs() -> None:
    outbox = Outbox(2_000)
    outbox.append(step(1, 1))
    with pytest.raises(OutboxFull):
        outbox.append(step(2, *range(50), logprobs=20))
    assert len(outbox) == 1
    assert message_bytes(step(1, *range(50), logprobs=20)) > 20 * message_bytes(step(1, *range(2)))


@pytest.mark.parametrize(("last_seq", "resumes"), [(1, False), (2, True), (3, True), (5, True), (6, False)])
def test_resume_requires_that_no_message_is_missing(last_seq: int, resumes: bool) -> None:
    outbox = Outbox(10_000)
    for seq in range(1, 6):
        outbox.append(beat(seq))
    outbox.acknowledge(2)
    assert outbox.can_resume(last_seq) is resumes
