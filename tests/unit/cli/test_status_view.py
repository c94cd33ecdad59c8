"""Text output of `baton status`."""

from dataclasses import replace

from baton.cli.admin.status_view import render_status
from baton.cli.formatting import seconds, size, speed
from baton.core.cluster.worker_report import TierReport, WorkerState
from tests.builders import blocks, cluster_status, link, worker_report
from tests.unit.cli.screen import printed, row


def test_gateway_and_scheduler_have_a_row() -> None:
    screen = printed(render_status(cluster_status(worker_report("w0", host="here"), open_requests=1)))
    assert screen.splitlines()[0] == "demo  baton 1.2.3  1 open request"
    assert row(screen, "gateway") == ["gateway", "g0", "11", "127.0.0.1:8001"]
    assert row(screen, "scheduler") == ["scheduler", "s0", "12", "127.0.0.1:9000"]


def test_worker_row_begins_with_its_load() -> None:
    report = worker_report(
        "w0",
        "decode",
        state=WorkerState.DRAINING,
        pid=4711,
        host="here",
        running_seqs=3,
        waiting_seqs=2,
        waiting_prefill_tokens=12_345,
        open_leases=7,
    )
    screen = printed(render_status(cluster_status(report)))
    assert row(screen, "worker") == ["worker", "running", "waiting", "role", "state", "to", "prefill", "leases", "pid"]
    assert row(screen, "w0  ") == ["w0", "3", "2", "decode", "draining", "12,345", "7", "4711"]


def test_slower_tiers_have_a_table_if_there_are_any() -> None:
    tier = TierReport(tier="host", total=2000, held=1234, load_bytes_per_s=12e9, load_overhead_s=0.0013)
    tiered, plain = worker_report("w0", tiers=(tier,)), worker_report("w1")
    screen = printed(render_status(cluster_status(tiered, plain)))
    memory = size(2000 * tiered.layout.block_bytes).split()
    table = screen[screen.index("KV blocks in slower tiers") :]
    assert row(table, "w0  ") == [
        "w0",
        "host",
        "1,234",
        "2,000",
        *memory,
        *speed(12e9).split(),
        *seconds(0.0013).split(),
    ]
    assert "slower tiers" not in printed(render_status(cluster_status(plain)))
    unmeasured = worker_report("w0", tiers=(replace(tier, load_bytes_per_s=0.0),))
    assert "unmeasured" in printed(render_status(cluster_status(unmeasured)))


def test_host_epoch_and_model_are_shown_only_where_they_differ() -> None:
    one, other = worker_report("w0", host="here", epoch=0xABCDEF0123456789), worker_report("w1", host="node-1")
    screen = printed(render_status(cluster_status(one, other)))
    assert row(screen, "worker")[-1] == "host"
    assert row(screen, "gateway") == ["gateway", "g0", "11", "here", "127.0.0.1:8001"]
    twice = printed(render_status(cluster_status(one, replace(one, worker=replace(one.worker, worker_epoch=2**60)))))
    assert row(twice, "worker")[-1] == "epoch"
    assert row(twice, "w0")[-1] in ("abcdef01", "10000000")
    assert row(printed(render_status(cluster_status(one, replace(one, model="x")))), "worker")[-1] == "model"
    assert printed(render_status(cluster_status(replace(one, model="x")))).startswith("x  baton")


def test_workers_that_need_attention_come_first_and_are_named() -> None:
    reports = (
        worker_report("w0"),
        worker_report("w1", blocks=blocks(quarantined=2)),
        worker_report("w2", links=(link("w1", broken=True),)),
        worker_report("w3", state=WorkerState.UNHEALTHY),
        worker_report("w4", state=WorkerState.STARTING),
        worker_report("w5", waiting_seqs=9),
    )
    lines = printed(render_status(cluster_status(*reports))).splitlines()
    assert lines[1:5] == [
        "w2 does not read KV from w1",
        "w3 is unhealthy",
        "w1 has 2 blocks in quarantine",
        "and 2 more, see below",
    ]
    begin = next(i for i, line in enumerate(lines) if line.startswith("worker"))
    assert [line.split()[0] for line in lines[begin + 1 : begin + 7]] == ["w2", "w3", "w1", "w4", "w5", "w0"]


def test_status_of_a_busy_cluster_fits_80_columns() -> None:
    reports = tuple(
        worker_report(
            f"prefill-{index}",
            "prefill",
            blocks=blocks(total=123_456, cached=9_999, used=99_999, receiving=4, quarantined=5, held_for_others=999),
            pid=4_194_304,
            running_seqs=256,
            waiting_seqs=256,
            waiting_prefill_tokens=1_234_567,
            open_leases=999,
            host="here",
            links=(link("prefill-0"),),
        )
        for index in range(2)
    )
    text = printed(render_status(cluster_status(*reports)), width=80)
    load = ["prefill-1", "256", "256", "prefill", "ready", "1,234,567", "999", "4194304"]
    assert row(text[text.index("worker ") :], "prefill-1") == load
    assert "…" not in text
    rows = [line for line in text.splitlines() if line.startswith("prefill-")]
    assert len(rows) == 8, "two workers in their troubles, load, blocks and links"
    assert len(text.splitlines()) == 20, "no row is wrapped"


def test_blocks_are_shown_by_state() -> None:
    counts = blocks(total=1_000, cached=20, used=30, receiving=4, quarantined=5, held_for_others=6)
    screen = printed(render_status(cluster_status(worker_report("w0", blocks=counts))))
    below = screen[screen.index("KV blocks") :]
    assert below.startswith("KV blocks of 4 tokens in float32, 1,000 KiB per worker")
    assert row(below, "w0") == ["w0", "30", "6", "20", "941", "4", "5", "1,000"]


def test_links_beyond_the_limit_are_counted() -> None:
    links = tuple(link(f"w{index}", broken=index == 3) for index in range(1, 5))
    screen = printed(render_status(cluster_status(worker_report("w0", links=links)), max_links=2))
    assert row(screen, "w0 reads")[2] == "w3", "the broken one comes first"
    assert "and 2 more links, 0 broken" in screen


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


def test_link_shows_the_measured_backends_and_those_that_were_left_out() -> None:
    choice = "local 8 GB/s, nixl left out (not installed)"
    reports = (worker_report("w1", "decode", links=(replace(link("w0"), choice=choice),)),)
    assert f"shared-memory (auto: {choice})" in printed(render_status(cluster_status(*reports)))


def test_an_empty_cluster_and_an_unreachable_scheduler_are_shown() -> None:
    screen = printed(render_status(cluster_status(scheduler=None)))
    assert "no workers" in screen
    assert "not reachable" in screen
