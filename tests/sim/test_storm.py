"""Storms with fixed seeds: faults of all kinds under load. Answers must be right, and nothing may leak."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest

from baton.core.kv.block_hash import table_hash
from baton.sim import virtual_time
from baton.sim.chaos import run as run_module
from baton.sim.chaos.cache_audit import audit_caches, expected_blocks
from baton.sim.chaos.profile import ChaosProfile, draw_settings
from baton.sim.chaos.random_pulls import RANDOM_PULLS
from baton.sim.chaos.report import ChaosReport
from baton.sim.chaos.run import StormFailed, run_seed
from baton.sim.sim_clients import SimAnswer, SimRequest, run_client
from baton.sim.sim_cluster import SimCluster
from baton.worker.tiers.reloads import Reloads
from tests.sim.storm_cluster import MODEL, config
from tests.sim.storm_seeds import drawn_seeds, fixed_seeds, tree_hash

pytestmark = pytest.mark.sim

PROFILE = ChaosProfile()
CALM = replace(
    PROFILE,
    cuts_per_s=0.0,
    deaths_per_s=0.0,
    pauses_per_s=0.0,
    partitions_per_s=0.0,
    data_partitions_per_s=0.0,
    store_faults_per_s=0.0,
    clock_jumps_per_s=0.0,
    disk_faults_per_s=0.0,
)

SHARED_SEEDS = (7, 240, 440, 3086585237)
"""Fixed seeds of which several tests need the report."""


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """Keep the services from logging: a storm has thousands of warnings, and its replay prints them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def storm(seed: int) -> ChaosReport:
    """Return the report of a seed, computed once for all tests."""
    return run_seed(seed)


def check(report: ChaosReport) -> None:
    assert sum(report.outcomes.values()) == PROFILE.num_requests
    assert report.outcomes["finished"] > PROFILE.num_requests * 0.3
    assert report.num_audited > 0


@pytest.mark.fault("F-2", "F-6", "F-15", "F-33", "F-34", "F-35", "F-51")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in fixed_seeds()]
)
def test_storm_with_a_fixed_seed_breaks_no_invariant(seed: int) -> None:
    check(storm(seed) if seed in SHARED_SEEDS else run_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "reads"), [pytest.param(7, "two_sided=False", marks=pytest.mark.long), (440, "two_sided=True")]
)
def test_one_seed_gives_the_same_transcript_twice(seed: int, reads: str) -> None:
    first, second = storm(seed), run_seed(seed)
    assert reads in first.settings
    assert "\n".join(first.transcript).encode() == "\n".join(second.transcript).encode()
    assert first.faults["cut"] > 5
    assert first.num_lost > 0
    assert first.num_audited > 100


def test_calm_run_finishes_every_request_that_its_client_wants() -> None:
    report = run_seed(1, replace(CALM, num_requests=40, hurried=0.0))
    assert report.outcomes.keys() <= {"finished", "cancelled"}
    assert report.faults == {}


def test_failing_seed_names_its_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_nothing(_answer: SimAnswer, _vocab_size: int) -> None:
        raise AssertionError("the answer is wrong")

    monkeypatch.setattr(SimAnswer, "check", check_nothing)
    with pytest.raises(
        StormFailed, match=r"seed 3: AssertionError: the answer is wrong\n.*python -m baton.sim.chaos --seed 3"
    ):
        run_seed(3, replace(CALM, num_requests=5))


def test_deadlock_is_reported_with_its_name_and_what_happened_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(run_module, "_run", wait_for_ever)
    with pytest.raises(StormFailed, match=r"seed 3: Deadlock: .*\n.*--seed 3") as failed:
        run_seed(3)
    assert isinstance(failed.value.problem, virtual_time.Deadlock)
    assert failed.value.report.settings


def test_drawn_seeds_follow_from_the_tree_and_are_no_fixed_ones() -> None:
    assert tree_hash()
    assert drawn_seeds() == drawn_seeds()
    assert not set(drawn_seeds()) & set(fixed_seeds())


@pytest.mark.slow
def test_a_storm_pulls_prefixes_from_the_disks_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    reloads: list[object] = []

    def start_for_peer(self: Reloads, *hashes: Any, **limit: Any) -> object:
        reloads.append(started(self, *hashes, **limit))
        return reloads[-1]

    started = Reloads.start_for_peer
    monkeypatch.setattr(Reloads, "start_for_peer", start_for_peer)
    report = run_seed(90)
    check(report)
    assert RANDOM_PULLS in report.settings
    assert any(fault.startswith("disk-") for fault in report.faults)
    assert sum(each is not None for each in reloads) > 2


def test_fixed_seeds_draw_windows_and_draft_models() -> None:
    models = [draw_settings(Random(seed)).model for seed in fixed_seeds()]
    assert {len(model.windows) for model in models} == {1, 2}
    assert {(model.draft is None, any(model.windows)) for model in models} == set(product((True, False), repeat=2))


def test_fixed_seeds_draw_host_and_disk_tiers() -> None:
    configs = [draw_settings(Random(seed)).config for seed in fixed_seeds()]
    drawn = {(config.host_kv_memory is not None, config.disk_kv_size is not None) for config in configs}
    assert drawn == set(product((True, False), repeat=2))


def test_fixed_seeds_draw_two_sided_reads_for_about_a_quarter() -> None:
    models = [draw_settings(Random(seed)).model for seed in fixed_seeds()]
    two_sided = [model for model in models if model.two_sided]
    assert 0.1 < len(two_sided) / len(models) < 0.4
    assert {model.link.failed > 0 for model in two_sided} == {False, True}
    assert not any(model.link.failed for model in models if not model.two_sided)


@pytest.mark.slow
def test_storms_reload_from_hosts_and_from_disks_that_fail() -> None:
    reports = [storm(seed) for seed in (240, 440)]
    reloaded = sum((report.num_reloaded for report in reports), start=Counter())
    assert reloaded["host"] > 10 < reloaded["disk"]
    assert all(report.num_audited_in_tiers > 0 for report in reports)
    faults = {kind for report in reports for kind in report.faults}
    assert faults >= {"disk-full", "disk-slow", "disk-flipped-bits", "disk-truncated", "disk-killed"}


@pytest.mark.slow
def test_storm_verifies_the_drafts_of_a_model_with_windows() -> None:
    report = storm(3086585237)
    assert "windows=(9,) drafts=True" in report.settings
    assert report.num_accepted_drafts > 20


@pytest.mark.parametrize(("windows", "table"), [((0,), 0), ((0, 16), 1)])
def test_cache_audit_names_a_block_with_wrong_content(windows: tuple[int, ...], table: int) -> None:
    async def one_request() -> None:
        cluster = SimCluster(config(), replace(MODEL, windows=windows), 0)
        await cluster.start()
        await asyncio.sleep(1.0)
        request = SimRequest(number=0, start_s=0.0, prompt=tuple(range(1, 40)), max_tokens=4)
        await run_client(request, cluster.gateway)
        expected = expected_blocks(cluster, [request])
        assert audit_caches(cluster, expected) >= 39 // 8
        name = next(name for name in sorted(cluster.workers) if cluster.workers[name].pool.hashes())
        pool, memory = cluster.workers[name].pool, cluster.memories[name]
        (block_id,) = pool.lookup([table_hash(pool.hashes()[-1], table)])
        memory.write_block(block_id, [*memory.block(block_id)[:-1], 7])
        with pytest.raises(AssertionError, match=f"{name}: block {block_id} does not hold"):
            audit_caches(cluster, expected)
        await cluster.aclose()

    virtual_time.run(one_request())
