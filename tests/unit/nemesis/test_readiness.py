"""A cluster counts as ready only while all workers are ready and each decode worker is linked, for a time."""

from dataclasses import replace

from baton.core.client_api import ClusterStatus, ProcessInfo, WorkerStatus
from baton.core.cluster.worker_report import LinkReport, WorkerState
from tests.builders import worker_ref, worker_report
from tests.nemesis.readiness import all_linked, holds_for

NAMES = ("d0", "h0", "p0")


def status_of(*workers: WorkerStatus) -> ClusterStatus:
    return ClusterStatus(version="1", model="demo", gateway=ProcessInfo(process_id="gateway"), workers=workers)


def linked_to(*peers: str, epoch: int = 1, broken: bool = False) -> tuple[LinkReport, ...]:
    return tuple(LinkReport(peer=worker_ref(peer, epoch), bytes_per_s=1e9, broken=broken) for peer in peers)


def worker(name: str, role: str, links: tuple[LinkReport, ...] = ()) -> WorkerStatus:
    return WorkerStatus.of(worker_report(name, role, links=links))


DECODE = worker("d0", "decode", linked_to("h0", "p0"))
OTHERS = (worker("h0", "hybrid"), worker("p0", "prefill"))


def test_all_workers_must_be_ready_and_linked() -> None:
    assert all_linked(status_of(DECODE, *OTHERS), NAMES)
    assert not all_linked(status_of(DECODE, OTHERS[0]), NAMES)
    assert not all_linked(status_of(replace(DECODE, state=WorkerState.STARTING), *OTHERS), NAMES)
    assert not all_linked(status_of(replace(DECODE, links=linked_to("p0")), *OTHERS), NAMES)
    assert not all_linked(status_of(replace(DECODE, links=linked_to("h0", "p0", epoch=2)), *OTHERS), NAMES)
    assert not all_linked(status_of(replace(DECODE, links=linked_to("h0", "p0", broken=True)), *OTHERS), NAMES)


def test_interruption_starts_the_time_again() -> None:
    now_s, complete = 0.0, status_of(DECODE, *OTHERS)
    has_held = holds_for(4.0, lambda status: all_linked(status, NAMES), lambda: now_s)

    def holds_at(time_s: float, status: ClusterStatus) -> bool:
        nonlocal now_s
        now_s = time_s
        return has_held(status)

    assert not holds_at(0.0, complete)
    assert not holds_at(3.5, status_of(DECODE))
    assert not holds_at(4.5, complete)
    assert not holds_at(8.4, complete)
    assert holds_at(8.5, complete)
