"""Tests of requests with a prefill and a decode worker: exact answers, transfers, and no leaks."""

from dataclasses import replace

import pytest

from baton.core.errors import Code, Reason
from baton.core.kv.block_hash import first_visible_block
from baton.core.messages.jobs import Cancel
from baton.core.request import FinishReason, Sampling
from tests.unit.worker.harness import BLOCK, Pair, expected_tokens, pair
from tests.unit.worker.job_builders import decode_job, prefill_job
from tests.unit.worker.virtual_loop import virtual


@virtual
async def test_prefill_and_decode_workers_answer_one_request() -> None:
    async with pair() as workers:
        prefill, decode = workers.send(num_tokens=30)
        deltas = await workers.to_d.ended(decode.job)
        expected = expected_tokens(decode)
        assert workers.to_d.tokens(decode.job) == expected
        assert [(d.output_index, d.token_ids, d.finish) for d in workers.to_p.deltas[prefill.job]] == [
            (0, (expected[0],), None)
        ]
        assert [d.output_index for d in deltas] == list(range(8))
        assert workers.to_d.finishes(decode.job) == [(0, FinishReason.LENGTH)]
        await workers.until_clean()


@virtual
@pytest.mark.parametrize(
    "kv_windows", [(2, 2), (9, 9), (14, 14), (200, 200), (0, 9), (9, 0, 0, 5), (0, 2, 2, 2)], ids=str
)
async def test_only_blocks_within_the_window_are_pulled(kv_windows: tuple[int, ...]) -> None:
    """The answer is the same, also if the prompt is in both caches, or too long for one step."""
    async with pair(kv_windows=kv_windows, max_num_batched_tokens=32, num_blocks=128, p_blocks=128) as workers:
        for request, attempt, num_tokens in ((b"one", 0, 30), (b"one", 1, 30), (b"two", 0, 90)):
            _, decode = workers.send(num_tokens=num_tokens, request=request, attempt=attempt)
            last = (await workers.to_d.ended(decode.job))[-1]
            assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
            assert last.timeline is not None
            layout = workers.d.layout
            needed = sum(
                -(-num_tokens // BLOCK) - first_visible_block(num_tokens, table.window, BLOCK)
                for table in layout.tables
            )
            if not attempt:
                assert last.timeline.kv_bytes == needed * layout.block_bytes
            await workers.until_clean()


@virtual
async def test_each_leg_reports_its_timeline() -> None:
    async with pair() as workers:
        prefill, decode = workers.send(num_tokens=30)
        await workers.to_d.ended(decode.job)
        first, last = workers.to_p.deltas[prefill.job][0], workers.to_d.deltas[decode.job][-1]
        assert first.usage is not None
        assert (first.usage.num_prompt_tokens, first.usage.num_cached_tokens) == (30, {})
        assert first.timeline is not None
        assert (first.timeline.worker_id, first.timeline.num_computed_tokens) == ("p", 30)
        assert first.timeline.compute_s > 0
        assert (first.timeline.kv_wait_s, first.timeline.first_decode_s, first.timeline.decode_s) == (
            None,
            None,
            None,
        ), "it did not"
        assert last.timeline is not None
        assert (last.timeline.worker_id, last.timeline.transport) == ("d", "simulated")
        assert last.timeline.kv_bytes == 8 * workers.d.layout.block_bytes
        assert last.timeline.kv_wait_s > 0
        assert 0 < last.timeline.kv_exposed_s < 0.1
        assert 0 < last.timeline.first_decode_s < last.timeline.decode_s
        assert (last.timeline.queue_s, last.timeline.compute_s) == (None, None)
        assert [d.timeline for d in workers.to_d.deltas[decode.job][1:-1]] == [None] * 6


@virtual
async def test_decode_leg_repeats_the_prefill_timeline() -> None:
    async with pair() as workers:
        for attempt in range(2):  # the second time from the cache
            prefill, decode = workers.send(num_tokens=30, request=b"same", attempt=attempt)
            await workers.to_d.ended(decode.job)
            said, repeated = await workers.to_p.ended_prefill(prefill.job), workers.to_d.deltas[decode.job][0]
            assert said.timeline is not None
            assert (repeated.timeline, repeated.usage) == (said.timeline, said.usage)


@virtual
async def test_single_token_answer_has_the_prefill_timeline_from_both_legs() -> None:
    async with pair() as workers:
        first = expected_tokens(decode_job(30))[0]
        prefill, decode = workers.send(num_tokens=30, sampling=Sampling(max_tokens=8, stop_token_ids=(first,)))
        (delta,) = await workers.to_d.ended(decode.job)
        assert (delta.finish, delta.timeline) == (
            FinishReason.STOP,
            (await workers.to_p.ended_prefill(prefill.job)).timeline,
        )


@virtual
async def test_kv_of_a_long_prompt_is_pulled_while_it_is_computed() -> None:
    async with pair(max_num_batched_tokens=64) as workers:
        _, decode = workers.send(num_tokens=200, request=b"long")
        await workers.to_d.ended(decode.job)
        timeline = workers.to_d.deltas[decode.job][-1].timeline
        assert timeline is not None
        assert timeline.kv_wait_s < workers.p.executor.inner._cost.base_s * 6  # type: ignore[attr-defined]
        assert len([plan for plan in workers.p.executor.plans if plan.sequences]) == 4
        await workers.until_clean()


@virtual
async def test_blocks_that_the_reader_holds_are_not_read() -> None:
    async with pair() as workers:
        _, first = workers.send(num_tokens=30, request=b"same")
        await workers.to_d.ended(first.job)
        prefill, again = workers.send(num_tokens=30, request=b"same", attempt=1)
        await workers.to_d.ended(again.job)
        assert workers.to_d.tokens(again.job) == expected_tokens(again)
        timeline = workers.to_d.deltas[again.job][-1].timeline
        assert timeline is not None
        assert (timeline.num_cached_tokens, timeline.kv_bytes) == (7 * BLOCK, workers.d.layout.block_bytes)
        usage = workers.to_p.deltas[prefill.job][0].usage
        assert usage is not None
        assert usage.num_cached_tokens == {"device": 7 * BLOCK}
        await workers.until_clean()


@virtual
async def test_cached_blocks_evicted_before_kv_ready_are_requested_again() -> None:
    async with pair(num_blocks=16) as workers:
        _, first = workers.send(num_tokens=20, request=b"same")
        await workers.to_d.ended(first.job)
        workers.p.executor.gate.clear()
        _, again = workers.send(num_tokens=20, request=b"same", attempt=1)
        local = decode_job(56, request=b"local", sampling=Sampling(max_tokens=2, ignore_eos=True))
        workers.to_d.send(local)
        await workers.to_d.ended(local.job)
        workers.p.executor.gate.set()
        await workers.to_d.ended(again.job)
        assert workers.to_d.tokens(again.job) == expected_tokens(again)
        timeline = workers.to_d.deltas[again.job][-1].timeline
        assert timeline is not None
        assert (timeline.num_cached_tokens, timeline.kv_bytes) == (
            BLOCK,
            4 * workers.d.layout.block_bytes,
        )  # of four that it had
        await workers.until_clean()


@virtual
async def test_samples_share_one_transfer_and_differ() -> None:
    async with pair() as workers:
        prefill, decode = workers.send(num_tokens=30, sample_indices=(0, 1, 4))
        await workers.to_d.ended(decode.job, samples=(0, 1, 4))
        answers = {sample: workers.to_d.tokens(decode.job, sample) for sample in (0, 1, 4)}
        assert answers == {sample: expected_tokens(decode, sample) for sample in (0, 1, 4)}
        assert len({tuple(answer) for answer in answers.values()}) == 3
        assert sorted(d.sample_index for d in workers.to_p.deltas[prefill.job]) == [0, 1, 4]
        assert [d.usage is not None for d in workers.to_p.deltas[prefill.job]] == [False, False, True]
        timelines = [d.timeline for d in workers.to_d.deltas[decode.job] if d.timeline is not None]
        assert [(t.worker_id, t.kv_bytes) for t in timelines] == [("p", 0), ("d", 8 * workers.d.layout.block_bytes)]
        await workers.until_clean()


@virtual
async def test_cancelled_sample_ends_and_the_others_continue() -> None:
    async with pair() as workers:
        sampling = Sampling(max_tokens=40, ignore_eos=True)
        _, decode = workers.send(num_tokens=30, sample_indices=(0, 1), sampling=sampling)
        await workers.to_d.until(lambda: len(workers.to_d.tokens(decode.job, 1)) > 3)
        workers.to_d.send(Cancel(job=decode.job, reason=Reason.CANCELLED, sample_indices=(1,)))
        await workers.to_d.ended(decode.job)
        assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
        assert len(workers.to_d.tokens(decode.job, 1)) < 40
        assert workers.to_d.finishes(decode.job) == [(0, FinishReason.LENGTH)]
        assert workers.to_d.deltas[decode.job][-1].timeline is not None
        await workers.until_clean()


@virtual
async def test_sample_cancelled_at_the_owner_does_not_fail_the_others() -> None:
    async with pair() as workers:
        workers.p.executor.gate.clear()
        prefill, decode = workers.send(num_tokens=30, sample_indices=(0, 1))
        await workers.settle()
        workers.to_p.send(Cancel(job=prefill.job, reason=Reason.CANCELLED, sample_indices=(1,)))
        await workers.settle()
        workers.p.executor.gate.set()
        await workers.to_d.ended(decode.job)
        assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
        assert workers.to_d.tokens(decode.job, 1) == []
        await workers.until_clean()


@virtual
async def test_replayed_outputs_continue_exactly() -> None:
    async with pair() as workers:
        whole = expected_tokens(decode_job(30))
        replayed = {
            "token_ids": decode_job(30).token_ids + type(decode_job(30).token_ids)("I", whole[:3]),
            "num_prompt_tokens": 30,
        }
        prefill, decode = workers.send(num_tokens=30, attempt=1, **replayed)
        deltas = await workers.to_d.ended(decode.job)
        assert workers.to_p.deltas[prefill.job][0].output_index == 3
        assert deltas[0].output_index == 3
        assert workers.to_d.tokens(decode.job) == whole[3:]
        await workers.until_clean()


@virtual
async def test_first_token_that_ends_the_request_frees_the_decode_leg() -> None:
    async with pair() as workers:
        prefill, decode = workers.send(num_tokens=30, sampling=Sampling(max_tokens=1))
        deltas = await workers.to_d.ended(decode.job)
        assert (await workers.to_p.ended(prefill.job))[0].finish is FinishReason.LENGTH
        assert [(d.token_ids, d.finish) for d in deltas] == [((expected_tokens(decode)[0],), FinishReason.LENGTH)]
        assert deltas[0].timeline is not None
        assert deltas[0].timeline.kv_bytes == 0
        assert not workers.d.executor.plans
        await workers.until_clean(within_s=1.0)


@virtual
async def test_prefill_without_a_reader_creates_no_transfer() -> None:
    async with pair() as workers:
        job = prefill_job(30, sampling=Sampling(max_tokens=1))
        workers.to_p.send(job)
        deltas = await workers.to_p.ended(job.job)
        assert [d.token_ids for d in deltas] == [(expected_tokens(job)[0],)]
        assert workers.p.worker.owner.open_leases == 0
        workers.check_clean()


@virtual
async def test_decode_worker_can_compute_the_prompt_itself() -> None:
    async with pair() as workers:
        job = decode_job(30)
        workers.to_d.send(job)
        deltas = await workers.to_d.ended(job.job)
        assert workers.to_d.tokens(job.job) == expected_tokens(job)
        assert deltas[0].usage is not None
        assert deltas[0].usage.num_prompt_tokens == 30
        assert deltas[-1].timeline is not None
        assert (deltas[-1].timeline.num_computed_tokens, deltas[-1].timeline.kv_bytes) == (30, 0)
        assert deltas[-1].timeline.compute_s > 0
        workers.check_clean()


@virtual
async def test_pulled_blocks_are_cached_for_the_next_prompt() -> None:
    async with pair() as workers:
        _, pulled = workers.send(num_tokens=30, request=b"same")
        await workers.to_d.ended(pulled.job)
        local = decode_job(30, request=b"same", attempt=1)
        workers.to_d.send(local)
        deltas = await workers.to_d.ended(local.job)
        assert deltas[0].usage is not None
        assert deltas[0].usage.num_cached_tokens == {"device": 7 * BLOCK}


@virtual
async def test_prompt_with_another_salt_finds_no_cached_blocks() -> None:
    async with pair() as workers:
        _, first = workers.send(num_tokens=30, request=b"same", cache_salt=b"a")
        await workers.to_d.ended(first.job)
        prefill, again = workers.send(num_tokens=30, request=b"same", attempt=1, cache_salt=b"b")
        await workers.to_d.ended(again.job)
        usage = workers.to_p.deltas[prefill.job][0].usage
        assert usage is not None
        assert usage.num_cached_tokens == {}
        timeline = workers.to_d.deltas[again.job][-1].timeline
        assert timeline is not None
        assert timeline.kv_bytes == 8 * workers.d.layout.block_bytes


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_job_that_names_its_own_worker_as_peer_is_refused(role: str) -> None:
    @virtual
    async def refused() -> None:
        async with pair() as workers:
            job = prefill_job(reader=workers.d.ref) if role == "prefill" else decode_job(owner=workers.d.ref)
            workers.to_d.send(job)
            failure = await workers.to_d.failed(job.job)
            assert (failure.code, failure.retriable) == (Code.INVALID_ARGUMENT, False)
            workers.check_clean()

    refused()


@virtual
async def test_invalid_jobs_are_refused_and_leave_nothing() -> None:
    async with pair() as workers:
        wrong = [
            decode_job(10, request=b"a", sample_indices=()),
            decode_job(10, request=b"b", sample_indices=(0, 0)),
            decode_job(10, request=b"c", num_prompt_tokens=11),
            decode_job(10, request=b"d", num_prompt_tokens=0),
            decode_job(5000, request=b"e"),
            replace(decode_job(1, request=b"f"), token_ids=decode_job(0, request=b"f").token_ids),
        ]
        workers.to_d.send(*wrong)
        for job in wrong:
            assert (await workers.to_d.failed(job.job)).code is Code.INVALID_ARGUMENT
        workers.check_clean()


async def run_many(workers: Pair, count: int) -> None:
    jobs = [workers.send(num_tokens=7 + 9 * n, request=b"many-%d" % n)[1] for n in range(count)]
    for job in jobs:
        await workers.to_d.ended(job.job)
        assert workers.to_d.tokens(job.job) == expected_tokens(job)


@virtual
async def test_all_tokens_of_a_step_are_sent_in_one_message() -> None:
    async with pair(num_blocks=256) as workers:
        await run_many(workers, 8)
        num_deltas = sum(len(step.deltas) for step in workers.to_d.steps)
        assert num_deltas == 64
        assert len(workers.to_d.steps) <= len(workers.d.executor.plans) + 8
        await workers.until_clean()
