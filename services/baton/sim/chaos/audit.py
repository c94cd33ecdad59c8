"""Checks of a storm: answers, outcomes, blocks, defects of disks, schedulers, gateways and tasks."""

import asyncio
from collections.abc import Iterable, Sequence

from baton.core.errors import Reason
from baton.sim.chaos.profile import StormSettings
from baton.sim.chaos.report import ChaosReport
from baton.sim.chaos.requests import TIMEOUT_S
from baton.sim.sim_clients import GATEWAY_LOST, SimAnswer
from baton.sim.sim_cluster import SimCluster, SimModel

DEADLINE_GRACE_S = 1.0
"""Longest time that a request may take beyond its deadline."""
CLOCK_MARGIN = 0.02
"""Relative margin for the speed of a gateway's clock."""
MIN_FINISHED = 0.8
"""Share that must finish of the requests that were not cancelled, had enough time, and whose gateway could
serve them, whatever ends the others."""
FOUND_HEARTBEATS = 3
"""Heartbeats within which a gateway finds a scheduler once the stores work again."""
FULL_QUEUES = 0.5
"""One queue may be full if the requests need this share of the places in all queues. An attempt that has
failed and the next one both take places until the gateway has reported the outcome."""
REFUSALS = ("ttft_slo", "tpot_slo")
"""Outcomes that an admission policy may choose."""


def check_answer(answer: SimAnswer, model: SimModel, report: ChaosReport) -> None:
    """Raise AssertionError unless an answer is a prefix of the expected one and ended by its deadline.

    While its gateway was paused, nothing could end it.
    """
    answer.check(model.vocab_size)
    request = answer.request
    allowed_s = request.timeout_s * (1.0 + CLOCK_MARGIN) + DEADLINE_GRACE_S
    allowed_s += report.paused_s(answer.gateway, request.start_s, answer.ended_s)
    if answer.ended_s > request.start_s + allowed_s:
        raise AssertionError(f"request {request.number} ended {answer.ended_s - request.start_s:.3f} s after it began")


def check_outcomes(answers: Sequence[SimAnswer], settings: StormSettings, report: ChaosReport) -> None:
    """Raise AssertionError if a request failed that no fault excuses, or if too few requests finished.

    One process of each role always works, so all requests finish, except those that their clients cancelled
    or gave too little time, whose gateway was killed meanwhile or cannot have found a scheduler since it was
    started, or that were refused by admission control or because all queues were full. Of the requests that
    their clients wanted, and whose gateway could serve them in time, `MIN_FINISHED` must finish, whatever
    excuses the others.
    """
    failed, num_finished, num_wanted = [], 0, 0
    for answer in answers:
        if answer.outcome == "cancelled" or answer.request.timeout_s < TIMEOUT_S:
            is_excused = answer.outcome in ("cancelled", "deadline")
        else:
            could_not_be_served = _gateway_was_down(answer, settings, report) or _was_refused_late(answer, report)
            num_wanted += answer.outcome == "finished" or not could_not_be_served
            num_finished += answer.outcome == "finished"
            is_excused = False
        if answer.outcome != "finished" and not is_excused and not _is_excused(answer, answers, settings, report):
            failed.append(f"request {answer.request.number} at {answer.gateway}: {answer.outcome}: {answer.message}")
    if failed:
        raise AssertionError(f"{len(failed)} requests failed without need: " + "; ".join(failed[:5]))
    if num_finished < MIN_FINISHED * num_wanted:
        raise AssertionError(f"only {num_finished} of {num_wanted} wanted requests finished: {report.outcomes}")


def _is_excused(answer: SimAnswer, answers: Iterable[SimAnswer], settings: StormSettings, report: ChaosReport) -> bool:
    """True if a fault, the configuration or the other requests end this request."""
    if answer.outcome == Reason.QUEUE_FULL.value:
        return _queues_were_full(answer.ended_s, answers, settings, report)
    if answer.outcome in (GATEWAY_LOST, Reason.SCHEDULER_LOST.value):
        return _gateway_was_down(answer, settings, report)
    return answer.outcome in REFUSALS and settings.config.admission != "off"


def _queues_were_full(at_s: float, answers: Iterable[SimAnswer], settings: StormSettings, report: ChaosReport) -> bool:
    """True if the requests wanted at a time may fill the queues of all workers of a side that ran then.

    Many requests arrive at once when a paused gateway resumes.
    """
    config = settings.config
    wanted = [each.request for each in answers if each.request.start_s <= at_s <= each.ended_s]
    stopped = {
        each.process
        for each in (*report.deaths, *report.pauses)
        if each.overlap_s(at_s - config.detection_s, at_s) > 0.0
    }

    def are_full(num_jobs: int, num_workers: int, *roles: str) -> bool:
        num_running = max(1, num_workers - sum(name.startswith(roles) for name in stopped))
        return num_workers > 0 and num_jobs >= FULL_QUEUES * config.max_queued_jobs * num_running

    num_samples = sum(request.num_samples for request in wanted)
    return are_full(len(wanted), config.prefill + config.hybrid, "prefill-", "hybrid-") or are_full(
        num_samples, config.decode + config.hybrid, "decode-", "hybrid-"
    )


def _gateway_was_down(answer: SimAnswer, settings: StormSettings, report: ChaosReport) -> bool:
    """True if the gateway of a request was killed meanwhile, or can know no scheduler since its start."""
    if answer.outcome == GATEWAY_LOST:
        return report.was_killed(answer.gateway, answer.request.start_s, answer.ended_s)
    margin_s = FOUND_HEARTBEATS * settings.config.heartbeat_s
    return report.knew_no_scheduler(answer.gateway, answer.request.start_s, margin_s=margin_s)


def _was_refused_late(answer: SimAnswer, report: ChaosReport) -> bool:
    """True if admission refused a request after a pause of its gateway or of a scheduler."""
    return answer.outcome in REFUSALS and any(
        pause.overlap_s(answer.request.start_s, answer.ended_s) > 0.0
        for pause in report.pauses
        if pause.process == answer.gateway or pause.process.startswith("scheduler")
    )


def check_processes(cluster: SimCluster, report: ChaosReport) -> None:
    """Raise AssertionError if a process holds anything of past requests, or knows other workers than live.

    Add all block counts, and the draft tokens, to the transcript.
    """
    living = {name: worker.worker for name, worker in cluster.workers.items()}
    for name in sorted(cluster.workers):
        cluster.workers[name].check_clean()
        counts = cluster.workers[name].pool.counts()
        if (disk := cluster.disks.get(name)) is not None and disk.store is not None:
            disk.store.check()
        if counts.quarantined:
            raise AssertionError(f"{name}: {counts.quarantined} blocks are still quarantined after the storm")
        for link in cluster.workers[name].reader.links():
            if link.broken or link.peer not in living.values():
                raise AssertionError(f"{name}: after the storm its link to {link.peer} is broken or useless: {link}")
        if (draft := cluster.draft_executors.get(name)) is not None and draft.num_corrupted:
            raise AssertionError(f"{name}: {draft.num_corrupted} steps of the draft model met wrong KV")
        drafts = cluster.workers[name].engine.counters
        report.num_accepted_drafts += drafts.accepted_draft_tokens
        report.transcript.append(
            f"{name} {counts}, {drafts.accepted_draft_tokens} of {drafts.draft_tokens} draft tokens accepted"
        )
    for name, scheduler in sorted(cluster.schedulers.items()):
        scheduler.check_clean()
        known = {each.worker.worker_id: each.worker for each in scheduler.reports()}
        if known != living:
            known_ids, living_ids = ([str(ref) for _, ref in sorted(refs.items())] for refs in (known, living))
            raise AssertionError(f"{name} knows {known_ids}, but {living_ids} are alive")
    for name, gateway in sorted(cluster.gateways.items()):
        if gateway.num_open or gateway.view.problem:
            raise AssertionError(f"{name}: {gateway.num_open} open requests, problem: {gateway.view.problem!r}")
        for worker in living.values():
            session = gateway.workers.find(worker)
            if session is None or not session.is_connected or session.num_jobs:
                raise AssertionError(f"{name} has no idle session with {worker}")


def check_no_tasks() -> None:
    """Raise AssertionError if a task of a process is left, although all processes were killed."""
    left = [
        f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() if task is not asyncio.current_task()
    ]
    if left:
        raise AssertionError(f"tasks left behind: {sorted(left)}")
