"""Tests of jobs that a worker must refuse."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import Code, Reason
from baton.core.kv.kv_layout import SAMPLER_VERSION
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import Sampling
from baton.runtime.process.byte_budget import Account
from baton.worker.jobs import leg
from baton.worker.worker_budget import job_bytes
from tests.unit.worker.harness import expected_tokens, pair
from tests.unit.worker.job_builders import decode_job, prefill_job
from tests.unit.worker.virtual_loop import virtual

OTHER = Sampling(max_tokens=8, ignore_eos=True, sampler_version=SAMPLER_VERSION + 1)


@pytest.mark.parametrize("make", [prefill_job, decode_job])
@virtual
async def test_job_of_another_sampler_version_is_refused(
    make: Callable[..., PrefillJob | DecodeJob],
) -> None:
    async with pair() as workers:
        job = make(30, sampling=OTHER)
        workers.to_d.send(job)
        failure = await workers.to_d.failed(job.job)
        assert (failure.code, failure.reason, failure.retriable) == (Code.UNAVAILABLE, Reason.LAYOUT_MISMATCH, True)
        assert failure.message.startswith(
            f"sampler_version is {SAMPLER_VERSION + 1}; this worker supports {SAMPLER_VERSION}."
        )
        assert workers.d.executor.plans == []
        same = decode_job(30, request=b"same")
        workers.to_d.send(same)
        await workers.to_d.ended(same.job)
        assert workers.to_d.tokens(same.job) == expected_tokens(same)
        await workers.until_clean()


@virtual
async def test_sampler_version_is_compared_with_the_workers_layout() -> None:
    """The version in the worker's layout is the one that jobs are compared with."""
    async with pair() as workers:
        parts = workers.d.worker.jobs._parts
        workers.d.worker.jobs._parts = replace(parts, sampler_version=SAMPLER_VERSION + 1)
        assert parts.sampler_version == workers.d.layout.sampler_version
        job = decode_job(30, sampling=OTHER)
        workers.to_d.send(job)
        await workers.to_d.ended(job.job)


@virtual
async def test_too_long_prompt_is_refused_before_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(*_: object) -> None:
        raise AssertionError("hashed")

    monkeypatch.setattr(leg, "chain", chain)
    async with pair() as workers:
        job = decode_job(4096)
        workers.to_d.send(job)
        failure = await workers.to_d.failed(job.job)
        assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, Reason.CONTEXT_LENGTH_EXCEEDED)
        assert "4096 tokens" in failure.message


@virtual
async def test_job_over_the_memory_budget_is_refused_with_the_arithmetic_and_may_run_elsewhere() -> None:
    first, second = decode_job(30, request=b"first"), decode_job(30, request=b"second")
    needed = job_bytes(first, 4096)
    async with pair(memory_limits={Account.JOBS: needed + 1}) as workers:
        budget = workers.d.worker.budget
        workers.d.executor.gate.clear()
        workers.to_d.send(first)
        workers.to_d.send(second)
        failure = await workers.to_d.failed(second.job)
        assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, Reason.MEMORY_BUDGET)
        assert failure.retriable
        free = f"1 of {needed + 1:,} bytes for jobs are free"
        assert failure.message == f"the job needs {needed:,} bytes; {free}; retry later"
        workers.d.executor.gate.set()
        await workers.to_d.ended(first.job)
        await workers.until_clean()
        await workers.to_d.until(lambda: budget.used(Account.JOBS) == 0)


@virtual
async def test_job_that_never_fits_the_memory_budget_names_the_setting() -> None:
    async with pair(memory_limits={Account.JOBS: 1000}) as workers:
        job = decode_job(1000)
        workers.to_d.send(job)
        failure = await workers.to_d.failed(job.job)
        assert (failure.code, failure.retriable) == (Code.INVALID_ARGUMENT, False)
        assert "raise --memory-budget of the worker" in failure.message


@virtual
async def test_prefill_job_is_charged_for_one_token_per_sample() -> None:
    """A prefill job with the largest legal output fits where the decode job of the same request does not."""
    request: dict[str, Any] = {
        "sampling": Sampling(max_tokens=2**31 - 1, ignore_eos=True),
        "sample_indices": tuple(range(128)),
    }
    prefill, decode = prefill_job(30, **request), decode_job(30, request=b"decode", **request)
    shorter = replace(prefill, sampling=Sampling(max_tokens=1))
    assert job_bytes(prefill, 2**20) == job_bytes(shorter, 2**20) < 2**20
    assert job_bytes(decode, 2**20) > 2**29
    async with pair(memory_limits={Account.JOBS: job_bytes(shorter, 4096)}) as workers:
        workers.to_p.send(prefill)
        await workers.to_p.until(lambda: workers.to_p.failures[prefill.job] or workers.to_p.tokens(prefill.job, 127))
        assert [len(workers.to_p.tokens(prefill.job, sample)) for sample in range(128)] == [1] * 128
        workers.to_d.send(decode)
        assert (await workers.to_d.failed(decode.job)).reason is Reason.MEMORY_BUDGET
