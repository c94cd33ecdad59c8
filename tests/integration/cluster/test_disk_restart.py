"""Workers that keep KV on disk: after a kill, and after a restart of the whole cluster, prompts are reloaded.

With the demo model; every token is compared with an answer of the model alone.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.core.client_api import ClusterStatus
from baton.core.cluster.placement import Placement
from baton.core.messages.jobs import PrefixSource
from baton.core.request import Sampling
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from tests.cluster import DEMO_BLOCK_BYTES, ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Client, Request, Response
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MIB = 2**20
NUM_PROMPTS, PROMPT_TOKENS = 3, 800
PROMPT_BLOCKS = PROMPT_TOKENS // 16 - 1
"""Blocks of a prompt that are reused. The last one is computed again, because it has the last token."""
DEVICE_BLOCKS = 240
DISK_SHARE = 0.95
"""Least share of the full blocks that is cached after the restart. It can only come from the disk."""
SLOW_STEPS = "executor_step=sleep:0.03"
"""Makes computing a prompt worth more than reading it, also from a busy disk."""


def new_request(number: int, max_tokens: int = 16) -> Request:
    rng = Random(number)
    prompt = tuple(rng.randrange(4, 4096) for _ in range(PROMPT_TOKENS))
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, seed=number, ignore_eos=True)
    return Request(prompt=prompt, sampling=sampling)


def held_on_disk(status: ClusterStatus) -> int:
    return sum(tier.held for worker in status.workers for tier in worker.tiers if tier.tier == "disk")


def cached_share(responses: list[Response]) -> float:
    """Return the share of the prompts that was in any tier."""
    cached = sum(sum(each.timeline.cached_tokens_by_tier.values()) for each in responses)
    return cached / (PROMPT_TOKENS * len(responses))


def has_warm_start(status: ClusterStatus) -> bool:
    """Return True once the decode worker has loaded three quarters of its device from its disk."""
    return any(
        worker.role.can_decode and worker.blocks.cached >= 0.7 * worker.blocks.total for worker in status.workers
    )


def is_mostly_on_disk(source: PrefixSource | None) -> bool:
    return source is not None and source.num_disk_blocks > PROMPT_BLOCKS // 2


async def decision_of(cluster: ProcessCluster, response: Response) -> Placement:
    assert response.timeline is not None
    async with open_channel(cluster.grpc_address, channel_options(10.0)) as channel:
        admin = AdminClient(channel, cluster.grpc_address, call_s=60.0)
        placed = (await admin.explain(response.timeline.request_id))[-1].placement
    assert placed is not None
    return placed


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
    topology: dict[str, Any] = {"prefill": 0, "decode": 0, "hybrid": 1, "failpoints": {"h0": SLOW_STEPS}}
    async with process_cluster(**topology, **settings) as cluster, Client(cluster) as client:
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


@pytest.mark.long  # `make test` covers this by test_disk_of_peer.py, in tests/sim and in tests/unit/worker
async def test_a_prompt_on_the_disk_of_a_decode_worker_is_not_computed_again(
    tmp_path: Path, checker: ExactnessChecker
) -> None:
    """All processes are new, and the prefill worker has no disk. At start the decode worker does not load all
    prompts from its disk. They ask for one token, so it does not take them itself."""
    settings = {"transfer": "local", "policy": "kv_centric", "admin_port": 0, "kv_announce_every": 1} | LONG_TIMES
    settings |= {"disk_kv": str(tmp_path / "kv"), "disk_kv_size": 64 * MIB, "max_model_len": 1024}
    settings |= {"kv_memory": DEVICE_BLOCKS * DEMO_BLOCK_BYTES}
    num_prompts = 2 * NUM_PROMPTS

    @asynccontextmanager
    async def cluster_with_one_disk() -> AsyncIterator[tuple[ProcessCluster, Client]]:
        async with process_cluster(prefill=0, decode=0, wait=False, **settings) as cluster:
            await asyncio.gather(
                cluster.start_worker("p0", disk_kv=None, disk_kv_size=None), cluster.start_worker("d0")
            )
            await cluster.wait_ready()
            async with Client(cluster) as client:
                yield cluster, client

    async with cluster_with_one_disk() as (cluster, client):
        before = [response for number in range(num_prompts) for response in await sent_twice(client, number)]
        await until_on_disk(cluster, num_prompts)
    async with cluster_with_one_disk() as (cluster, client):
        await until_on_disk(cluster, num_prompts)
        await cluster.until(has_warm_start, 60.0, "a warm start")
        after = [await client.send(new_request(number, max_tokens=1)) for number in range(num_prompts)]
        sources = [(await decision_of(cluster, response)).prefix_source for response in after]
        await cluster.check_clean()
    checker.check([answer for response in (*before, *after) for answer in response.answers()])
    of_disk = [response for response, source in zip(after, sources, strict=True) if is_mostly_on_disk(source)]
    assert len(of_disk) > 0
    assert cached_share(of_disk) >= DISK_SHARE * (PROMPT_TOKENS - 16) / PROMPT_TOKENS
