"""A request that kills workers is stopped, and other requests on the same workers are resumed."""

import asyncio

import pytest

from baton.core.errors import Code, Reason, Refused
from baton.core.ids import JobId
from baton.gateway.request.failures.poison_detector import PoisonDetector
from tests import builders
from tests.unit.gateway.fakes import Cluster, StubWorker, answer_to, cluster, placement
from tests.unit.gateway.virtual import virtual

POISON = b"poison"
OTHERS = [f"other {i}" for i in range(6)]


def prompt_of(worker: StubWorker, job: JobId) -> bytes:
    found = next(each for each in worker.jobs if each.job == job)
    return bytes(list(found.token_ids[: found.num_prompt_tokens]))


def killed_by(prompt: bytes, *, from_index: int = 0):
    """Return a hook: a request with this prompt kills any worker at its token `from_index` or a later one."""

    def hook(worker: StubWorker, job: JobId, _sample: int, index: int) -> None:
        if index >= from_index and prompt_of(worker, job) == prompt:
            worker.die()

    return hook


def dies_at(index: int):
    """Return a hook: the worker dies when it is about to send this token."""

    def hook(worker: StubWorker, _job: JobId, _sample: int, at: int) -> None:
        if at == index:
            worker.die()

    return hook


def num_dead(c: Cluster) -> int:
    return sum(worker.is_dead for worker in c.scheduler.workers)


async def ask_all(c: Cluster, num_tokens: int = 8) -> list[object]:
    """Send the poison request and all others concurrently, and check the others' responses.

    Returns the result of the poison request, then those of the others.
    """
    prompts = [POISON.decode(), *OTHERS]
    answers = await asyncio.gather(
        *(c.complete(prompt, max_tokens=num_tokens) for prompt in prompts), return_exceptions=True
    )
    for prompt, response in zip(OTHERS, answers[1:], strict=True):
        assert not isinstance(response, BaseException), (prompt, response)
        assert response.texts[0].encode() == answer_to(prompt.encode(), num_tokens)
    return answers


def assert_poison(response: object) -> None:
    assert isinstance(response, Refused)
    assert (response.failure.code, response.failure.reason, response.failure.retriable) == (
        Code.INTERNAL,
        Reason.POISON,
        False,
    )


@virtual
async def test_request_with_progress_survives_any_number_of_worker_deaths() -> None:
    async with cluster(*((f"h{i}", "hybrid") for i in range(5))) as c:
        for worker, index in zip(c.scheduler.workers, (2, 6, 9, 30), strict=False):
            worker.before_token = dies_at(index)
        response = await c.complete("hello", max_tokens=40)
        assert response.texts[0].encode() == answer_to(b"hello", 40)
        assert num_dead(c) == 4


@virtual
async def test_first_token_from_prefill_is_not_progress_on_the_decode_worker() -> None:
    """Each attempt delivers one more token, but from the prefill worker, not from a decode worker."""
    async with cluster(("p0", "prefill"), *((f"d{i}", "decode") for i in range(4))) as c:
        for worker in c.scheduler.workers[1:]:
            worker.before_token = lambda worker, job, sample, index: (
                worker.die() if index > worker.first_index(job) else None
            )
        with pytest.raises(Refused) as refused:
            await c.complete("hello", max_tokens=12)
        assert_poison(refused.value)
        assert num_dead(c) == 3


@pytest.mark.fault("F-10")
@virtual
async def test_requests_on_one_dead_worker_are_resumed() -> None:
    """F-10: the poison request fails after a third death, while it runs alone, and the others are resumed."""
    async with cluster(*((f"h{i}", "hybrid") for i in range(5))) as c:
        h0, h1 = c.scheduler.workers[:2]
        for worker in c.scheduler.workers:
            worker.before_token = killed_by(POISON)

        def place(query):
            """Place the poison request on h0 first, and the others on h1."""
            is_poison = query.num_prompt_tokens == len(POISON)
            return placement(None, (h0 if is_poison else h1).ref) if query.attempt == 0 else None

        c.scheduler.answer = place
        assert_poison((await ask_all(c))[0])
        assert num_dead(c) == 3


@pytest.mark.fault("F-10")
@pytest.mark.parametrize("from_index", [0, 3])
@virtual
async def test_requests_on_the_same_dead_workers_are_run_one_at_a_time(from_index: int) -> None:
    async with cluster(*((f"h{i}", "hybrid") for i in range(6))) as c:
        for worker in c.scheduler.workers:
            worker.before_token = killed_by(POISON, from_index=from_index)
        assert_poison((await ask_all(c))[0])
        assert num_dead(c) == 3


@pytest.mark.fault("F-10")
@virtual
async def test_exclusive_run_waits_for_a_suspect_that_shares_its_worker() -> None:
    """Another request is suspected after one death only, and is on the worker of the run alone."""
    async with cluster(*((f"h{i}", "hybrid") for i in range(4))) as c:
        for worker in c.scheduler.workers:
            worker.before_token = killed_by(POISON)
            worker.step_s = 1.0  # longer than the pause before the run alone
        h0, h1, h2, h3 = c.scheduler.workers
        other_prompt = "another request"

        def place(query):
            """Place the poison request on h0, then both requests on h1, then both on the first that lives."""
            is_other = query.num_prompt_tokens >= len(other_prompt)
            first = [h1] if is_other else [h0, h1]
            living = next(worker for worker in (h2, h3) if not worker.is_dead)
            return placement(None, (first[query.attempt] if query.attempt < len(first) else living).ref)

        c.scheduler.answer = place
        poison, other = await asyncio.gather(
            c.complete(POISON.decode()), c.complete(other_prompt), return_exceptions=True
        )
        assert_poison(poison)
        assert not isinstance(other, BaseException), other
        assert other.texts[0].encode() == answer_to(other_prompt.encode(), 8)
        assert num_dead(c) == 3


@virtual
async def test_suspect_asks_for_no_placement_while_another_request_runs_alone() -> None:
    """The scheduler would reserve blocks for a placement that is given back at once."""
    async with cluster(*((f"h{i}", "hybrid") for i in range(5))) as c:
        h0, *poisoned, h4 = c.scheduler.workers
        for worker in poisoned:
            worker.before_token = killed_by(POISON)
        h0.before_token = dies_at(0)
        h0.prefill_s, poisoned[-1].prefill_s = 5.0, 20.0  # h0 dies while the poison request runs alone

        def place(query):
            is_poison = query.num_prompt_tokens == len(POISON)
            return placement(None, (poisoned if is_poison else [h0, h4])[query.attempt].ref)

        c.scheduler.answer = place
        poison, other = await asyncio.gather(c.complete(POISON.decode()), c.complete("another"), return_exceptions=True)
        assert_poison(poison)
        assert other.texts[0].encode() == answer_to(b"another", 8)
        assert len(c.scheduler.queries) == 3 + 2


@virtual
async def test_samples_of_one_request_count_as_one_suspect() -> None:
    async with cluster(*((f"h{i}", "hybrid") for i in range(6))) as c:
        for worker in c.scheduler.workers:
            worker.before_token = killed_by(POISON, from_index=3)
        with pytest.raises(Refused) as refused:
            await c.complete(POISON.decode(), n=4)
        assert_poison(refused.value)
        assert num_dead(c) == 3


@virtual
async def test_two_workers_that_die_together_are_not_charged_to_their_requests() -> None:
    """The second attempt is placed on a worker whose death neither the scheduler nor the gateway has
    noticed."""
    async with cluster(*((f"h{i}", "hybrid") for i in range(3))) as c:
        h0, h1, h2 = c.scheduler.workers
        is_first_death = True

        def lose_node(_worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            nonlocal is_first_death
            if index == 1 and is_first_death:
                is_first_death = False
                h0.die()
                h1.die()

        h0.before_token = lose_node
        answers = [h0, h1, h2]
        c.scheduler.answer = lambda _: placement(None, answers.pop(0).ref)
        assert (await c.complete("hello")).texts[0].encode() == answer_to(b"hello", 8)
        assert answers == []


@virtual
async def test_worker_lost_before_an_exclusive_run_is_not_charged() -> None:
    """The run alone begins only after its worker has sent a message."""
    async with cluster(*((f"h{i}", "hybrid") for i in range(4))) as c:
        for worker in c.scheduler.workers[:2]:
            worker.before_token = dies_at(1)
        third, fourth = c.scheduler.workers[2:]
        order = [*c.scheduler.workers]

        def place(_: object) -> object:
            worker = order.pop(0)
            if worker is third:
                worker.die()
            return placement(None, worker.ref)

        c.scheduler.answer = place
        assert (await c.complete("hello")).texts[0].encode() == answer_to(b"hello", 8)
        assert [len(worker.jobs) for worker in (third, fourth)] == [0, 1]


@virtual
async def test_worker_that_was_dead_before_the_job_does_not_count() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid"), ("h2", "hybrid")) as c:
        h0, h1, h2 = c.scheduler.workers
        await asyncio.sleep(1)
        for worker in (h0, h1):
            worker.die()
        await asyncio.sleep(5)  # until the gateway's sessions with them have ended
        answers = [h0, h1, h2]
        c.scheduler.answer = lambda _: placement(None, answers.pop(0).ref)
        assert (await c.complete("hello")).texts[0].encode() == answer_to(b"hello", 8)
        assert answers == []


def test_result_of_a_death_is_independent_of_the_order_of_calls() -> None:
    w0, w1 = builders.worker_ref("w0"), builders.worker_ref("w1")
    for order in ([b"a", b"b"], [b"b", b"a"]):
        detector = PoisonDetector()
        for request_id in order:
            detector.track(request_id, w0)
        detector.track(b"a", w1)
        for request_id in order:
            assert not detector.was_only_suspect(request_id, w0)
            detector.untrack(request_id)
        detector.track(b"c", w0)  # placed by a scheduler that has not noticed the death
        assert not detector.was_only_suspect(b"a", w0)
        detector.track(b"a", w1)
        assert detector.was_only_suspect(b"a", w1)


def test_other_requests_are_found_on_the_same_incarnation_only() -> None:
    detector = PoisonDetector()
    detector.track(b"a", builders.worker_ref("w0"))
    assert not detector.tracks_others(b"a", [builders.worker_ref("w0")])
    assert not detector.tracks_others(b"b", [builders.worker_ref("w1")])
    assert detector.tracks_others(b"b", [builders.worker_ref("w1"), builders.worker_ref("w0")])
