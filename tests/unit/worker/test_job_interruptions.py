"""Tests of jobs that are cancelled, repeated, superseded or late, or whose other leg, stream or worker is
lost."""

import asyncio
from collections.abc import Callable

import pytest

from baton.core.errors import Code, Failure, Reason
from baton.core.messages.jobs import Cancel, DecodeJob, PrefillJob
from baton.core.request import Sampling
from baton.engine.state.outcome import AdmittedSequence, EngineOutcome
from baton.engine.state.step import StepPlan, StepResult
from baton.sim.sim_transfer_backend import LinkModel
from tests.times import TEST_TIMES
from tests.unit.worker.harness import Pair, expected_tokens, pair
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.virtual_loop import virtual

LONG = Sampling(max_tokens=200, ignore_eos=True)
POLL_S = 0.0002
SLOW_LINK = LinkModel(bytes_per_s=40_000.0)
"""Reading one block of the test layout (1 KiB) takes 26 ms."""

Phase = Callable[[Pair, PrefillJob, DecodeJob], bool]
PHASES: dict[str, Phase] = {
    "queued": lambda workers, prefill, decode: (
        workers.p.worker.jobs.num_open == 1 and workers.d.worker.jobs.num_open == 1
    ),
    "prefill": lambda workers, prefill, decode: len(workers.p.executor.plans) == 2,
    "transfer": lambda workers, prefill, decode: (
        workers.d.pool.counts().receiving > 0 and workers.d.pool.counts().used > 0
    ),
    "all but the last block": lambda workers, prefill, decode: workers.d.pool.counts().receiving == 1,
    "first token": lambda workers, prefill, decode: bool(workers.to_p.tokens(prefill.job)),
    "generating": lambda workers, prefill, decode: len(workers.to_d.tokens(decode.job)) > 5,
}


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)  # virtual time


async def phase_begins_s(phase: str) -> float:
    """Return how long after it was sent a job reaches `phase`. Every run in virtual time is the same."""
    async with pair(num_blocks=128, link=SLOW_LINK, max_num_batched_tokens=16) as workers:
        sent_s = asyncio.get_running_loop().time()
        prefill, decode = workers.send(num_tokens=60, sampling=LONG)
        await until(lambda: PHASES[phase](workers, prefill, decode))
        return asyncio.get_running_loop().time() - sent_s


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("what", ["cancel", "deadline"])
def test_job_ended_in_any_phase_sends_one_last_message_and_leaves_nothing(phase: str, what: str) -> None:
    @virtual
    async def ends() -> None:
        deadline_s = 60.0
        if what == "deadline":  # it counts from the receipt of a job, so it passes just after the phase begins
            deadline_s = await phase_begins_s(phase)
        async with pair(num_blocks=128, link=SLOW_LINK, max_num_batched_tokens=16) as workers:
            prefill, decode = workers.send(num_tokens=60, sampling=LONG, deadline_s=deadline_s)
            await until(lambda: PHASES[phase](workers, prefill, decode))
            code, reason = (
                (Code.CANCELLED, Reason.CANCELLED) if what == "cancel" else (Code.DEADLINE_EXCEEDED, Reason.DEADLINE)
            )
            if what == "cancel":
                workers.to_p.send(Cancel(job=prefill.job, reason=Reason.CANCELLED))
                workers.to_d.send(Cancel(job=decode.job, reason=Reason.CANCELLED))
            failure = await workers.to_d.failed(decode.job)
            assert (failure.code, failure.reason, failure.retriable) == (code, reason, False)
            await workers.until_clean(within_s=1.0)
            has_prefilled = bool(workers.to_p.tokens(prefill.job))
            assert len(workers.to_p.failures[prefill.job]) == (0 if has_prefilled else 1)
            workers.to_d.send(Cancel(job=decode.job, reason=Reason.CANCELLED))
            await asyncio.sleep(3.0)
            assert len(workers.to_d.failures[decode.job]) == 1
            workers.check_clean()

    ends()


@virtual
async def test_deadline_counts_from_receipt() -> None:
    async with pair() as workers:
        workers.p.executor.gate.clear()
        prefill, decode = workers.send(num_tokens=30, deadline_s=1.0)
        before_s = asyncio.get_running_loop().time()
        assert (await workers.to_d.failed(decode.job)).reason is Reason.DEADLINE
        assert (await workers.to_p.failed(prefill.job)).code is Code.DEADLINE_EXCEEDED
        assert 0.9 < asyncio.get_running_loop().time() - before_s < 1.2
        workers.p.executor.gate.set()
        await workers.until_clean()


@virtual
async def test_repeated_job_changes_nothing() -> None:
    async with pair() as workers:
        prefill, decode = workers.send(num_tokens=30)
        workers.to_p.send(prefill, prefill)
        workers.to_d.send(decode, decode)
        await workers.to_d.ended(decode.job)
        workers.to_d.acknowledges = False
        await workers.settle()
        assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
        assert len(workers.to_p.deltas[prefill.job]) == 1
        await workers.until_clean()


@virtual
async def test_ended_job_is_known_until_its_last_message_is_acknowledged() -> None:
    async with pair() as workers:
        workers.to_d.acknowledges = False
        job = decode_job(30)
        workers.to_d.send(job)
        await workers.to_d.ended(job.job)
        workers.to_d.send(job)
        await workers.settle()
        assert workers.d.worker.jobs.num_open == 0
        assert workers.to_d.tokens(job.job) == expected_tokens(job)


@virtual
async def test_job_repeated_after_its_acknowledgement_changes_nothing() -> None:
    async with pair() as workers:
        job = decode_job(30)
        workers.to_d.send(job)
        await workers.to_d.ended(job.job)
        await workers.settle()
        assert workers.d.worker.sessions.are_settled  # the gateway has acknowledged the last message
        workers.to_d.send(job)
        await workers.settle()
        assert workers.d.worker.jobs.num_open == 0
        assert workers.to_d.tokens(job.job) == expected_tokens(job)


@virtual
async def test_sample_cancelled_during_a_step_sends_no_more_tokens() -> None:
    async with pair() as workers:
        job = decode_job(30, sample_indices=(0, 1))
        workers.to_d.send(job)
        await workers.to_d.until(lambda: len(workers.to_d.tokens(job.job, 1)) == 3)
        workers.d.executor.gate.clear()
        await workers.settle()
        before = len(workers.to_d.tokens(job.job, 1))
        workers.to_d.send(Cancel(job=job.job, reason=Reason.CANCELLED, sample_indices=(1,)))
        await workers.settle()
        workers.d.executor.gate.set()
        await workers.to_d.ended(job.job)
        assert len(workers.to_d.tokens(job.job, 1)) == before
        assert workers.to_d.tokens(job.job) == expected_tokens(job)
        await workers.until_clean()


@virtual
async def test_receiving_blocks_of_an_ended_job_are_freed() -> None:
    async with pair() as workers:
        receiving = workers.d.pool.allocate_receiving(3)
        assert receiving is not None
        workers.d.worker.legs.deliver(
            EngineOutcome(
                admissions=(
                    AdmittedSequence(
                        seq_id=99,
                        block_table=tuple(receiving),
                        num_cached_blocks=0,
                        receiving_block_ids=tuple(receiving),
                    ),
                )
            )
        )
        workers.d.pool.unref(receiving)
        workers.check_clean()


@virtual
async def test_higher_attempt_supersedes_lower_ones() -> None:
    async with pair() as workers:
        _, first = workers.send(num_tokens=30, sampling=LONG)
        await workers.to_d.until(lambda: len(workers.to_d.tokens(first.job)) > 3)
        local = decode_job(30, attempt=2)
        workers.to_d.send(local)
        assert (await workers.to_d.failed(first.job)).reason is Reason.SUPERSEDED
        late = decode_job(30, attempt=1)
        workers.to_d.send(late)
        assert (await workers.to_d.failed(late.job)).reason is Reason.SUPERSEDED
        await workers.to_d.ended(local.job)
        assert workers.to_d.tokens(local.job) == expected_tokens(local)
        even_later = decode_job(30, attempt=1, request=b"request-0")
        workers.to_d.send(even_later)
        await workers.settle()
        await workers.until_clean()


@virtual
async def test_reconnected_gateway_gets_each_message_once() -> None:
    async with pair() as workers:
        _, decode = workers.send(num_tokens=30, sampling=LONG)
        for _ in range(5):
            seen = len(workers.to_d.tokens(decode.job))
            await workers.to_d.until(lambda seen=seen: len(workers.to_d.tokens(decode.job)) > seen + 10)  # type: ignore[misc]
            await workers.to_d.break_off()
            await asyncio.sleep(0.1)
            reply = await workers.to_d.connect()
            assert reply.resumed
            workers.to_d.send(decode)
        await workers.to_d.ended(decode.job)
        assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
        await workers.until_clean()


@virtual
async def test_jobs_of_a_gateway_that_does_not_reconnect_are_cancelled() -> None:
    async with pair() as workers:
        workers.p.executor.gate.clear()
        workers.send(num_tokens=30, sampling=LONG)
        await workers.settle()
        await workers.to_p.break_off()
        await workers.to_d.break_off()
        await asyncio.sleep(0.9 * TEST_TIMES["session_grace_s"])
        assert workers.d.worker.jobs.num_open == 1
        await asyncio.sleep(0.2 * TEST_TIMES["session_grace_s"])
        workers.p.executor.gate.set()
        await workers.until_clean()
        assert not (await workers.to_d.connect()).resumed


@virtual
async def test_cancelled_owner_leg_fails_the_reader_and_blames_the_owner() -> None:
    async with pair(num_blocks=128, max_num_batched_tokens=16) as workers:
        prefill, decode = workers.send(num_tokens=60)
        await until(lambda: len(workers.p.executor.plans) == 2)
        workers.p.executor.gate.clear()
        await until(lambda: 0 < workers.d.pool.counts().receiving < 15)
        workers.to_p.send(Cancel(job=prefill.job, reason=Reason.CANCELLED))
        failure = await workers.to_d.failed(decode.job)
        assert failure.retriable
        assert failure.blamed == workers.p.ref
        workers.p.executor.gate.set()
        await workers.until_clean()


@virtual
async def test_cancelling_the_owner_leg_after_its_first_token_changes_nothing() -> None:
    async with pair(num_blocks=128, link=SLOW_LINK) as workers:
        prefill, decode = workers.send(num_tokens=60)
        await workers.to_p.ended_prefill(prefill.job)
        workers.to_p.send(Cancel(job=prefill.job, reason=Reason.CANCELLED))
        await workers.to_d.ended(decode.job)
        assert workers.to_p.failures[prefill.job] == []
        await workers.until_clean()


@virtual
async def test_owner_death_fails_the_reader_and_pulled_blocks_stay_cached() -> None:
    async with pair(link=SLOW_LINK) as workers:
        _prefill, decode = workers.send(num_tokens=60)
        await until(lambda: workers.d.pool.counts().receiving in range(1, 8))
        await workers.cluster.kill("p")
        failure = await workers.to_d.failed(decode.job)
        assert failure.retriable
        assert failure.blamed == workers.p.ref
        await workers.until_clean()
        again = decode_job(60, attempt=1)
        workers.to_d.send(again)
        deltas = await workers.to_d.ended(again.job)
        assert workers.to_d.tokens(again.job) == expected_tokens(again)
        assert deltas[0].usage is not None
        assert deltas[0].usage.num_cached_tokens["device"] > 0


@virtual
async def test_owner_is_clean_within_a_lease_of_the_readers_death() -> None:
    async with pair(link=SLOW_LINK) as workers:
        prefill, decode = workers.send(num_tokens=60)
        await until(lambda: PHASES["transfer"](workers, prefill, decode))
        await workers.cluster.kill("d")
        assert workers.p.worker.owner.open_leases == 1
        await workers.until_clean(within_s=TEST_TIMES["lease_s"] + 0.2)


@virtual
async def test_owner_is_clean_after_the_claim_timeout_without_a_reader() -> None:
    async with pair() as workers:
        prefill, _ = workers.jobs(num_tokens=60)
        workers.to_p.send(prefill)
        await workers.to_p.ended_prefill(prefill.job)
        assert workers.p.pool.counts().held_for_others == 15
        await workers.until_clean(within_s=TEST_TIMES["kv_claim_timeout_s"] + 0.2)


@virtual
async def test_transfer_resumes_after_a_cut_peer_stream() -> None:
    async with pair(num_blocks=128, link=SLOW_LINK, max_num_batched_tokens=16) as workers:
        _prefill, decode = workers.send(num_tokens=60)
        for block in (12, 8, 4):
            await until(lambda block=block: 0 < workers.d.pool.counts().receiving <= block)  # type: ignore[misc]
            assert workers.cluster.cut("d:1", "p:1") == 1
        await workers.to_d.ended(decode.job)
        assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
        await workers.until_clean()


@virtual
async def test_requests_that_do_not_fit_together_run_one_after_the_other() -> None:
    async with pair(num_blocks=20, p_blocks=20) as workers:
        jobs = [workers.send(num_tokens=60, request=b"r%d" % n)[1] for n in range(4)]
        for job in jobs:
            await workers.to_d.ended(job.job)
            assert workers.to_d.tokens(job.job) == expected_tokens(job)
        await workers.until_clean()


@virtual
async def test_wait_for_memory_ends_with_no_free_blocks() -> None:
    async with pair(num_blocks=32) as workers:
        workers.d.executor.gate.clear()
        local = decode_job(100, request=b"local")
        workers.to_d.send(local)
        await workers.settle()
        _prefill, decode = workers.send(num_tokens=60)
        failure = await workers.to_d.failed(decode.job)
        assert (failure.code, failure.reason, failure.retriable, failure.blamed) == (
            Code.RESOURCE_EXHAUSTED,
            Reason.NO_FREE_BLOCKS,
            True,
            None,
        )
        assert workers.p.worker.owner.open_leases == 0 or await released(workers)
        workers.d.executor.gate.set()
        await workers.to_d.ended(local.job)
        await workers.until_clean()


async def released(workers: Pair) -> bool:
    await until(lambda: workers.p.worker.owner.open_leases == 0, within_s=0.5)
    return True


@virtual
async def test_request_that_can_never_fit_is_refused_immediately() -> None:
    async with pair(num_blocks=10) as workers:
        workers.p.executor.gate.clear()
        _, decode = workers.send(num_tokens=60)
        failure = await workers.to_d.failed(decode.job, within_s=0.5)
        assert (failure.reason, failure.retriable) == (Reason.NO_CAPACITY, True)
        workers.p.executor.gate.set()
        await workers.until_clean()


@virtual
async def test_too_many_jobs_are_refused() -> None:
    async with pair(max_queued_jobs=3) as workers:
        workers.p.executor.gate.clear()
        jobs = [workers.send(num_tokens=10, request=b"r%d" % n) for n in range(8)]
        await workers.settle()
        refused_at_d = [f.reason for _, d in jobs for f in workers.to_d.failures[d.job]]
        assert refused_at_d == [Reason.QUEUE_FULL] * 5
        assert {f.reason for p, _ in jobs for f in workers.to_p.failures[p.job]} == {Reason.QUEUE_FULL}
        workers.p.executor.gate.set()
        await workers.until_clean()


class OneSequenceFails:
    """An executor that fails the longest sequence of a plan, as it does for NaN logits."""

    def __init__(self, workers: Pair, num_tokens: int) -> None:
        inner = workers.p.executor.inner
        self.execute_inner = inner.execute
        self.num_tokens = num_tokens

    async def __call__(self, plan: StepPlan) -> StepResult:
        result = await self.execute_inner(plan)
        failing = [s.seq_id for s in plan.sequences if s.context_len >= self.num_tokens]
        failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="logits that are not numbers")
        samples = {seq_id: tokens for seq_id, tokens in result.samples.items() if seq_id not in failing}
        return StepResult(step_id=plan.step_id, samples=samples, failures=dict.fromkeys(failing, failure))


@pytest.mark.fault("F-13")
@virtual
async def test_failed_sequence_is_not_announced_and_the_others_are() -> None:
    """Its first three chunks were announced before the failure. Neither worker keeps their blocks."""
    async with pair(max_num_batched_tokens=16) as workers:
        workers.p.executor.inner.execute = OneSequenceFails(workers, 60)  # type: ignore[method-assign]
        bad, bad_decode = workers.send(num_tokens=60, request=b"bad")
        _, good = workers.send(num_tokens=30, request=b"good")
        failure = await workers.to_p.failed(bad.job)
        assert (failure.reason, failure.retriable) == (Reason.NUMERICAL_ERROR, False)
        assert (await workers.to_d.failed(bad_decode.job)).retriable
        await workers.to_d.ended(good.job)
        assert workers.to_d.tokens(good.job) == expected_tokens(good)
        await workers.until_clean()
        assert workers.to_p.tokens(bad.job) == workers.to_d.tokens(bad_decode.job) == []
        assert workers.p.pool.counts().cached == 7
        assert set(workers.p.pool.hashes()) <= set(workers.d.pool.hashes())
        assert workers.d.pool.counts().cached == 9, "the prompt's 7 blocks, and 2 of the generated tokens"


@virtual
async def test_two_gateways_do_not_mix() -> None:
    async with pair() as workers:
        other = workers.cluster.gateway(workers.d, "g1")
        await other.connect()
        mine, theirs = decode_job(30, request=b"mine", sampling=LONG), decode_job(30, request=b"theirs")
        workers.to_d.send(mine)
        await workers.to_d.until(lambda: workers.to_d.tokens(mine.job))
        other.send(theirs, mine, Cancel(job=mine.job, reason=Reason.CANCELLED))
        assert (await other.failed(mine.job)).reason is Reason.SUPERSEDED
        await other.ended(theirs.job)
        seen = len(workers.to_d.tokens(mine.job))
        await workers.to_d.until(lambda: len(workers.to_d.tokens(mine.job)) > seen)
        workers.to_d.send(Cancel(job=mine.job, reason=Reason.CANCELLED))
        assert (await workers.to_d.failed(mine.job)).reason is Reason.CANCELLED
        assert (workers.to_d.tokens(theirs.job), other.tokens(mine.job)) == ([], [])
        await workers.until_clean()
