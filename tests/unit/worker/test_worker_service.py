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


def decisions_of(made: Pair, worker_id: str) -> list[str]:
    return [d for report in made.cluster.scheduler.reports[worker_id] for d in report.counted_decision_ids]


@virtual
async def test_reports_are_sent_on_change_and_every_heartbeat() -> None:
    async with pair() as made:
        await asyncio.sleep(1.0)
        idle = made.cluster.scheduler.reports["d"]
        assert 4 <= len(idle) <= 7
        assert [r.report_seq for r in idle] == list(range(1, len(idle) + 1))
        assert (idle[-1].state, idle[-1].role.value, idle[-1].blocks.free) == (WorkerState.READY, "decode", 64)
        made.d.executor.gate.clear()
        made.to_d.send(decode_job(30))
        await asyncio.sleep(0.05)
        busy = made.cluster.scheduler.reports["d"][-1]
        assert (busy.running_seqs, busy.blocks.used, busy.waiting_prefill_tokens) == (1, 8, 30)


@virtual
async def test_decision_is_counted_once_when_its_load_is_in_the_report() -> None:
    async with pair() as made:
        await asyncio.sleep(0.1)
        made.p.executor.gate.clear()
        made.send(num_tokens=30, decision_id=DecisionId("one"))
        await asyncio.sleep(0.5)
        at_p = [r for r in made.cluster.scheduler.reports["p"] if r.counted_decision_ids]
        assert [r.counted_decision_ids for r in at_p] == [("one",)]
        assert at_p[0].waiting_prefill_tokens == 30
        waiting = made.cluster.scheduler.reports["d"][-1]
        assert decisions_of(made, "d") == []
        assert (waiting.waiting_seqs, waiting.blocks.used) == (1, 0)
        made.p.executor.gate.set()
        await asyncio.sleep(0.5)
        assert decisions_of(made, "d") == ["one"]


@virtual
async def test_prompts_that_wait_for_the_running_step_are_in_the_report() -> None:
    async with pair() as made:
        made.p.executor.gate.clear()
        made.to_p.send(prefill_job(30, request=b"running"))
        await made.settle()
        made.to_p.send(prefill_job(20, request=b"waiting", decision_id=DecisionId("w")))
        await made.settle()
        report = next(r for r in made.cluster.scheduler.reports["p"] if r.counted_decision_ids)
        assert (report.waiting_prefill_tokens, report.waiting_seqs) == (50, 1)


@virtual
@pytest.mark.parametrize("is_pulled", [False, True])
async def test_slo_step_limit_is_in_the_report(is_pulled: bool) -> None:
    """The report contains the step limit of samples with a TPOT SLO, for local and pulled decode legs."""
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    async with pair(num_blocks=400) as made:
        fields = {"sampling": sampling, "sample_indices": (0, 1), "tpot_slo_s": 60.0}
        if is_pulled:
            made.send(**fields)
        else:
            made.to_d.send(decode_job(30, **fields))
        await asyncio.sleep(0.2)
        report = made.d.worker.report(1, ())
        assert report.running_seqs == 2
        assert report.slo_step_s > 60
        made.to_d.send(decode_job(30, request=b"nothing promised", sampling=sampling))
        await asyncio.sleep(0.1)
        assert made.d.worker.report(2, ()).slo_step_s == 0


@virtual
async def test_refused_job_is_counted() -> None:
    async with pair() as made:
        await asyncio.sleep(0.1)
        made.to_d.send(decode_job(30, num_prompt_tokens=0, decision_id=DecisionId("no")))
        await asyncio.sleep(0.1)
        assert decisions_of(made, "d") == ["no"]


@virtual
async def test_new_report_stream_begins_with_all_open_decisions() -> None:
    async with pair() as made:
        made.d.executor.gate.clear()
        made.to_d.send(decode_job(30, decision_id=DecisionId("open")))
        await asyncio.sleep(0.3)
        await made.cluster.network.kill(SCHEDULER)
        await asyncio.sleep(1.0)
        assert decisions_of(made, "d") == ["open"]
        made.cluster.network.listen(SCHEDULER, made.cluster.scheduler)  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        assert decisions_of(made, "d") == ["open", "open"]
        made.d.executor.gate.set()


@virtual
async def test_connect_command_measures_the_link() -> None:
    async with pair() as made:
        await asyncio.sleep(0.1)
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.CONNECT, peer=made.p.ref))
        await asyncio.sleep(0.5)
        links = made.cluster.scheduler.reports["d"][-1].links
        assert [(link.peer, link.broken, link.transport) for link in links] == [(made.p.ref, False, "simulated")]
        assert links[0].bytes_per_s > 0


@virtual
async def test_worker_is_a_member_while_it_runs() -> None:
    async with pair() as made:
        await asyncio.sleep(0.1)
        members = {m.member_id: m for m in await made.cluster.membership.members(MemberKind.WORKER)}
        assert members["d"].epoch == made.d.ref.worker_epoch
        made.d.worker.drain()
        await asyncio.wait((made.d.running,))
        assert [m.member_id for m in await made.cluster.membership.members(MemberKind.WORKER)] == ["p"]


@virtual
async def test_heartbeats_contain_step_progress() -> None:
    async with pair() as made:
        made.to_d.send(decode_job(30))
        await made.to_d.ended(decode_job(30).job)
        made.d.executor.gate.clear()
        made.to_d.send(decode_job(30, request=b"stuck"))
        await asyncio.sleep(5.5 * HEARTBEAT_S)
        beats = made.to_d.heartbeats
        assert beats[-1].steps_done == 8
        assert beats[-1].step_age_s > 3 * HEARTBEAT_S
        assert not beats[-1].draining
        made.d.executor.gate.set()


@virtual
async def test_drain_finishes_running_jobs_and_refuses_new_ones() -> None:
    async with pair() as made:
        running = decode_job(30)
        made.to_d.send(running)
        await made.to_d.until(lambda: made.to_d.tokens(running.job))
        await asyncio.sleep(0.1)
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.DRAIN))
        await asyncio.sleep(0.005)
        assert made.d.worker.state is WorkerState.DRAINING
        assert not made.d.health.is_ready
        late = decode_job(30, request=b"late")
        made.to_d.send(late)
        failure = await made.to_d.failed(late.job)
        assert (failure.code, failure.reason, failure.retriable) == (Code.UNAVAILABLE, Reason.DRAINING, True)
        await made.to_d.ended(running.job)
        assert made.to_d.tokens(running.job) == expected_tokens(running)
        await asyncio.wait_for(made.d.running, 1.0)
        assert WorkerState.DRAINING in {r.state for r in made.cluster.scheduler.reports["d"]}


@virtual
async def test_jobs_still_running_at_the_drain_deadline_fail_as_retriable() -> None:
    async with pair(num_blocks=1100, drain_s=1.0) as made:
        endless = decode_job(30, sampling=LONG)
        made.to_d.send(endless)
        await made.to_d.until(lambda: made.to_d.tokens(endless.job))
        made.d.worker.drain()
        failure = await made.to_d.failed(endless.job)
        assert (failure.reason, failure.retriable) == (Reason.DRAINING, True)
        tokens = made.to_d.tokens(endless.job)
        assert tokens == expected_tokens(endless)[: len(tokens)]
        await asyncio.wait_for(made.d.running, 1.0)
        made.check_clean()


@pytest.mark.fault("F-48")
@virtual
async def test_draining_owner_waits_for_its_readers() -> None:
    """F-48: SIGTERM to a prefill worker whose blocks have not been pulled yet."""
    async with pair(link=LinkModel(bytes_per_s=40_000.0)) as made:
        prefill, decode = made.send(num_tokens=60)
        await made.to_p.ended_prefill(prefill.job)
        made.p.worker.drain()
        await made.to_d.ended(decode.job)
        assert made.to_d.tokens(decode.job) == expected_tokens(decode)
        await asyncio.wait_for(made.p.running, TEST_TIMES["lease_s"] + 0.2)


@virtual
async def test_draining_owner_waits_for_a_dead_reader_only_until_its_lease_ends() -> None:
    async with pair(link=LinkModel(bytes_per_s=40_000.0)) as made:
        prefill, _ = made.send(num_tokens=60)
        await made.to_p.ended_prefill(prefill.job)
        await made.cluster.kill("d")
        made.p.worker.drain()
        await asyncio.wait_for(made.p.running, TEST_TIMES["lease_s"] + 0.2)


@virtual
async def test_device_fault_makes_the_worker_report_unhealthy_and_end() -> None:
    async with pair() as made:
        made.d.executor.error = DeviceFault("device lost")
        job = decode_job(30)
        made.to_d.send(job)
        with pytest.raises(WorkerUnhealthy, match="device lost"):
            await asyncio.wait_for(made.d.running, 5.0)
        assert not made.d.health.is_alive
        assert made.cluster.scheduler.reports["d"][-1].state is WorkerState.UNHEALTHY
        assert made.to_d.is_broken
        with pytest.raises(StreamBroken):
            await made.cluster.gateway(made.d, "g1").connect()


@pytest.mark.fault("F-12")
@virtual
async def test_request_whose_step_raises_fails_alone() -> None:
    async with pair() as made:
        made.d.executor.error = RuntimeError("a bug that only this request meets")
        bad, good = decode_job(30), decode_job(30, request=b"good")
        made.to_d.send(bad)
        failure = await made.to_d.failed(bad.job)
        assert (failure.code, failure.retriable) == (Code.INTERNAL, False)
        made.d.executor.error = None
        made.to_d.send(good)
        await made.to_d.ended(good.job)
        assert made.to_d.tokens(good.job) == expected_tokens(good)
        assert made.d.worker.state is WorkerState.READY
        made.check_clean()


@pytest.mark.fault("F-11")
@virtual
async def test_stuck_step_makes_the_worker_unhealthy() -> None:
    async with pair() as made:
        made.d.executor.gate.clear()
        made.to_d.send(decode_job(30))
        await made.settle()
        with pytest.raises(WorkerUnhealthy, match="a step has run"):
            await asyncio.wait_for(made.d.running, TEST_TIMES["step_limit_s"] + 0.5)
        assert made.cluster.scheduler.reports["d"][-1].state is WorkerState.UNHEALTHY


@virtual
async def test_error_in_a_background_task_makes_the_worker_unhealthy() -> None:
    async with pair() as made:

        async def broken() -> None:
            raise KeyError("bug")

        made.d.worker.tasks.start(broken(), name="broken")
        with pytest.raises(WorkerUnhealthy, match="bug"):
            await asyncio.wait_for(made.d.running, 1.0)


async def exceed_quarantine_limit(made: Pair, stuck_s: float = 1000.0) -> None:
    """Quarantine one of the decode worker's eight blocks with a read that does not end for this time."""
    _, first = made.send(num_tokens=12)
    await made.to_d.ended(first.job)
    made.cluster.fabric.link = LinkModel(stuck=1.0, stuck_s=stuck_s)
    _, second = made.send(num_tokens=12, request=b"second")
    failure = await made.to_d.failed(second.job)
    assert (failure.reason, failure.retriable, failure.blamed) == (Reason.TRANSFER_TIMEOUT, True, made.p.ref)
    made.cluster.fabric.link = LinkModel()
    await asyncio.sleep(HEARTBEAT_S)
    assert made.cluster.scheduler.reports["d"][-1].needs_replacement
    assert made.d.pool.counts().quarantined == 1


async def assert_serves(made: Pair, request: bytes) -> None:
    job = decode_job(12, request=request, sampling=Sampling(max_tokens=3, ignore_eos=True))
    made.to_d.send(job)
    await made.to_d.ended(job.job)
    assert made.to_d.tokens(job.job) == expected_tokens(job)


@virtual
async def test_worker_over_the_quarantine_limit_drains_on_the_schedulers_command() -> None:
    async with pair(num_blocks=8) as made:
        await exceed_quarantine_limit(made)
        await asyncio.sleep(TEST_TIMES["drain_s"])
        assert made.d.worker.state is WorkerState.READY
        await assert_serves(made, b"meanwhile")
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.REPLACE))
        with pytest.raises(WorkerNeedsReplacement):
            await asyncio.wait_for(made.d.running, 2 * HEARTBEAT_S + TEST_TIMES["lease_s"])
        assert made.d.pool.counts().quarantined == 1
        made.d.worker.check_clean()


@virtual
async def test_worker_that_needs_replacement_drains_without_an_answer() -> None:
    async with pair(num_blocks=8) as made:
        await exceed_quarantine_limit(made)
        await made.cluster.network.kill(SCHEDULER)
        await asyncio.sleep(REPLACEMENT_WAIT_DRAINS * TEST_TIMES["drain_s"] - 1.0)
        assert made.d.worker.state is WorkerState.READY
        with pytest.raises(WorkerNeedsReplacement):
            await asyncio.wait_for(made.d.running, REPLACEMENT_WAIT_DRAINS * TEST_TIMES["drain_s"] + 2.0)


@virtual
async def test_worker_whose_quarantine_ended_is_not_replaced() -> None:
    async with pair(num_blocks=8) as made:
        await exceed_quarantine_limit(made, stuck_s=8.0)
        await asyncio.sleep(8.0)
        assert made.d.pool.counts().quarantined == 0
        assert not made.cluster.scheduler.reports["d"][-1].needs_replacement
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.REPLACE))  # sent before it had said so
        await asyncio.sleep(HEARTBEAT_S)
        assert made.d.worker.state is WorkerState.READY
        await assert_serves(made, b"afterwards")


@virtual
async def test_worker_drained_by_an_operator_is_not_replaced() -> None:
    async with pair(num_blocks=8) as made:
        await exceed_quarantine_limit(made)
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.DRAIN))
        await asyncio.wait_for(made.d.running, 2 * HEARTBEAT_S + TEST_TIMES["lease_s"])


@virtual
async def test_node_shutdown_is_recorded_for_a_draining_worker() -> None:
    async with pair(num_blocks=8) as made:
        await exceed_quarantine_limit(made)
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.REPLACE))
        await asyncio.sleep(0.001)
        assert (made.d.worker.state, made.d.worker.node_shutting_down) == (WorkerState.DRAINING, False)
        made.cluster.scheduler.send("d", WorkerCommand(kind=CommandKind.DRAIN, node_shutting_down=True))
        await asyncio.wait_for(
            made.d.running, 2 * HEARTBEAT_S + TEST_TIMES["lease_s"]
        )  # no replacement may start on this node, even if it is over the quarantine limit
        assert made.d.worker.node_shutting_down


@virtual
async def test_worker_can_be_stopped_immediately() -> None:
    async with pair() as made:
        made.to_d.send(decode_job(30, sampling=Sampling(max_tokens=100, ignore_eos=True)))
        await made.settle()
        made.d.running.cancel()
        await asyncio.wait((made.d.running,), timeout=1.0)
        assert made.d.running.cancelled()
        await made.settle()
        assert made.to_d.is_broken
        state = made.d.worker.debug_state()
        assert (state["open_jobs"], state["sessions"], state["tasks"]) == ([], 0, 0)


def test_worker_service_imports_neither_torch_nor_a_transport() -> None:
    names = ("torch", "transformers", "grpc", "redis", "nixl", "ray")
    code = f"import sys, baton.worker.worker_service; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
