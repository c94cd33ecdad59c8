"""Workers that keep KV on disk: after a kill, and after a restart of the whole cluster, prompts are reloaded.

With the demo model; every token is compared with an answer of the model alone.
"""

from pathlib import Path
from random import Random

import pytest

from baton.core.client_api import ClusterStatus
from baton.core.request import Sampling
from tests.cluster import DEMO_BLOCK_BYTES, ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Client, Request, Response

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MIB = 2**20
NUM_PROMPTS, PROMPT_TOKENS = 3, 800
PROMPT_BLOCKS = PROMPT_TOKENS // 16 - 1
"""Blocks of a prompt that are reused. The last one is computed again, because it has the last token."""
DISK_SHARE = 0.95
"""Least share of the full blocks that is cached after the restart. It can only come from the disk."""


def new_request(number: int) -> Request:
    rng = Random(number)
    prompt = tuple(rng.randrange(4, 4096) for _ in range(PROMPT_TOKENS))
    return Request(prompt=prompt, sampling=Sampling(max_tokens=16, temperature=0.0, seed=number, ignore_eos=True))


def held_on_disk(status: ClusterStatus) -> int:
    return sum(tier.held for worker in status.workers for tier in worker.tiers if tier.tier == "disk")


def cached_share(responses: list[Response]) -> float:
    """Return the share of the prompts that was in any tier."""
    cached = sum(sum(each.timeline.cached_tokens_by_tier.values()) for each in responses)
    return cached / (PROMPT_TOKENS * len(responses))


async def sent_twice(client: Client, number: int) -> list[Response]:
    """Send one prompt twice, one after the other, so that its blocks are reused."""
    return [await client.send(new_request(number)) for _ in range(2)]


async def answered(client: Client) -> list[Response]:
    return [response for number in range(NUM_PROMPTS) for response in await sent_twice(client, number)]


async def until_on_disk(cluster: ProcessCluster, num_prompts: int) -> None:
    num_blocks = num_prompts * PROMPT_BLOCKS
    await cluster.until(lambda status: held_on_disk(status) >= num_blocks, 60.0, f"{num_blocks} blocks on disk")


@pytest.mark.fault("F-59")
async def test_a_restarted_worker_answers_from_its_disk(tmp_path: Path, checker: ExactnessChecker) -> None:
    settings = {"transfer": "local", "disk_kv": str(tmp_path / "kv"), "disk_kv_size": 64 * MIB, "admin_port": 0}
    settings |= {"kv_memory": 120 * DEMO_BLOCK_BYTES, "max_model_len": 1024}  # less than the prompts need
    async with process_cluster(prefill=0, decode=0, hybrid=1, **settings) as cluster, Client(cluster) as client:
        before = []
        for number in range(NUM_PROMPTS):  # memory holds two prompts, and evicts blocks that are not copied yet
            before += await sent_twice(client, number)
            await until_on_disk(cluster, number + 1)
        await cluster.kill("h0")
        await cluster.start_again("h0")
        await cluster.until_workers("h0")
        after = await answered(client)
        checker.check([answer for response in (*before, *after) for answer in response.answers()])
        assert cached_share(after[::2]) >= DISK_SHARE * (PROMPT_TOKENS - 16) / PROMPT_TOKENS
        assert sum(response.timeline.cached_tokens_by_tier.get("disk", 0) for response in after) > PROMPT_TOKENS
        assert not any(response.timeline.cached_tokens_by_tier.get("disk", 0) for response in before)


@pytest.mark.long
async def test_a_restarted_cluster_hits_as_much_as_before(tmp_path: Path, checker: ExactnessChecker) -> None:
    """All processes are new. Both roles find their prompts on their disks."""
    settings = {"transfer": "local", "disk_kv": str(tmp_path / "kv"), "disk_kv_size": 64 * MIB, "admin_port": 0}
    topology = {"prefill": 1, "decode": 1, "hybrid": 0}
    async with process_cluster(**topology, **settings) as cluster, Client(cluster) as client:
        before = await answered(client)
        await until_on_disk(cluster, NUM_PROMPTS)
    async with process_cluster(**topology, **settings) as cluster, Client(cluster) as client:
        await until_on_disk(cluster, NUM_PROMPTS)
        after = await answered(client)
    checker.check([answer for response in (*before, *after) for answer in response.answers()])
    assert cached_share(after[::2]) >= cached_share(before[1::2]) - 0.02
    assert cached_share(before[::2]) == 0.0
