"""Workers with another sampler version reject jobs, so a response never mixes tokens of two versions."""

import pytest

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.kv.kv_layout import SAMPLER_VERSION
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.worker.jobs.job_table import other_sampler
from tests.unit.gateway.fakes import Cluster, answer_to, cluster
from tests.unit.gateway.virtual import virtual


def refuse(job: PrefillJob | DecodeJob) -> Failure | None:
    """Fail a job as a worker of the next release does."""
    return other_sampler(job.sampling.sampler_version, SAMPLER_VERSION + 1)


async def ask(c: Cluster) -> str:
    return (await c.complete("hello", seed=5)).texts[0]


@virtual
async def test_request_moves_to_a_worker_with_the_same_sampler_version() -> None:
    async with cluster(("h0", "hybrid"), ("h1", "hybrid")) as c:
        c.scheduler.workers[0].fail_job = refuse
        assert (await ask(c)).encode() == answer_to(b"hello", 8)
        assert [job.sampling.sampler_version for worker in c.scheduler.workers for job in worker.jobs] == [
            SAMPLER_VERSION
        ] * 2


@virtual
async def test_client_gets_the_reason_if_no_worker_has_the_same_sampler_version() -> None:
    async with cluster(("h0", "hybrid"), max_attempts=3) as c:
        c.scheduler.workers[0].fail_job = refuse
        with pytest.raises(
            Refused, match=f"sampler_version is {SAMPLER_VERSION}; this worker supports {SAMPLER_VERSION + 1}"
        ) as refused:
            await ask(c)
        failure = refused.value.failure
        assert (failure.code, failure.reason, failure.retry_after_s) == (Code.UNAVAILABLE, Reason.LAYOUT_MISMATCH, 1.0)
