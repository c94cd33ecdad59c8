"""A request that kills its workers is found and refused, and the requests beside it are resumed."""

import asyncio
from random import Random

import pytest

from baton.core.request import Sampling
from tests.cache_audit import CacheAuditor
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Request, send_all

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MARKER = 4000
"""A token that no other prompt of these tests contains. A step with it ends the process."""
WORKERS = ("h0", "h1", "h2", "h3")
"""One more than a poison request may cost."""


@pytest.mark.long  # `make test` covers this by tests/unit/gateway/test_poison_detector.py
@pytest.mark.fault("F-10")
async def test_request_that_kills_three_workers_is_refused_and_all_others_are_resumed(
    checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    rng = Random(10)
    poison = Request(prompt=(5, 6, MARKER), sampling=Sampling(max_tokens=4, temperature=0.0, ignore_eos=True))
    others = [
        Request(
            prompt=tuple(rng.randrange(4, 3900) for _ in range(60)),
            sampling=Sampling(max_tokens=200, temperature=0.8, seed=number, num_logprobs=5, ignore_eos=True),
        )
        for number in range(4)
    ]
    failpoints = dict.fromkeys(WORKERS, f"sequence_step[token={MARKER}]=exit")
    # A long detection time: on a busy machine a refused connection is still seen as a death.
    settings = {"detection_s": 4.0, "scheduler_wait_s": 30.0}
    async with process_cluster(prefill=0, decode=0, hybrid=len(WORKERS), failpoints=failpoints, **settings) as cluster:
        first, *rest = await send_all(cluster, [poison, *others])
        assert first.failure == "poison"
        assert [response.failure for response in rest] == [""] * len(others)
        checker.check([answer for response in rest for answer in response.answers()])
        dead = await _until_dead(cluster, 3)
        (alive,) = set(WORKERS) - set(dead)
        await cluster.until_workers(alive, limit_s=10)
        await cluster.check_clean()
        await auditor.audit(cluster)


async def _until_dead(cluster: ProcessCluster, number: int) -> list[str]:
    """Wait until `number` workers have ended. A lost connection shows a death before the exit code does."""
    end_s = asyncio.get_running_loop().time() + 20.0
    while True:
        dead = [name for name in WORKERS if cluster.children[name].exit_code is not None]
        if len(dead) >= number:
            assert len(dead) == number
            return dead
        assert asyncio.get_running_loop().time() < end_s, f"only {dead} have ended\n{cluster.ends_of_logs()}"
        await asyncio.sleep(0.05)
