"""Worker deaths, silent workers, wrong tokens and broken streams do not change the response."""

import asyncio
import time
from dataclasses import replace
from random import Random

import pytest

from baton.core.errors import Reason, Refused
from baton.core.ids import JobId
from baton.core.request import FinishReason, TokenDelta
from baton.runtime.process.awake_clock import AwakeClock
from baton.runtime.process.process import Background
from tests.scale import sized
from tests.unit.gateway.fakes import PROMPT, StubWorker, answer_to, cluster, kill_at, placement, until
from tests.unit.gateway.virtual import virtual


@pytest.mark.parametrize("index", [0, 1, 2, 5, 11])
@virtual
async def test_decode_worker_crash_resumes_without_lost_or_duplicate_tokens(index: int) -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:
        c.scheduler.workers[1].before_token = kill_at(index)
        response = await c.complete(PROMPT, max_tokens=12)
        assert c.scheduler.workers[1].is_dead
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 12)
        assert response.token_ids[0] == list(answer_to(PROMPT.encode(), 12))
        assert response.finishes[0] == [FinishReason.LENGTH]
        p0, d0, d1 = c.scheduler.workers
        resumed = (d1 if index < 11 else p0).jobs[-1]  # a request for the last token needs no decode worker
        assert resumed.job.attempt == 1
        assert resumed.num_prompt_tokens == len(PROMPT)
        assert resumed.sampling == d0.jobs[0].sampling


@virtual
async def test_prefill_worker_crash_before_the_first_token_starts_a_new_attempt() -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")) as c:
        p0, p1, d0 = c.scheduler.workers
        p0.before_token = kill_at(0)
        d0.prefill_s = 3  # this job waits for KV that never arrives
        response = asyncio.create_task(c.complete(PROMPT))
        await asyncio.sleep(0.5)
        assert p0.is_dead
        assert [cancel.reason for cancel in d0.cancels] == [Reason.SUPERSEDED]
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert [job.job.attempt for job in p1.jobs] == [1]


@virtual
async def test_prefill_worker_crash_after_the_first_token_has_no_effect() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        d0.before_token = lambda _w, _j, _s, index: p0.die() if index == 3 and not p0.is_dead else None
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(d0.jobs) == 1


@virtual
async def test_decode_continues_if_the_prefill_worker_dies_after_kv_ready() -> None:
    """The prefill worker dies after its last KvReady, before its delta reached the gateway."""
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.prefill_s = 10
        d0.before_token = lambda _w, _j, _s, index: p0.die() if index == 1 and not p0.is_dead else None
        response = await c.complete(PROMPT)
        assert p0.is_dead
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(d0.jobs) == 1


@pytest.mark.fault("F-40")
@pytest.mark.parametrize("index", [1, 4])
@virtual
async def test_samples_continue_separately_after_a_failed_attempt(index: int) -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:
        _, d0, d1 = c.scheduler.workers
        d0.before_token = kill_at(index, sample=1)
        response = await c.complete(PROMPT, n=3)
        assert {i: text.encode() for i, text in response.texts.items()} == {
            s: answer_to(PROMPT.encode(), 8, s) for s in range(3)
        }
        assert sorted(job.sample_indices for job in d1.jobs) == [(0,), (1,), (2,)]
        assert len({job.job.request_id for job in d1.jobs} | {d0.jobs[0].job.request_id}) == 4
        assert all(job.job.attempt == 1 for job in d1.jobs)


@pytest.mark.fault("F-40")
@pytest.mark.parametrize("index", [1, 4])
@virtual
async def test_list_of_prompts_with_samples_is_exact_after_a_kill(index: int) -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:
        d0 = c.scheduler.workers[1]
        d0.before_token = kill_at(index)
        prompts = [PROMPT, "another prompt"]
        response = await c.complete(prompts, n=2)
        assert d0.is_dead
        assert {i: text.encode() for i, text in response.texts.items()} == {
            2 * number + sample: answer_to(prompt.encode(), 8, sample)
            for number, prompt in enumerate(prompts)
            for sample in range(2)
        }


@virtual
async def test_samples_stay_together_if_nothing_was_delivered() -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")) as c:
        c.scheduler.workers[0].before_token = kill_at(0)
        c.scheduler.workers[2].prefill_s = 0.5
        response = await c.complete(PROMPT, n=2)
        assert {i: text.encode() for i, text in response.texts.items()} == {
            s: answer_to(PROMPT.encode(), 8, s) for s in range(2)
        }
        assert [job.sample_indices for job in c.scheduler.workers[1].jobs] == [(0, 1)]


@virtual
async def test_broken_stream_is_resumed_without_a_new_attempt() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        _, d0 = c.scheduler.workers
        cuts = {0, 2, 3, 6}
        d0.before_token = lambda w, _j, _s, index: (w.cut(), cuts.discard(index)) if index in cuts else None
        response = await c.complete(PROMPT)
        assert not cuts
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(d0.jobs) == 1
        assert len({hello.session_id for hello in d0.hellos}) == 1
        assert len(d0.hellos) > 1
        assert c.scheduler.actuals == [] or [a.outcome for a in c.scheduler.actuals] == ["finished"]


@virtual
async def test_job_sent_into_a_broken_stream_is_sent_again() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.cut()
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.queries) == 1


@virtual
async def test_worker_that_forgot_the_session_counts_as_lost() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]

        def forget(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            if index == 3:
                worker.forgets_sessions = True
                worker.cut()

        h0.before_token = forget
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.workers[1].jobs) == 1


@virtual
async def test_repeated_messages_have_no_effect() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.before_token = lambda w, _j, _s, _i: w.send_twice()
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(h0.hellos) == 1


@virtual
async def test_missing_message_is_requested_again() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.before_token = lambda w, _j, _s, index: w.lose_next() if index == 2 else None
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(h0.hellos) == 2
        assert len(c.scheduler.queries) == 1


@virtual
async def test_worker_that_keeps_losing_messages_counts_as_lost() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]

        def lose_permanently(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            if index == 2:
                worker.lose_next()
                worker.loses_first_of_every_stream = True

        h0.before_token = lose_permanently
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.workers[1].jobs) == 1


@virtual
async def test_cancel_lost_in_a_broken_stream_is_sent_again() -> None:
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.cut()
        await until(lambda: len(h0.hellos) == 2)
        response = asyncio.create_task(c.complete(PROMPT, max_tokens=500))
        await until(lambda: h0.jobs)
        h0.cut()
        response.cancel()
        await asyncio.wait((response,))
        assert h0.cancels == []
        await until(lambda: h0.cancels)
        assert h0.open_jobs == []
        await until(lambda: c.gateway.workers.session(h0.ref).num_jobs == 0)


@virtual
async def test_lost_cancel_of_one_sample_is_sent_again_after_the_other_sample_has_ended() -> None:
    """Otherwise the worker would compute the cancelled sample until its deadline."""
    async with cluster(("h0", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.loses_cancels, h0.sample_finish_at = True, {0: 20}
        stop = answer_to(PROMPT.encode(), 500, 1).decode()[9:12]
        assert stop not in answer_to(PROMPT.encode(), 20, 0).decode()
        response = await c.complete(PROMPT, n=2, max_tokens=500, stop=[stop])
        assert response.finishes == {0: [FinishReason.STOP], 1: [FinishReason.STOP]}
        assert h0.open_jobs
        h0.loses_cancels = False
        h0.cut()
        await until(lambda: not h0.open_jobs, timeout_s=5)
        await until(lambda: c.gateway.workers.session(h0.ref).num_jobs == 0)


@virtual
async def test_conflicting_tokens_fail_the_attempt() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]

        def contradict(worker: StubWorker, job: JobId, sample: int, index: int) -> None:
            if index == 4:
                worker.send_delta(TokenDelta(job=job, sample_index=sample, output_index=1, token_ids=(1, 2, 3)))

        h0.before_token = contradict
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert len(c.scheduler.workers[1].jobs) == 1


@pytest.mark.fault("F-7")
@virtual
async def test_late_tokens_of_a_worker_that_resumes_are_dropped() -> None:
    """They belong to the first attempt, while the second one runs, and would be wrong."""
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers

        def pause(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            worker.is_paused = index == 3

        h0.before_token = pause
        response = asyncio.create_task(c.complete(PROMPT, max_tokens=100))
        await until(lambda: h1.jobs)
        h0.before_token, h0.is_paused = (lambda *_: None), False
        c.gateway.workers.session(h0.ref)  # as for the next request on it
        await until(lambda: len(h0.hellos) == 2)
        assert not response.done()
        first = h0.jobs[0].job
        for index in (3, 4, 50):
            h0.send_delta(TokenDelta(job=first, sample_index=0, output_index=index, token_ids=(1, 2)))
        assert (await response).texts[0].encode() == answer_to(PROMPT.encode(), 100)
        assert [job.job.attempt for job in h1.jobs] == [1]


@virtual
async def test_tokens_of_another_job_or_sample_are_dropped() -> None:
    async with cluster(("h0", "hybrid")) as c:

        def noise(worker: StubWorker, job: JobId, sample: int, index: int) -> None:
            old = replace(job, attempt=job.attempt + 7)
            worker.send_delta(TokenDelta(job=old, sample_index=sample, output_index=index, token_ids=(1,)))
            worker.send_delta(TokenDelta(job=job, sample_index=sample + 5, output_index=0, token_ids=(1,)))

        c.scheduler.workers[0].before_token = noise
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@pytest.mark.fault("F-7", "F-18")
@virtual
async def test_silent_worker_is_lost_after_the_detection_time() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        loop = asyncio.get_running_loop()
        h0 = c.scheduler.workers[0]

        def pause(worker: StubWorker, _job: JobId, _sample: int, index: int) -> None:
            if index == 3:
                worker.is_paused = True

        h0.before_token = pause
        begin_s = loop.time()
        response = await c.complete(PROMPT)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 8)
        assert c.gateway.rules.detection_s < loop.time() - begin_s < c.gateway.rules.detection_s + 0.5
        h0.is_paused = False  # it resumes, and its messages belong to an attempt that has ended
        await asyncio.sleep(1)
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@pytest.mark.fault("F-11")
@virtual
async def test_worker_with_a_stuck_step_counts_as_lost() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0 = c.scheduler.workers[0]
        h0.prefill_s = 1e6
        h0.step_age_s = 25 * c.gateway.rules.detection_s
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)


@pytest.mark.fault("F-8")
@virtual
async def test_restarted_worker_gets_no_job_of_its_earlier_incarnation() -> None:
    async with cluster(("h0", "hybrid")) as c:
        old = c.scheduler.workers[0]
        old.die()
        c.scheduler.remove(old)
        new = StubWorker(c.network, "h0", epoch=2)
        answers = [placement(None, old.ref), placement(None, old.ref), placement(None, new.ref)]
        c.scheduler.answer = lambda _: answers.pop(0) if len(answers) > 1 else answers[0]
        assert (await c.complete(PROMPT)).texts[0].encode() == answer_to(PROMPT.encode(), 8)
        # The second placement named the dead worker and did not cost an attempt.
        assert [job.job.attempt for job in new.jobs] == [1]


@virtual
async def test_random_faults_never_change_the_response() -> None:
    """Stream breaks, kills, repeated messages and pauses by seed. Workers restart with a new epoch."""
    for seed in range(sized(15, 300)):
        await _check_random_faults(Random(seed), seed)


async def _check_random_faults(rng: Random, seed: int) -> None:
    async with cluster(("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")) as c:

        def fault(worker: StubWorker, _job: JobId, _sample: int, _index: int) -> None:
            draw = rng.random()
            if draw < 0.03:
                worker.cut()
            elif draw < 0.06:
                worker.send_twice()
            elif draw < 0.075:
                worker.die()
                asyncio.get_running_loop().call_later(rng.uniform(0, 2), restart, worker)

        def restart(dead: StubWorker) -> None:
            c.scheduler.remove(dead)
            restarted = c.worker(dead.ref.worker_id, dead.report.role.value, epoch=dead.ref.worker_epoch + 1)
            restarted.before_token = fault

        for worker in c.scheduler.workers:
            worker.before_token = fault
        prompts = [f"prompt {seed} {i}" for i in range(12)]
        answers = await asyncio.gather(
            *(c.complete(p, n=1 + i % 3, max_tokens=20) for i, p in enumerate(prompts)), return_exceptions=True
        )
        for index, (prompt, response) in enumerate(zip(prompts, answers, strict=True)):
            if isinstance(response, Refused):
                # Two workers in a row may have died while they ran the request, or one in each attempt.
                # A restarted worker may already be in use.
                assert response.failure.reason in (Reason.POISON, Reason.WORKER_LOST, Reason.WRONG_EPOCH)
                continue
            assert not isinstance(response, BaseException), response
            assert {i: text.encode() for i, text in response.texts.items()} == {
                s: answer_to(prompt.encode(), 20, s) for s in range(1 + index % 3)
            }
        assert c.gateway.num_open == 0


@virtual
async def test_request_continues_only_on_workers_with_the_same_weights() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        c.scheduler.answer = lambda query: placement(None, (h1 if query.attempt else h0).ref)
        h0.before_token = kill_at(5)
        response = await c.complete(PROMPT, max_tokens=12)
        assert response.texts[0].encode() == answer_to(PROMPT.encode(), 12)
        first, second = c.scheduler.queries
        assert (first.model_fingerprint, second.model_fingerprint) == ("", h0.report.layout.model_fingerprint)


@virtual
async def test_request_without_delivered_tokens_may_restart_with_other_weights() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        h0, h1 = c.scheduler.workers
        c.scheduler.answer = lambda query: placement(None, (h1 if query.attempt else h0).ref)
        h0.before_token = kill_at(0)
        await c.complete(PROMPT, max_tokens=12)
        assert [query.model_fingerprint for query in c.scheduler.queries] == ["", ""]


async def test_stall_of_the_gateway_does_not_make_a_worker_lost() -> None:
    """The loop is blocked for the detection time, from just after a message of the worker."""
    awake = AwakeClock(asyncio.get_running_loop().time)
    async with cluster(("h0", "hybrid"), awake_clock=awake) as c, Background(awake.run(lambda lag_s, stall_s: None)):
        h0 = c.scheduler.workers[0]
        session = c.gateway.workers.session(h0.ref)
        await session.next_message()
        await session.next_message()
        time.sleep(c.gateway.rules.detection_s + 0.4 * c.gateway.rules.heartbeat_s)  # noqa: ASYNC251
        await asyncio.sleep(2 * c.gateway.rules.heartbeat_s)
        assert c.gateway.workers.session(h0.ref) is session
        assert not session.has_ended


@pytest.mark.parametrize("max_attempts", [1, 100])
@virtual
async def test_address_of_a_lost_worker_is_not_in_the_clients_error(max_attempts: int) -> None:
    """With one attempt the error is that of the worker, with many it is the deadline and the last problem."""
    async with cluster(("h0", "hybrid"), request_timeout_s=3.0, max_attempts=max_attempts) as c:
        (h0,) = c.scheduler.workers
        h0.before_token = kill_at(1)
        with pytest.raises(Refused) as refused:
            await c.complete(PROMPT)
        assert h0.is_dead
        failure = refused.value.failure
        assert failure.reason is (Reason.WORKER_LOST if max_attempts == 1 else Reason.DEADLINE)
        assert h0.ref.address not in failure.message
        assert c.scheduler.address not in failure.message


@virtual
@pytest.mark.parametrize("index", [0, 1, 3])
async def test_prompt_logprobs_arrive_once_when_a_decode_worker_dies(index: int) -> None:
    """They come with the first output of each choice, and are not computed again after it."""
    async with cluster(("p0", "prefill"), ("d0", "decode"), ("p1", "prefill"), ("d1", "decode")) as c:
        c.scheduler.workers[1].before_token = kill_at(index)
        response = await c.complete(PROMPT, n=2, prompt_logprobs=1)
        found = list(response.prompt_logprobs.values())
        assert [len(each) for each in found] == [1, 1]
        assert list(found[0][0].chosen) == [-float(byte) for byte in PROMPT.encode()[1:]]
        assert found[0] == found[1]
        retried = [job for worker in c.scheduler.workers for job in worker.jobs if job.job.attempt]
        assert all(
            (job.sampling.num_prompt_logprobs is None) == (len(job.token_ids) > job.num_prompt_tokens)
            for job in retried
        )


@virtual
async def test_prompt_logprobs_survive_the_loss_of_the_prefill_workers_message() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        p0, d0 = c.scheduler.workers
        p0.prefill_s = 10
        d0.before_token = lambda _w, _j, _s, index: p0.die() if index == 1 and not p0.is_dead else None
        response = await c.complete(PROMPT, prompt_logprobs=0)
        assert p0.is_dead
        assert [len(each) for each in response.prompt_logprobs[0]] == [len(PROMPT) - 1]
