"""Text output of `baton status`."""

from dataclasses import replace

from baton.cli.admin.status_view import render_status
from baton.core.cluster.worker_report import WorkerState
from tests.builders import blocks, cluster_status, link, worker_report
from tests.unit.cli.screen import printed, row


def test_gateway_and_scheduler_have_a_row() -> None:
    screen = printed(render_status(cluster_status(worker_report("w0"), open_requests=1)))
    assert screen.splitlines()[0] == "demo  baton 1.2.3  1 open request"
    assert row(screen, "gateway") == ["gateway", "g0", "11", "here", "127.0.0.1:8001"]
    assert row(screen, "scheduler") == ["scheduler", "s0", "12", "here", "127.0.0.1:9000"]


def test_worker_row_shows_state_and_load() -> None:
    report = worker_report(
        "w0",
        "decode",
        epoch=0xABCDEF0123456789,
        state=WorkerState.DRAINING,
        pid=4711,
        host="node-1",
        running_seqs=3,
        waiting_seqs=2,
        waiting_prefill_tokens=12_345,
        open_leases=7,
    )
    expected = ["w0", "decode", "draining", "4711", "node-1", "abcdef01", "demo", "3", "2", "12,345", "7"]
    assert row(printed(render_status(cluster_status(report))), "w0") == expected


def test_blocks_are_shown_by_state() -> None:
    counts = blocks(total=1_000, cached=20, used=30, receiving=4, quarantined=5, held_for_others=6)
    screen = printed(render_status(cluster_status(worker_report("w0", blocks=counts))))
    below = screen[screen.index("blocks") :]
    assert row(below, "w0") == ["w0", "1,000", "941", "20", "30", "6", "4", "5", "4", "tokens", "1,000", "KiB"]


def test_refused_link_shows_why_it_is_not_used() -> None:
    problem = "refused: measured 0.04 Gbit/s; --min-link-gbps is 1"
    reports = (worker_report("w1", "decode", links=(replace(link("w0", broken=True), problem=problem),)),)
    assert problem in printed(render_status(cluster_status(*reports)))


def test_links_show_their_transport_and_whether_they_are_broken() -> None:
    reports = (
        worker_report("w0", "prefill"),
        worker_report("w1", "decode", links=(link("w0"), link("w2", broken=True))),
    )
    screen = printed(render_status(cluster_status(*reports)))
    assert row(screen, "w1 reads w0") == ["w1", "reads", "w0", "shared-memory", "1", "GB/s", "0", "B", "ok"]
    assert row(screen, "w1 reads w2")[-1] == "broken"
    assert "reads" not in printed(render_status(cluster_status(*reports[:1]))), "no table of links without links"


def test_an_empty_cluster_and_an_unreachable_scheduler_are_shown() -> None:
    screen = printed(render_status(cluster_status(scheduler=None)))
    assert "no workers" in screen
    assert "not reachable" in screen
