"""Turns successive states of the cluster into events: deaths, restarts, drains, broken links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.core.cluster.worker_report import WorkerReport, WorkerState, present_links

Event: TypeAlias = tuple[str, str]
"""(severity, text); the severity is info, warning or error."""

_SEVERITY = {
    WorkerState.STARTING: "info",
    WorkerState.READY: "info",
    WorkerState.DRAINING: "warning",
    WorkerState.UNHEALTHY: "error",
}


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The facts about the cluster whose changes are events.

    workers: (epoch, state) by worker id.
    broken: problem of each broken link by (reader, owner).
    """

    scheduler: str = ""
    workers: dict[str, tuple[int, WorkerState]] = field(default_factory=dict)
    broken: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: str, reports: Sequence[WorkerReport]) -> "ClusterFacts":
        """Take the facts out of the reports. `scheduler` is empty if none answers."""
        workers = {report.worker.worker_id: report.worker for report in reports}
        return cls(
            scheduler,
            {report.worker.worker_id: (report.worker.worker_epoch, report.state) for report in reports},
            {
                (report.worker.worker_id, link.peer.worker_id): link.problem or "a read failed"
                for report in reports
                if any(link.broken for link in report.links)
                for link in present_links(report.links, workers).values()
                if link.broken
            },
        )


def changes(before: ClusterFacts, after: ClusterFacts) -> Iterator[Event]:
    """Yield the events between two states, in the order: scheduler, workers, links."""
    if before.scheduler != after.scheduler:
        if not after.scheduler:
            yield "error", f"scheduler {before.scheduler} does not answer; workers are shown as last reported"
        else:
            yield "info", f"scheduler {after.scheduler} answers"
    for worker in sorted(before.workers.keys() | after.workers.keys()):
        yield from _worker_changes(worker, before.workers.get(worker), after.workers.get(worker))
    for (reader, owner), problem in after.broken.items():
        if (reader, owner) not in before.broken:
            yield "error", f"{reader} no longer reads from {owner}: {problem}"
    for reader, owner in before.broken.keys() - after.broken.keys():
        if reader in after.workers and owner in after.workers:
            yield "info", f"{reader} reads from {owner} again"


def _worker_changes(
    worker: str, before: tuple[int, WorkerState] | None, after: tuple[int, WorkerState] | None
) -> Iterator[Event]:
    if after is None:
        was_draining = before is not None and before[1] is WorkerState.DRAINING
        yield ("info", f"{worker} has drained and left") if was_draining else ("error", f"{worker} is lost")
    elif before is None:
        yield "info", f"{worker} joined, {after[1].value}"
    elif before[0] != after[0]:
        yield "warning", f"{worker} was restarted, {after[1].value}"
    elif before[1] is not after[1]:
        yield _SEVERITY[after[1]], f"{worker} is {after[1].value}"
