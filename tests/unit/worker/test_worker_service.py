"""Tests of a worker: reports, membership, drain, replacement and failures."""

import asyncio
import subprocess
import sys

import pytest

from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Code, Reason, StreamBroken
from baton.core.ids import DecisionId
from baton.core.interfaces import MemberKind
from baton.core.request import Sampling
from baton.engine.state.step import DeviceFault
from baton.sim.sim_transfer_backend import LinkModel
from baton.worker.quarantine_limit import REPLACEMENT_WAIT_DRAINS
from baton.worker.worker_lifecycle import WorkerNeedsReplacement, WorkerUnhealthy
from tests.times import TEST_TIMES
from tests.unit.worker.harness import SCHEDULER, Pair, expected_tokens, pair
from tests.unit.worker.job_builders import decode_job, prefill_job
from tests.unit.worker.virtual_loop import virtual

HEARTBEAT_S = TEST_TIMES["heartbeat_s"]
LONG = Sampling(max_tokens=4000, ignore_eos=True)


def decisions_of(workers: Pair, worker_id: str) -> list[str]:
    return [d for report in workers.cluster.scheduler.reports[worker_id] for d in report.counted_decision_ids]


@virtual
async def test_reports_are_sent_on_change_and_every_heartbeat() -> None:
    async with pair() as workers:
        await asyncio.sleep(1.0)
        idle = workers.cluster.scheduler.reports["d"]
        assert 4 <= len(idle) <= 7
        assert [r.report_seq for r in idle] == list(range(1, len(idle) + 1))
        assert (idle[-1].state, idle[-1].role.value, idle[-1].blocks.free) == (WorkerState.READY, "decode", 64)
        workers.d.executor.gate.clear()
        workers.to_d.send(decode_job(30))
        await asyncio.sleep(0.05)
        busy = workers.cluster.scheduler.reports["d"][-1]
        assert (busy.running_seqs, busy.blocks.used, busy.waiting_prefill_tokens) == (1, 8, 30)


@virtual
async def test_decision_is_counted_once_when_its_load_is_in_the_report() -> None:
    async with pair() as workers:
        await asyncio.sleep(0.1)
        workers.p.executor.gate.clear()
        workers.send(num_tokens=30, decision_id=DecisionId("one"))
        await asyncio.sleep(0.5)
        at_p = [r for r in workers.cluster.scheduler.reports["p"] if r.counted_decision_ids]
        assert [r.counted_decision_ids for r in at_p] == [("one",)]
        assert at_p[0].waiting_prefill_tokens == 30
        waiting = workers.cluster.scheduler.reports["d"][-1]
        assert decisions_of(workers, "d") == []
        assert (waiting.waiting_seqs, waiting.blocks.used) == (1, 0)
        workers.p.executor.gate.set()
        await asyncio.sleep(0.5)
        assert decisions_of(workers, "d") == ["one"]


@virtual
async def test_prompts_that_wait_for_the_running_step_are_in_the_report() -> None:
    async with pair() as workers:
        workers.p.executor.gate.clear()
        workers.to_p.send(prefill_job(30, request=b"running"))
        await workers.settle()
        workers.to_p.send(prefill_job(20, request=b"waiting", decision_id=DecisionId("w")))
        await workers.settle()
        report = next(r for r in workers.cluster.scheduler.reports["p"] if r.counted_decision_ids)
        assert (report.waiting_prefill_tokens, report.waiting_seqs) == (50, 1)


@virtual
@pytest.mark.parametrize("is_pulled", [False, True])
async def test_longest_step_by_tpot_targets_is_in_the_report(is_pulled: bool) -> None:
    """The strictest target limits it: an SLO or a derived one, of local and of pulled decode legs."""
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    async with pair(num_blocks=400) as workers:
        fields = {"sampling": sampling, "sample_indices": (0, 1), "tpot_slo_s": 60.0}
        if is_pulled:
            workers.send(**fields)
        else:
            workers.to_d.send(decode_job(30, **fields))
        await asyncio.sleep(0.2)
        report = workers.d.worker.report(1, ())
        assert report.running_seqs == 2
        assert report.target_step_s > 50
        assert (report.ttft_target_factor, report.tpot_target_factor) == (10.0, 4.0)
        workers.to_d.send(decode_job(30, request=b"nothing promised", sampling=sampling))
        await asyncio.sleep(0.1)
        assert 0 < workers.d.worker.report(2, ()).target_step_s < 1


@virtual
async def test_refused_job_is_counted() -> None:
    async with pair() as workers:
        await asyncio.sleep(0.1)
        workers.to_d.send(decode_job(30, num_prompt_tokens=0, decision_id=DecisionId("no")))
        await asyncio.sleep(0.1)
        assert decisions_of(workers, "d") == ["no"]


@virtual
async def test_new_report_stream_begins_with_all_open_decisions() -> None:
    async with pair() as workers:
        workers.d.executor.gate.clear()
        workers.to_d.send(decode_job(30, decision_id=DecisionId("open")))
        await asyncio.sleep(0.3)
        await workers.cluster.network.kill(SCHEDULER)
        await asyncio.sleep(1.0)
        assert decisions_of(workers, "d") == ["open"]
        workers.cluster.network.listen(SCHEDULER, workers.cluster.scheduler)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        assert decisions_of(workers, "d") == ["open", "open"]
        workers.d.executor.gate.set()


@virtual
async def test_connect_command_measures_the_link() -> None:
    async with pair() as workers:
        await asyncio.sleep(0.1)
        workers.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.CONNECT, peer=workers.p.ref))
        await asyncio.sleep(0.5)
        links = workers.cluster.scheduler.reports["d"][-1].links
        assert [(link.peer, link.broken, link.transport) for link in links] == [(workers.p.ref, False, "simulated")]
        assert links[0].bytes_per_s > 0


@virtual
async def test_worker_is_a_member_while_it_runs() -> None:
    async with pair() as workers:
        await asyncio.sleep(0.1)
        members = {m.member_id: m for m in await workers.cluster.membership.members(MemberKind.WORKER)}
        assert members["d"].epoch == workers.d.ref.worker_epoch
        workers.d.worker.drain()
        await asyncio.wait((workers.d.running,))
        assert [m.member_id for m in await workers.cluster.membership.members(MemberKind.WORKER)] == ["p"]


@virtual
async def test_heartbeats_contain_step_progress() -> None:
    async with pair() as workers:
        workers.to_d.send(decode_job(30))
        await workers.to_d.ended(decode_job(30).job)
        workers.d.executor.gate.clear()
        workers.to_d.send(decode_job(30, request=b"stuck"))
        await asyncio.sleep(5.5 * HEARTBEAT_S)
        beats = workers.to_d.heartbeats
        assert beats[-1].steps_done == 8
        assert beats[-1].step_age_s > 3 * HEARTBEAT_S
        assert not beats[-1].draining
        workers.d.executor.gate.set()


@virtual
async def test_drain_finishes_running_jobs_and_refuses_new_ones() -> None:
    async with pair() as workers:
        running = decode_job(30)
        workers.to_d.send(running)
        await workers.to_d.until(lambda: workers.to_d.tokens(running.job))
        await asyncio.sleep(0.1)
        workers.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.DRAIN))
        await asyncio.sleep(0.005)
        assert workers.d.worker.state is WorkerState.DRAINING
        assert not workers.d.health.is_ready
        late = decode_job(30, request=b"late")
        workers.to_d.send(late)
        failure = await workers.to_d.failed(late.job)
        assert (failure.code, failure.reason, failure.retriable) == (Code.UNAVAILABLE, Reason.DRAINING, True)
        await workers.to_d.ended(running.job)
        assert workers.to_d.tokens(running.job) == expected_tokens(running)
        await asyncio.wait_for(workers.d.running, 1.0)
        assert WorkerState.DRAINING in {r.state for r in workers.cluster.scheduler.reports["d"]}


@virtual
async def test_jobs_still_running_at_the_drain_deadline_fail_as_retriable() -> None:
    async with pair(num_blocks=1100, drain_s=1.0) as workers:
        endless = decode_job(30, sampling=LONG)
        workers.to_d.send(endless)
        await workers.to_d.until(lambda: workers.to_d.tokens(endless.job))
        workers.d.worker.drain()
        failure = await workers.to_d.failed(endless.job)
        assert (failure.reason, failure.retriable) == (Reason.DRAINING, True)
        tokens = workers.to_d.tokens(endless.job)
        assert tokens == expected_tokens(endless)[: len(tokens)]
        await asyncio.wait_for(workers.d.running, 1.0)
        workers.check_clean()


@pytest.mark.fault("F-48")
@virtual
async def test_draining_owner_waits_for_its_readers() -> None:
    """F-48: SIGTERM to a prefill worker whose blocks have not been pulled yet."""
    async with pair(link=LinkModel(bytes_per_s=40_000.0)) as workers:
        prefill, decode = workers.send(num_tokens=60)
        await workers.to_p.ended_prefill(prefill.job)
        workers.p.worker.drain()
        await workers.to_d.ended(decode.job)
        assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
        await asyncio.wait_for(workers.p.running, TEST_TIMES["lease_s"] + 0.2)


@virtual
async def test_draining_owner_waits_for_a_dead_reader_only_until_its_lease_ends() -> None:
    async with pair(link=LinkModel(bytes_per_s=40_000.0)) as workers:
        prefill, _ = workers.send(num_tokens=60)
        await workers.to_p.ended_prefill(prefill.job)
        await workers.cluster.kill("d")
        workers.p.worker.drain()
        await asyncio.wait_for(workers.p.running, TEST_TIMES["lease_s"] + 0.2)
        assert workers.p.pool.counts().used == 0


@virtual
async def test_device_fault_makes_the_worker_report_unhealthy_and_end() -> None:
    async with pair() as workers:
        workers.d.executor.error = DeviceFault("device lost")
        job = decode_job(30)
        workers.to_d.send(job)
        with pytest.raises(WorkerUnhealthy, match="device lost"):
            await asyncio.wait_for(workers.d.running, 5.0)
        assert not workers.d.health.is_alive
        assert workers.cluster.scheduler.reports["d"][-1].state is WorkerState.UNHEALTHY
        assert workers.to_d.is_broken
        with pytest.raises(StreamBroken):
            await workers.cluster.gateway(workers.d, "g1").connect()


@pytest.mark.fault("F-12")
@virtual
async def test_request_whose_step_raises_fails_alone() -> None:
    async with pair() as workers:
        workers.d.executor.error = RuntimeError("a bug that only this request meets")
        bad, good = decode_job(30), decode_job(30, request=b"good")
        workers.to_d.send(bad)
        failure = await workers.to_d.failed(bad.job)
        assert (failure.code, failure.retriable) == (Code.INTERNAL, False)
        workers.d.executor.error = None
        workers.to_d.send(good)
        await workers.to_d.ended(good.job)
        assert workers.to_d.tokens(good.job) == expected_tokens(good)
        assert workers.d.worker.state is WorkerState.READY
        workers.check_clean()


@pytest.mark.fault("F-11")
@virtual
async def test_stuck_step_makes_the_worker_unhealthy() -> None:
    async with pair() as workers:
        workers.d.executor.gate.clear()
        workers.to_d.send(decode_job(30))
        await workers.settle()
        with pytest.raises(WorkerUnhealthy, match="a step has run"):
            await asyncio.wait_for(workers.d.running, TEST_TIMES["step_limit_s"] + 0.5)
        assert workers.cluster.scheduler.reports["d"][-1].state is WorkerState.UNHEALTHY


@pytest.mark.fault("F-11")
@virtual
async def test_failed_transfer_backend_makes_the_worker_unhealthy() -> None:
    async with pair() as workers:
        await workers.settle()
        assert workers.cluster.scheduler.reports["d"][-1].state is WorkerState.READY
        workers.d.backend.failure = RuntimeError("the thread of the transport has ended")
        with pytest.raises(WorkerUnhealthy, match="KV transfers have stopped: the thread"):
            await asyncio.wait_for(workers.d.running, 1.0)
        assert workers.cluster.scheduler.reports["d"][-1].state is WorkerState.UNHEALTHY


@virtual
async def test_error_in_a_background_task_makes_the_worker_unhealthy() -> None:
    async with pair() as workers:

        async def broken() -> None:
            raise KeyError("bug")

        workers.d.worker.tasks.start(broken(), name="broken")
        with pytest.raises(WorkerUnhealthy, match="bug"):
            await asyncio.wait_for(workers.d.running, 1.0)


async def exceed_quarantine_limit(workers: Pair, stuck_s: float = 1000.0) -> None:
    """Quarantine one of the decode worker's eight blocks with a read that does not end for this time."""
    _, first = workers.send(num_tokens=12)
    await workers.to_d.ended(first.job)
    workers.cluster.fabric.link = LinkModel(stuck=1.0, stuck_s=stuck_s)
    _, second = workers.send(num_tokens=12, request=b"second")
    failure = await workers.to_d.failed(second.job)
    assert (failure.reason, failure.retriable, failure.blamed) == (Reason.TRANSFER_TIMEOUT, True, workers.p.ref)
    workers.cluster.fabric.link = LinkModel()
    await asyncio.sleep(HEARTBEAT_S)
    assert workers.cluster.scheduler.reports["d"][-1].needs_replacement
    assert workers.d.pool.counts().quarantined == 1


async def assert_serves(workers: Pair, request: bytes) -> None:
    job = decode_job(12, request=request, sampling=Sampling(max_tokens=3, ignore_eos=True))
    workers.to_d.send(job)
    await workers.to_d.ended(job.job)
    assert workers.to_d.tokens(job.job) == expected_tokens(job)


@virtual
async def test_worker_over_the_quarantine_limit_drains_on_the_schedulers_command() -> None:
    async with pair(num_blocks=8) as workers:
        await exceed_quarantine_limit(workers)
        await asyncio.sleep(TEST_TIMES["drain_s"])
        assert workers.d.worker.state is WorkerState.READY
        await assert_serves(workers, b"meanwhile")
        workers.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.REPLACE))
        with pytest.raises(WorkerNeedsReplacement):
            await asyncio.wait_for(workers.d.running, 2 * HEARTBEAT_S + TEST_TIMES["lease_s"])
        assert workers.d.pool.counts().quarantined == 1
        workers.d.worker.check_clean()


@virtual
async def test_worker_that_needs_replacement_drains_without_an_answer() -> None:
    async with pair(num_blocks=8) as workers:
        await exceed_quarantine_limit(workers)
        await workers.cluster.network.kill(SCHEDULER)
        await asyncio.sleep(REPLACEMENT_WAIT_DRAINS * TEST_TIMES["drain_s"] - 1.0)
        assert workers.d.worker.state is WorkerState.READY
        with pytest.raises(WorkerNeedsReplacement):
            await asyncio.wait_for(workers.d.running, REPLACEMENT_WAIT_DRAINS * TEST_TIMES["drain_s"] + 2.0)


@virtual
async def test_worker_whose_quarantine_ended_is_not_replaced() -> None:
    async with pair(num_blocks=8) as workers:
        await exceed_quarantine_limit(workers, stuck_s=8.0)
        await asyncio.sleep(8.0)
        assert workers.d.pool.counts().quarantined == 0
        assert not workers.cluster.scheduler.reports["d"][-1].needs_replacement
        workers.cluster.scheduler.send(
            "d", WorkerCommand(kind=CommandKind.REPLACE)
        )  # sent before the worker reported that it drains
        await asyncio.sleep(HEARTBEAT_S)
        assert workers.d.worker.state is WorkerState.READY
        await assert_serves(workers, b"afterwards")


@virtual
async def test_worker_drained_by_an_operator_is_not_replaced() -> None:
    async with pair(num_blocks=8) as workers:
        await exceed_quarantine_limit(workers)
        workers.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.DRAIN))
        await asyncio.wait_for(workers.d.running, 2 * HEARTBEAT_S + TEST_TIMES["lease_s"])
        assert workers.d.running.exception() is None, "it ends without WorkerNeedsReplacement"
        assert workers.d.worker.state is WorkerState.DRAINING


@virtual
async def test_node_shutdown_is_recorded_for_a_draining_worker() -> None:
    async with pair(num_blocks=8) as workers:
        await exceed_quarantine_limit(workers)
        workers.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.REPLACE))
        await asyncio.sleep(0.001)
        assert (workers.d.worker.state, workers.d.worker.node_shutting_down) == (WorkerState.DRAINING, False)
        workers.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.DRAIN, node_shutting_down=True))
        await asyncio.wait_for(
            workers.d.running, 2 * HEARTBEAT_S + TEST_TIMES["lease_s"]
        )  # no replacement may start on this node, even if it is over the quarantine limit
        assert workers.d.worker.node_shutting_down


@virtual
async def test_worker_can_be_stopped_immediately() -> None:
    async with pair() as workers:
        workers.to_d.send(decode_job(30, sampling=Sampling(max_tokens=100, ignore_eos=True)))
        await workers.settle()
        workers.d.running.cancel()
        await asyncio.wait((workers.d.running,), timeout=1.0)
        assert workers.d.running.cancelled()
        await workers.settle()
        assert workers.to_d.is_broken
        state = workers.d.worker.debug_state()
        assert (state["open_jobs"], state["sessions"], state["tasks"]) == ([], 0, 0)


def test_worker_service_imports_neither_torch_nor_a_transport() -> None:
    names = ("torch", "transformers", "grpc", "redis", "nixl", "ray")
    code = f"import sys, baton.worker.worker_service; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
