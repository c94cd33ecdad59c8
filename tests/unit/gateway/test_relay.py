"""The path of a request, over stub workers: what a client gets when everything works, and when anything breaks."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from baton.core.cluster import Rejection, StillWaiting
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import DecisionId, JobId
from baton.core.jobs import DecodeJob, PrefillJob
from baton.core.request import FinishReason, RequestActuals, TokenDelta
from baton.gateway import schedulers
from tests.scale import sized
from tests.times import TEST_TIMES
from tests.unit.gateway.fakes import Gathered, StubScheduler, StubWorker, answer_to, cluster, placement, token_at, until
from tests.unit.gateway.virtual import virtual

PROMPT = "hello"


def kill_at(index: int, sample: int = 0):
    """A hook that kills the worker before it sends that token."""

    def hook(worker: StubWorker, job: JobId, at_sample: int, at_index: int) -> None:
        if (at_sample, at_index) == (sample, index):
            worker.die()

    return hook


@virtual
async def test_prefill_and_decode_share_one_answer() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        got = await c.ask(PROMPT, max_tokens=12)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 12)
        assert got.finishes[0] == [FinishReason.LENGTH]
        prefill, decode = (w.jobs[0] for w in c.scheduler.workers)
        assert isinstance(prefill, PrefillJob)
        assert isinstance(decode, DecodeJob)
        assert prefill.reader == c.scheduler.workers[1].ref
        assert decode.owner == c.scheduler.workers[0].ref
        assert prefill.job == decode.job
        assert prefill.token_ids == decode.token_ids


@virtual
async def test_jobs_that_ended_are_not_cancelled() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        await c.ask(PROMPT)
        await asyncio.sleep(1)
        assert [w.cancels for w in c.scheduler.workers] == [[], []]


@virtual
async def test_one_token_needs_no_decode_worker() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        got = await c.ask(PROMPT, max_tokens=1)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 1)
        p0, d0 = c.scheduler.workers
        assert isinstance(p0.jobs[0], PrefillJob)
        assert p0.jobs[0].reader is None
        assert d0.jobs == []


@virtual
async def test_a_hybrid_worker_prefills_for_itself() -> None:
    async with cluster(("h0", "hybrid")) as c:
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert [job.owner for job in c.scheduler.workers[0].jobs] == [None]


@virtual
async def test_a_first_token_that_is_the_last_ends_decode() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.finish_at = 1
        d0.prefill_s = 5
        got = await c.ask(PROMPT)
        assert got.finishes[0] == [FinishReason.STOP]
        await asyncio.sleep(0.1)
        assert [cancel.job for cancel in d0.cancels] == [d0.jobs[0].job]
        assert d0.open_jobs == []


@virtual
async def test_samples_and_prompts_are_choices() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        got = await c.ask(["one", "two"], n=3)
        assert {index: text.encode() for index, text in got.texts.items()} == {
            3 * p + s: answer_to(prompt, 8, s) for p, prompt in enumerate((b"one", b"two")) for s in range(3)
        }
        assert [job.sample_indices for job in c.scheduler.workers[0].jobs] == [(0, 1, 2)] * 2


@pytest.mark.parametrize("index", [0, 1, 2, 5, 11])
@virtual
async def test_a_decode_worker_that_dies_costs_no_token(index: int) -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:
        c.scheduler.workers[1].before_token = kill_at(index)
        got = await c.ask(PROMPT, max_tokens=12)
        assert c.scheduler.workers[1].is_dead
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 12)
        assert got.token_ids[0] == list(answer_to(PROMPT.encode(), 12))
        assert got.finishes[0] == [FinishReason.LENGTH]
        p0, d0, d1 = c.scheduler.workers
        resumed = (d1 if index < 11 else p0).jobs[-1]  # the last token alone needs no decode worker
        assert resumed.job.attempt == 1
        assert resumed.num_prompt_tokens == len(PROMPT)
        assert resumed.sampling == d0.jobs[0].sampling


@virtual
async def test_a_prefill_worker_that_dies_while_computing_is_replaced() -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")) as c:
        p0, p1, d0 = c.scheduler.workers
        p0.before_token = kill_at(0)
        d0.prefill_s = 3  # it waits for KV that never comes
        got = asyncio.create_task(c.ask(PROMPT))
        await asyncio.sleep(0.5)
        assert p0.is_dead
        assert [cancel.reason for cancel in d0.cancels] == [Reason.SUPERSEDED]
        assert (await got).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert [job.job.attempt for job in p1.jobs] == [1]


@virtual
async def test_a_prefill_worker_may_die_after_its_first_token() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        d0.before_token = lambda _w, _j, _s, index: p0.die() if index == 3 and not p0.is_dead else None
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(d0.jobs) == 1


@virtual
async def test_a_decode_worker_that_has_the_first_token_needs_no_prefill_worker() -> None:
    """P dies after its last KvReady, before its word has reached the gateway."""
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.prefill_s = 10
        d0.before_token = lambda _w, _j, _s, index: p0.die() if index == 1 and not p0.is_dead else None
        got = await c.ask(PROMPT)
        assert p0.is_dead
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(d0.jobs) == 1


@pytest.mark.parametrize("index", [1, 4])
@virtual
async def test_samples_go_on_alone_after_a_lost_leg(index: int) -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:
        _, d0, d1 = c.scheduler.workers
        d0.before_token = kill_at(index, sample=1)
        got = await c.ask(PROMPT, n=3)
        assert {i: text.encode() for i, text in got.texts.items()} == {s: answer_to(PROMPT.encode(), 8, s) for s in range(3)}
        assert sorted(job.sample_indices for job in d1.jobs) == [(0,), (1,), (2,)]
        assert len({job.job.request_id for job in d1.jobs} | {d0.jobs[0].job.request_id}) == 4
        assert all(job.job.attempt == 1 for job in d1.jobs)


@virtual
async def test_samples_stay_together_when_nothing_was_delivered() -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")) as c:
        c.scheduler.workers[0].before_token = kill_at(0)
        c.scheduler.workers[2].prefill_s = 0.5
        got = await c.ask(PROMPT, n=2)
        assert {i: text.encode() for i, text in got.texts.items()} == {s: answer_to(PROMPT.encode(), 8, s) for s in range(2)}
        assert [job.sample_indices for job in c.scheduler.workers[1].jobs] == [(0, 1)]


@virtual
async def test_a_cut_stream_is_resumed_without_another_attempt() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        _, d0 = c.scheduler.workers
        cuts = {0, 2, 3, 6}
        d0.before_token = lambda w, _j, _s, index: (w.cut(), cuts.discard(index)) if index in cuts else None
        got = await c.ask(PROMPT)
        assert not cuts
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(d0.jobs) == 1
        assert len({hello.session_id for hello in d0.hellos}) == 1
        assert len(d0.hellos) > 1
        assert c.scheduler.actuals == [] or [a.outcome for a in c.scheduler.actuals] == ["finished"]


@virtual
async def test_a_job_sent_into_a_cut_stream_is_repeated() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.cut()
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.queries) == 1


@virtual
async def test_a_worker_that_forgot_the_session_is_lost() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]

        def forget(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            if index == 3:
                worker.forgets_sessions = True
                worker.cut()

        h0.before_token = forget
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.workers[1].jobs) == 1


@virtual
async def test_repeated_messages_change_nothing() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.before_token = lambda w, _j, _s, _i: w.send_twice()
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(h0.hellos) == 1


@virtual
async def test_a_message_that_is_missing_is_asked_for_again() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.before_token = lambda w, _j, _s, index: w.lose_next() if index == 2 else None
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(h0.hellos) == 2
        assert len(c.scheduler.queries) == 1


@virtual
async def test_a_worker_that_keeps_losing_messages_is_given_up() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]

        def lose_for_good(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            if index == 2:
                worker.lose_next()
                worker.loses_first_of_every_stream = True

        h0.before_token = lose_for_good
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.workers[1].jobs) == 1


@virtual
async def test_a_cancel_that_a_broken_stream_could_not_carry_is_repeated() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.cut()
        await until(lambda: len(h0.hellos) == 2)
        got = asyncio.create_task(c.ask(PROMPT, max_tokens=500))
        await until(lambda: h0.jobs)
        h0.cut()
        got.cancel()
        await asyncio.wait((got,))
        assert h0.cancels == []
        await until(lambda: h0.cancels)
        assert h0.open_jobs == []
        await until(lambda: c.gateway.workers.session(h0.ref).num_jobs == 0)


@virtual
async def test_a_worker_that_contradicts_itself_is_not_believed() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]

        def contradict(worker: StubWorker, job: JobId, sample: int, index: int) -> None:
            if index == 4:
                worker.say(TokenDelta(job=job, sample_index=sample, output_index=1, token_ids=(1, 2, 3)))

        h0.before_token = contradict
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.workers[1].jobs) == 1


@virtual
async def test_tokens_of_another_job_or_sample_are_dropped() -> None:
    async with cluster(("h0", "hybrid")) as c:

        def noise(worker: StubWorker, job: JobId, sample: int, index: int) -> None:
            old = replace(job, attempt=job.attempt + 7)
            worker.say(TokenDelta(job=old, sample_index=sample, output_index=index, token_ids=(1,)))
            worker.say(TokenDelta(job=job, sample_index=sample + 5, output_index=0, token_ids=(1,)))

        c.scheduler.workers[0].before_token = noise
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_a_silent_worker_is_lost_after_the_detection_time() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        loop = asyncio.get_running_loop()
        h0 = c.scheduler.workers[0]

        def pause(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            if index == 3:
                worker.is_paused = True

        h0.before_token = pause
        begin_s = loop.time()
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert c.gateway.rules.detection_s < loop.time() - begin_s < c.gateway.rules.detection_s + 0.5
        h0.is_paused = False  # it wakes, and what it says is of an attempt that is over
        await asyncio.sleep(1)
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_a_worker_that_talks_but_does_not_step_is_lost() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.prefill_s = 1e6
        h0.step_age_s = 25 * c.gateway.rules.detection_s
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_a_worker_of_another_life_gets_no_job() -> None:
    async with cluster(("h0", "hybrid")) as c:
        old = c.scheduler.workers[0]
        old.die()
        c.scheduler.remove(old)
        new = StubWorker(c.network, "h0", epoch=2)
        answers = [placement(None, old.ref), placement(None, old.ref), placement(None, new.ref)]
        c.scheduler.answer = lambda _: answers.pop(0) if len(answers) > 1 else answers[0]
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert [job.job.attempt for job in new.jobs] == [1]  # the second answer named the dead and cost no attempt


@virtual
async def test_a_request_under_way_waits_for_workers_until_its_deadline() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.before_token = kill_at(3)
        got = asyncio.create_task(c.ask(PROMPT))
        await asyncio.sleep(20)
        assert h0.is_dead
        assert not got.done()
        c.worker("h1")
        assert (await got).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_a_new_request_without_workers_is_refused_at_once() -> None:
    async with cluster() as c:
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.UNAVAILABLE, Reason.NO_WORKERS)
        assert refused.value.failure.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.QUEUE_FULL, Code.RESOURCE_EXHAUSTED),
        (Reason.TENANT_QUOTA, Code.RESOURCE_EXHAUSTED),
        (Reason.NO_CAPACITY, Code.RESOURCE_EXHAUSTED),
        (Reason.TTFT_SLO, Code.RESOURCE_EXHAUSTED),
        (Reason.TPOT_SLO, Code.RESOURCE_EXHAUSTED),
        (Reason.NO_WORKERS, Code.UNAVAILABLE),
        (Reason.DRAINING, Code.UNAVAILABLE),
        (Reason.DEADLINE, Code.DEADLINE_EXCEEDED),
    ],
)
@virtual
async def test_rejections_keep_their_reason(reason: Reason, code: Code) -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.answer = lambda _: Rejection(reason=reason, message="no", retry_after_s=3.0)
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason, refused.value.failure.retry_after_s) == (code, reason, 3.0)


@virtual
async def test_a_job_failure_that_may_succeed_elsewhere_is_tried_elsewhere() -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")) as c:
        p0, p1, d0 = c.scheduler.workers
        failure = Failure(code=Code.UNAVAILABLE, reason=Reason.TRANSFER_FAILED, message="no", retriable=True, blamed=p0.ref)
        d0.fail_job = lambda job: failure if job.job.attempt == 0 else None
        got = await c.ask(PROMPT)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert c.scheduler.queries[1].avoid == (p0.ref,)
        assert len(p1.jobs) == 1


@virtual
async def test_a_failure_that_would_repeat_ends_the_request() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="nan")
        c.scheduler.workers[0].fail_job = lambda _: failure
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert refused.value.failure == failure
        assert len(c.scheduler.queries) == 1


@virtual
async def test_attempts_are_bounded_and_the_last_failure_is_the_answer() -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.workers[0].fail_job = lambda job: Failure(
            code=Code.UNAVAILABLE, reason=Reason.TRANSFER_FAILED, message=f"failed {job.job.attempt}", retry_after_s=2.0, retriable=True
        )
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert (refused.value.failure.reason, refused.value.failure.message) == (Reason.TRANSFER_FAILED, "failed 7")
        assert len(c.scheduler.queries) == 8


@virtual
async def test_a_new_request_that_finds_full_queues_is_told_so_soon() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid"), ("h2", "hybrid")) as c:
        full = Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message="full", retry_after_s=2.0, retriable=True)
        for worker in c.scheduler.workers:
            worker.fail_job = lambda _: full
        begin_s = asyncio.get_running_loop().time()
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 2.0)
        assert asyncio.get_running_loop().time() - begin_s < 0.05
        assert len(c.scheduler.queries) == 2


@virtual
async def test_a_request_under_way_is_not_turned_away_by_a_full_queue() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        h0.before_token = kill_at(3)
        full = Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message="full", retriable=True)
        h1.fail_job = lambda job: full if job.job.attempt < 4 else None
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_a_request_that_kills_its_workers_is_stopped() -> None:
    async with cluster(*((f"h{i}", "hybrid") for i in range(5))) as c:
        for worker in c.scheduler.workers:
            worker.before_token = kill_at(2)
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.INTERNAL, Reason.POISON)
        assert sum(worker.is_dead for worker in c.scheduler.workers) == 2


@virtual
async def test_workers_that_die_while_it_only_waits_do_not_make_a_request_poison() -> None:
    async with cluster(("p0", "prefill"), *((f"d{i}", "decode") for i in range(4))) as c:
        p0, *decode = c.scheduler.workers
        p0.prefill_s = 0.3
        for worker in decode[:3]:
            worker.prefill_s = 1e6  # it waits for KV
        got = asyncio.create_task(c.ask(PROMPT))
        for worker in decode[:3]:
            await asyncio.sleep(0.15)
            worker.die()
        assert (await got).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@pytest.mark.parametrize("phase", ["no scheduler", "hanging scheduler", "prefill", "decode"])
@virtual
async def test_every_request_ends_at_its_deadline(phase: str) -> None:
    async with cluster(("h0", "hybrid"), request_timeout_s=1.5, scheduler_wait_s=30.0) as c:
        loop = asyncio.get_running_loop()
        if phase == "no scheduler":
            c.scheduler.die()
        c.scheduler.hangs = phase == "hanging scheduler"
        h0 = c.scheduler.workers[0]
        h0.prefill_s = 1e6 if phase == "prefill" else 0.01
        h0.step_s = 0.4
        begin_s = loop.time()
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT, max_tokens=50)
        expected = Reason.SCHEDULER_LOST if phase in ("no scheduler", "hanging scheduler") else Reason.DEADLINE
        assert refused.value.failure.reason in (expected, Reason.DEADLINE)
        assert 1.4 < loop.time() - begin_s < 1.6
        await asyncio.sleep(0.1)
        assert h0.open_jobs == []
        assert {cancel.reason for cancel in h0.cancels} <= {Reason.DEADLINE}


@virtual
async def test_a_request_that_waits_at_the_scheduler_is_asked_for_again_and_says_how_long_it_has_waited() -> None:
    async with cluster(("h0", "hybrid")) as c:
        loop = asyncio.get_running_loop()
        begin_s, until_s = loop.time(), loop.time() + 3 * TEST_TIMES["scheduler_wait_s"]
        c.scheduler.answer = lambda _: StillWaiting(num_waiting=1) if loop.time() < until_s else None
        await c.ask(PROMPT, max_tokens=3)
        waited_s = [asked.waited_s for asked in c.scheduler.queries]
        assert waited_s == pytest.approx([i * 0.1 * TEST_TIMES["detection_s"] for i in range(len(waited_s))], abs=0.05)
        assert loop.time() - begin_s > 3 * TEST_TIMES["scheduler_wait_s"], "it would have been lost, had nobody answered"
        assert {asked.request_id for asked in c.scheduler.queries} == {c.scheduler.queries[0].request_id}


@virtual
async def test_cancelling_a_call_cancels_both_legs() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.prefill_s = 5
        got = asyncio.create_task(c.ask(PROMPT))
        await asyncio.sleep(0.01)
        got.cancel()
        await asyncio.wait((got,))
        await asyncio.sleep(0.01)
        assert [w.open_jobs for w in (p0, d0)] == [[], []]
        assert [w.cancels[0].reason for w in (p0, d0)] == [Reason.CANCELLED] * 2
        assert c.gateway.num_open == 0


@virtual
async def test_a_stop_string_ends_one_sample_and_cancels_it() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        whole = answer_to(PROMPT.encode(), 30, 1).decode()
        stop = whole[9:12]
        got = await c.ask(PROMPT, n=2, max_tokens=30, stop=[stop])
        other = answer_to(PROMPT.encode(), 30, 0).decode()
        assert got.texts[1] == whole[: whole.find(stop)]
        assert got.texts[0] == (other[: other.find(stop)] if stop in other else other)
        assert got.finishes[1] == [FinishReason.STOP]
        await asyncio.sleep(0.1)
        d0 = c.scheduler.workers[1]
        assert [cancel.sample_indices for cancel in d0.cancels] == [(1,)]
        assert d0.open_jobs == []


@virtual
async def test_a_stop_string_of_the_only_sample_cancels_the_job() -> None:
    async with cluster(("h0", "hybrid")) as c:
        whole = answer_to(PROMPT.encode(), 30).decode()
        got = await c.ask(PROMPT, max_tokens=30, stop=whole[5:9])
        assert got.texts[0] == whole[: whole.find(whole[5:9])]
        await asyncio.sleep(0.1)
        assert c.scheduler.workers[0].open_jobs == []


@virtual
async def test_another_scheduler_is_asked_when_one_is_gone() -> None:
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        other.workers = c.scheduler.workers
        c.gateway.schedulers._set_addresses(["scheduler:1", "scheduler:2"])
        c.scheduler.die()
        assert (await c.ask(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(other.queries) == 1
        await asyncio.sleep(0.5)
        assert c.gateway.health.is_ready


@virtual
async def test_new_requests_wait_for_a_scheduler_and_then_are_told() -> None:
    async with cluster(("h0", "hybrid")) as c:
        loop = asyncio.get_running_loop()
        c.scheduler.die()
        begin_s = loop.time()
        with pytest.raises(Refused) as refused:
            await c.ask(PROMPT)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.UNAVAILABLE, Reason.SCHEDULER_LOST)
        assert 1.9 < loop.time() - begin_s < 2.3
        got = asyncio.create_task(c.ask(PROMPT))
        await asyncio.sleep(1)
        c.network.add_scheduler(c.scheduler.address, c.scheduler)
        assert (await got).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_streams_go_on_without_a_scheduler() -> None:
    async with cluster(("h0", "hybrid")) as c:
        c.scheduler.workers[0].step_s = 1.0
        got = asyncio.create_task(c.ask(PROMPT))
        await asyncio.sleep(1.5)
        c.scheduler.die()
        assert (await got).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@virtual
async def test_the_scheduler_hears_what_became_of_each_decision() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].before_token = kill_at(3)
        await c.ask(PROMPT)
        await asyncio.sleep(0.1)
        assert [(a.decision_id, a.outcome) for a in c.scheduler.actuals] == [
            ("decision-1", "worker_lost"),
            ("decision-2", "finished"),
        ]
        assert [a.ttft_s is not None for a in c.scheduler.actuals] == [True, False]
        assert c.gateway.schedulers._by_decision == {}


@virtual
async def test_outcomes_that_come_together_are_told_together() -> None:
    async with cluster(("h0", "hybrid")) as c:
        calls: list[int] = []

        async def finished(*actuals: RequestActuals) -> None:
            calls.append(len(actuals))

        c.scheduler.finished = finished  # type: ignore[method-assign]
        c.scheduler.workers[0].step_s = 0.001
        await asyncio.gather(*(c.ask(PROMPT, max_tokens=2 + number) for number in range(6)))
        await until(lambda: bool(calls))
        await c.ask(PROMPT)
        await until(lambda: len(calls) == 2)
        assert calls == [6, 1]


@virtual
async def test_each_scheduler_is_told_of_its_own_decisions_in_calls_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "MAX_TOLD", 3)
    async with cluster(("h0", "hybrid")) as c:
        other = StubScheduler(c.network, "scheduler:2")
        c.gateway.schedulers._set_addresses(["scheduler:1", "scheduler:2"])
        for number in range(8):
            decision = DecisionId(f"d{number}")
            c.gateway.schedulers._by_decision[decision] = f"scheduler:{1 + number % 2}"
            c.gateway.schedulers.finished(RequestActuals(decision_id=decision, outcome="finished"))
        await until(lambda: len(c.scheduler.actuals) + len(other.actuals) == 8)
        assert [a.decision_id for a in c.scheduler.actuals] == ["d0", "d2", "d4", "d6"]
        assert [a.decision_id for a in other.actuals] == ["d1", "d3", "d5", "d7"]


@virtual
async def test_a_query_says_what_must_be_computed_and_what_was_delivered() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].before_token = kill_at(3)
        await c.ask(PROMPT)
        first, second = c.scheduler.queries
        assert (first.num_prompt_tokens, first.num_output_tokens, first.max_tokens, first.attempt) == (5, 0, 8, 0)
        assert (second.num_prompt_tokens, second.num_output_tokens, second.max_tokens, second.attempt) == (8, 3, 8, 1)
        assert len(first.block_hashes) == 1
        assert len(second.block_hashes) == 2
        assert second.block_hashes[0] == first.block_hashes[0]


@virtual
async def test_timeline_and_usage() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        call = await c.call(PROMPT, n=2, timeline=True)
        ending = await c.gateway.run(call, Gathered())
        assert (ending.usage.num_prompt_tokens, ending.usage.num_output_tokens, ending.usage.num_cached_tokens) == (5, 16, 4)
        (timeline,) = ending.timeline
        assert [leg.worker_id for leg in timeline.legs] == ["p0", "d0"]
        assert (timeline.attempts, timeline.policy) == (1, "first")
        assert timeline.ttft_s == pytest.approx(0.02, abs=0.005)
        assert timeline.tpot_s == pytest.approx(0.01, abs=0.005)


@virtual
async def test_random_faults_never_change_an_answer() -> None:
    """Cuts, kills, repeats and pauses by seed; workers come back with another epoch."""
    for seed in range(sized(15, 300)):
        await _random_faults(Random(seed), seed)


async def _random_faults(rng: Random, seed: int) -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:

        def fault(worker: StubWorker, _job: JobId, _sample: int, _index: int) -> None:
            draw = rng.random()
            if draw < 0.03:
                worker.cut()
            elif draw < 0.06:
                worker.send_twice()
            elif draw < 0.075:
                worker.die()
                asyncio.get_running_loop().call_later(rng.uniform(0, 2), revive, worker)

        def revive(dead: StubWorker) -> None:
            c.scheduler.remove(dead)
            reborn = c.worker(dead.ref.worker_id, dead.report.role.value, epoch=dead.ref.worker_epoch + 1)
            reborn.before_token = fault

        for worker in c.scheduler.workers:
            worker.before_token = fault
        prompts = [f"prompt {seed} {i}" for i in range(12)]
        answers = await asyncio.gather(*(c.ask(p, n=1 + i % 3, max_tokens=20) for i, p in enumerate(prompts)), return_exceptions=True)
        for index, (prompt, got) in enumerate(zip(prompts, answers, strict=True)):
            if isinstance(got, Refused):
                # By chance two workers died under it in a row, or one under each of its attempts (its successor may already answer).
                assert got.failure.reason in (Reason.POISON, Reason.WORKER_LOST, Reason.WRONG_EPOCH)
                continue
            assert not isinstance(got, BaseException), got
            assert {i: text.encode() for i, text in got.texts.items()} == {
                s: answer_to(prompt.encode(), 20, s) for s in range(1 + index % 3)
            }
        assert c.gateway.num_open == 0


def test_the_stub_is_a_function_of_prompt_sample_and_position() -> None:
    assert answer_to(b"x", 9)[4:] == bytes(token_at(list(b"x"), 0, i) for i in range(4, 9))
    assert answer_to(b"x", 9) != answer_to(b"x", 9, 1)


@virtual
async def test_an_answer_goes_on_only_with_the_weights_that_began_it() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        c.scheduler.answer = lambda query: placement(None, (h1 if query.attempt else h0).ref)
        h0.before_token = kill_at(5)
        got = await c.ask(PROMPT, max_tokens=12)
        assert got.texts[0].encode() == answer_to(PROMPT.encode(), 12)
        first, second = c.scheduler.queries
        assert (first.model_fingerprint, second.model_fingerprint) == ("", h0.report.layout.model_fingerprint)


@virtual
async def test_a_request_of_which_the_client_has_nothing_may_begin_with_any_weights() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        c.scheduler.answer = lambda query: placement(None, (h1 if query.attempt else h0).ref)
        h0.before_token = kill_at(0)
        await c.ask(PROMPT, max_tokens=12)
        assert [query.model_fingerprint for query in c.scheduler.queries] == ["", ""]
