"""Runs one storm: load and faults on a new cluster, a time to settle, and checks of all invariants."""

import asyncio
from dataclasses import replace
from random import Random

from baton.scheduler.policy_loading.load_policy import load_policy
from baton.sim import virtual_time
from baton.sim.chaos.audit import check_answer, check_no_tasks, check_outcomes, check_processes
from baton.sim.chaos.cache_audit import audit_caches, audit_tiers, expected_blocks
from baton.sim.chaos.cancel_audit import CancelAudit
from baton.sim.chaos.epilogue import run_epilogue
from baton.sim.chaos.faults.clock_jumps import move_clocks
from baton.sim.chaos.faults.cuts import cut_streams
from baton.sim.chaos.faults.deaths import kill_processes
from baton.sim.chaos.faults.disks import break_disks
from baton.sim.chaos.faults.partitions import partition_data, partition_processes
from baton.sim.chaos.faults.pauses import pause_processes
from baton.sim.chaos.faults.store_outages import break_stores
from baton.sim.chaos.faults.storm_context import StormContext
from baton.sim.chaos.profile import ChaosProfile, StormSettings, draw_settings
from baton.sim.chaos.report import ChaosReport
from baton.sim.chaos.requests import plan_requests, send
from baton.sim.sim_clients import SimAnswer, SimRequest
from baton.sim.sim_cluster import SimCluster

FAULTS = (
    cut_streams,
    kill_processes,
    pause_processes,
    partition_processes,
    partition_data,
    break_stores,
    move_clocks,
    break_disks,
)
SETTLE_S = 10.0
"""Time after the last request and fault until the checks. Longer than every lease, timeout and stuck read."""


class StormFailed(AssertionError):
    """An invariant does not hold, or a process has ended with an error. `report` is what happened before."""

    def __init__(self, report: ChaosReport, problem: BaseException) -> None:
        super().__init__(f"seed {report.seed}: {type(problem).__name__}: {problem}\nreplay it: {report.replay}")
        self.report = report
        self.problem = problem


def run_seed(seed: int, profile: ChaosProfile | None = None, *, policy: str | None = None) -> ChaosReport:
    """Run the storm of a seed with its own settings, under virtual time.

    policy: used instead of the drawn one.

    Raises StormFailed, and ConfigError if the policy cannot be loaded.
    """
    settings = draw_settings(Random(seed))
    if policy is not None:
        load_policy(policy)
        settings = replace(settings, config=replace(settings.config, policy=policy))
    report = ChaosReport(seed=seed, settings=str(settings), policy=policy)
    try:
        virtual_time.run(run_storm(settings, profile or ChaosProfile(), report))
    except virtual_time.Deadlock as deadlock:  # the loop raises it, outside of every task
        raise StormFailed(report, deadlock) from deadlock
    return report


async def run_storm(settings: StormSettings, profile: ChaosProfile, report: ChaosReport) -> None:
    """Run load and faults on a new cluster, wait until it has settled, and check the invariants.

    Every answer is a prefix of the expected one and ends by its deadline; no request fails without need;
    cancelled work ends soon; no block, reservation, job or task is leaked; every cached block holds the
    tokens of its hash; afterwards requests finish at their first attempt. Raises StormFailed naming what does
    not hold.
    """
    try:
        await _run(settings, profile, report)
    except (Exception, ExceptionGroup) as error:
        problem: BaseException = error
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        raise StormFailed(report, problem) from error


async def _run(settings: StormSettings, profile: ChaosProfile, report: ChaosReport) -> None:
    rng = Random(report.seed)
    cluster = SimCluster(settings.config, settings.model, rng.getrandbits(64))
    await cluster.start_several(num_schedulers=settings.num_schedulers, num_gateways=settings.num_gateways)
    await asyncio.sleep(1.0)
    start_s = virtual_time.running_loop().now_s
    requests = plan_requests(profile, Random(rng.getrandbits(64)), start_s=start_s, slo=settings.slo)
    audit = asyncio.create_task(CancelAudit(cluster, report).run())
    work = asyncio.create_task(_load_and_faults(cluster, profile, requests, rng, report))
    await asyncio.wait((audit, work), return_when=asyncio.FIRST_COMPLETED)
    if audit.done():
        work.cancel()
        audit.result()
    answers = await work
    cluster.fabric.link = replace(cluster.fabric.link, stuck=0.0, reused=0.0, reused_reloads=0.0, failed=0.0)
    await asyncio.sleep(SETTLE_S)
    cluster.fabric.settle()
    await _stop(audit)
    cluster.raise_failures()
    _check(cluster, settings, answers, report)
    answers += await run_epilogue(cluster, Random(rng.getrandbits(64)))
    expected = expected_blocks(cluster, [answer.request for answer in answers])
    report.num_audited = audit_caches(cluster, expected)
    report.num_audited_in_tiers = audit_tiers(cluster, expected)
    report.count_reloads(cluster.tier_totals)
    report.num_lost = cluster.network.messages_lost
    await cluster.aclose()
    check_no_tasks()


async def _load_and_faults(
    cluster: SimCluster, profile: ChaosProfile, requests: list[SimRequest], rng: Random, report: ChaosReport
) -> list[SimAnswer]:
    end_s = virtual_time.running_loop().now_s + profile.duration_s
    storm = StormContext(cluster=cluster, profile=profile, report=report, end_s=end_s)
    async with asyncio.TaskGroup() as group:
        for inject in FAULTS:
            group.create_task(inject(storm, Random(rng.getrandbits(64))))
        clients = [group.create_task(send(each, cluster, Random(rng.getrandbits(64)))) for each in requests]
    return [client.result() for client in clients]


def _check(cluster: SimCluster, settings: StormSettings, answers: list[SimAnswer], report: ChaosReport) -> None:
    for answer in answers:
        report.outcomes[answer.outcome] = report.outcomes.get(answer.outcome, 0) + 1
        report.transcript.append(
            f"{answer.ended_s:.9f} request {answer.request.number} {answer.outcome} {answer.tokens}"
        )
    for answer in answers:
        check_answer(answer, settings.model, report)
    check_outcomes(answers, settings, report)
    check_processes(cluster, report)


async def _stop(audit: asyncio.Task[None]) -> None:
    """End the audit. Raises the error that it found."""
    audit.cancel()
    await asyncio.wait((audit,))
    if not audit.cancelled():
        audit.result()
