"""Chaos runs on 2 prefill and 2 decode workers: cut streams, dead processes, stuck reads and cancels.

Every token must be right, and nothing may leak.
"""

import asyncio
from itertools import pairwise

import pytest

from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import ClusterConfig
from baton.sim import virtual_time
from baton.sim.chaos import ChaosProfile, ChaosReport, audit_caches, run_chaos
from baton.sim.sim_clients import SimRequest, run_client
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_transfer_backend import LinkModel
from tests.scale import sized
from tests.times import TEST_TIMES

pytestmark = pytest.mark.sim

NUM_SEEDS = sized(10, 500)
FULL = ChaosProfile()
SHORT = ChaosProfile(num_requests=120, duration_s=8.0, cuts_per_s=1.5, deaths_per_s=0.6)
PROFILE = sized(SHORT, FULL)
MODEL = SimModel(num_blocks=160, link=LinkModel(stuck=0.005, stuck_s=8.0))


POLICY_BY_SEED = ("kv_centric", "least_loaded", "random")
"""`kv_centric` reads prefixes from any worker and may prefill on the decode worker. The others always
transfer."""


def config(policy: str = "least_loaded") -> ClusterConfig:
    names = {setting.name for setting in settings_of(ClusterConfig)}
    return ClusterConfig(
        prefill=2,
        decode=2,
        log_dir=None,
        block_size_tokens=8,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        policy=policy,  # type: ignore[arg-type]  # one of POLICY_BY_SEED
        **{name: value for name, value in TEST_TIMES.items() if name in names},  # type: ignore[arg-type]
    )


def chaos(profile: ChaosProfile, seed: int) -> ChaosReport:
    policy = POLICY_BY_SEED[seed % len(POLICY_BY_SEED)]
    return virtual_time.run(run_chaos(config(policy), MODEL, profile, seed))


@pytest.mark.slow
def test_one_seed_gives_the_same_transcript_twice() -> None:
    first, second = chaos(PROFILE, 0), chaos(PROFILE, 0)
    assert "\n".join(first.transcript).encode() == "\n".join(second.transcript).encode()
    assert first.faults["cut"] > 5
    assert first.faults["kill"] > 2
    assert first.num_lost > 0
    assert first.num_audited > 100


def was_without_scheduler(report: ChaosReport) -> bool:
    """True if the scheduler died twice within `scheduler_wait_s`, so that new requests may have timed out."""
    died_s = [float(line.split()[0]) for line in report.transcript if line.endswith("kill scheduler")]
    return any(second_s - first_s < TEST_TIMES["scheduler_wait_s"] for first_s, second_s in pairwise(died_s))


@pytest.mark.fault("F-2", "F-6", "F-15", "F-51")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed > 2 else []) for seed in range(1, NUM_SEEDS)]
)
def test_answers_are_exact_and_nothing_leaks_under_chaos(seed: int) -> None:
    report = chaos(PROFILE, seed)
    assert sum(report.outcomes.values()) == PROFILE.num_requests
    allowed = {"finished", "cancelled", "poison"}
    if was_without_scheduler(report):
        allowed.add("scheduler_lost")
    assert report.outcomes.keys() <= allowed, report.outcomes
    assert report.outcomes["finished"] > PROFILE.num_requests * 0.7
    assert report.num_audited > 0
    assert report.outcomes.get("poison", 0) <= 3, "only requests that were in a step of two killed workers"


def test_cache_audit_names_a_block_with_wrong_content() -> None:
    async def one_request() -> None:
        cluster = SimCluster(config(), MODEL, 0)
        await cluster.start()
        await asyncio.sleep(1.0)
        request = SimRequest(number=0, start_s=0.0, prompt=tuple(range(1, 40)), max_tokens=4)
        await run_client(request, cluster.gateway)
        assert audit_caches(cluster, [request]) >= 39 // 8
        name = next(name for name in sorted(cluster.workers) if cluster.workers[name].pool.hashes())
        pool, memory = cluster.workers[name].pool, cluster.memories[name]
        (block_id,) = pool.lookup(pool.hashes()[:1])
        memory.write_block(block_id, [*memory.block(block_id)[:-1], 7])
        with pytest.raises(AssertionError, match=f"{name}: block {block_id} does not hold"):
            audit_caches(cluster, [request])
        await cluster.aclose()

    virtual_time.run(one_request())
