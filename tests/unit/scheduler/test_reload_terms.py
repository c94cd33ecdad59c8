"""Prefixes in host memory: what their reload costs, and when another worker is better."""

from dataclasses import replace

import pytest

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.worker_report import TierReport
from baton.core.kv.block_hash import num_blocks_for
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import PrefixSource
from baton.core.reload_limits import MAX_PULL_S, PEER_RELOAD_SHARE, RELOAD_GAIN
from baton.scheduler.decisions.decision_records import RecordedOverlap
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.state.worker_links import DEFAULT_PULL_S
from tests.unit.scheduler.measured_workers import COSTS, LAYOUT, WINDOWED, decoding, fast_link, measured, queued, seen
from tests.unit.scheduler.policy_cases import LONG, busy, chosen, predicted

NUM_BLOCKS = 64
BLOCK_BYTES = LAYOUT.block_bytes


def tier(bytes_per_s: float, disk_bytes_per_s: float = 0.0) -> tuple[TierReport, ...]:
    speeds = {"host": bytes_per_s, "disk": disk_bytes_per_s}
    return tuple(TierReport(tier=name, total=20_000, held=100, load_bytes_per_s=each) for name, each in speeds.items())


def with_reloads(cluster: ClusterSnapshot, **reloaded: int | tuple[int, int]) -> ClusterSnapshot:
    """Return the cluster in which so many of the blocks that workers hold are in slower tiers only, and so
    many of these on disk only."""
    numbers = {name: each if isinstance(each, tuple) else (each, 0) for name, each in reloaded.items()}
    overlaps = {
        name: RecordedOverlap(known.num_blocks, known.num_held_blocks, *numbers.get(name, (0, 0)))
        for name, known in cluster.overlaps.items()
    }
    return ClusterSnapshot(workers=cluster.workers, overlaps=overlaps)


def reload_s(choice: Choice) -> float:
    got = predicted(choice)
    return got.ttft_s - got.queue_s - got.prefill_s


def test_a_reload_costs_its_bytes_at_the_measured_speed() -> None:
    p = measured("p", "prefill", tiers=tier(1e8))
    got = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=48))
    assert reload_s(got) == pytest.approx(48 * BLOCK_BYTES / 1e8)
    assert predicted(got).prefill_s == pytest.approx(
        COSTS.prefill_s(LONG - NUM_BLOCKS * 16, NUM_BLOCKS * 16, 512), rel=0.01
    )


def test_only_what_lasts_longer_than_the_queue_counts() -> None:
    p = measured("p", "prefill", tiers=tier(1e8), **queued(1024))
    got = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=48))
    assert reload_s(got) == pytest.approx(max(0.0, 48 * BLOCK_BYTES / 1e8 - predicted(got).queue_s))


def test_a_reload_waits_for_those_under_way() -> None:
    tiers = (TierReport(tier="host", total=20_000, load_bytes_per_s=1e8, loading_bytes=10 * BLOCK_BYTES),)
    cluster = seen(measured("p", "prefill", tiers=tiers), busy(), p=NUM_BLOCKS)
    assert reload_s(chosen(with_reloads(cluster, p=48))) == pytest.approx(58 * BLOCK_BYTES / 1e8)
    assert reload_s(chosen(cluster)) == 0.0


def test_a_reload_has_a_fixed_time() -> None:
    tiers = (TierReport(tier="host", total=20_000, load_bytes_per_s=1e8, load_overhead_s=0.003),)
    cluster = seen(measured("p", "prefill", tiers=tiers), busy(), p=NUM_BLOCKS)
    assert reload_s(chosen(with_reloads(cluster, p=48))) == pytest.approx(48 * BLOCK_BYTES / 1e8 + 0.003)
    assert reload_s(chosen(cluster)) == 0.0


def test_blocks_that_a_prompt_cannot_use_are_not_reloaded() -> None:
    p, usable = measured("p", "prefill", tiers=tier(1e8)), (LONG - 1) // 16
    cluster = with_reloads(seen(p, busy(), p=usable + 1), p=3)
    assert reload_s(chosen(cluster)) == pytest.approx(2 * BLOCK_BYTES / 1e8)


def test_a_reload_never_costs_more_than_computing() -> None:
    p = measured("p", "prefill", tiers=tier(1.0))
    slow = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=NUM_BLOCKS))
    computed = chosen(seen(measured("p", "prefill"), busy()))
    assert predicted(slow).ttft_s == pytest.approx(predicted(computed).ttft_s)
    assert slow.prefill_overlap_blocks == 0, "what is computed again is not reused"


@pytest.mark.parametrize("bytes_per_s", [0.0, float("nan"), -1.0])
def test_an_unknown_speed_costs_nothing(bytes_per_s: float) -> None:
    p = measured("p", "prefill", tiers=tier(bytes_per_s))
    assert reload_s(chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=NUM_BLOCKS))) == 0.0


def test_a_worker_with_the_prefix_on_its_device_comes_first() -> None:
    tiered, warm = measured("a", "prefill", tiers=tier(1e8)), measured("b", "prefill")
    cluster = seen(tiered, warm, busy(), a=NUM_BLOCKS, b=NUM_BLOCKS)
    assert chosen(cluster).prefill.worker_id == "a"
    assert chosen(with_reloads(cluster, a=NUM_BLOCKS)).prefill.worker_id == "b"


def test_a_decision_shows_the_reload() -> None:
    p = measured("p", "prefill", tiers=tier(1e8))
    got = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=48))
    terms = next(c.terms for c in got.candidates if c.worker.worker_id == "p" and c.side == "prefill")
    assert terms["reloaded_blocks"] == 48
    assert terms["reload_s"] == pytest.approx(48 * BLOCK_BYTES / 1e8)


def test_host_and_disk_load_at_the_same_time() -> None:
    p = measured("p", "prefill", tiers=tier(1e8, 2e8))
    got = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=(48, 32)))
    assert reload_s(got) == pytest.approx(32 * BLOCK_BYTES / 2e8)
    terms = next(c.terms for c in got.candidates if c.worker.worker_id == "p" and c.side == "prefill")
    assert (terms["reloaded_blocks"], terms["disk_blocks"]) == (48, 32)


def test_what_a_slow_disk_holds_is_computed_and_the_rest_reloaded() -> None:
    p = measured("p", "prefill", tiers=tier(1e9, 1.0))
    slow = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS), p=(48, 16)))
    without = chosen(with_reloads(seen(p, busy(), p=NUM_BLOCKS - 16), p=32))
    assert predicted(slow).ttft_s == pytest.approx(predicted(without).ttft_s)
    assert slow.prefill_overlap_blocks == without.prefill_overlap_blocks == NUM_BLOCKS - 16


@pytest.mark.parametrize(("disk_bytes_per_s", "pulls"), [(1e6, True), (1e7, False)])
def test_a_peer_is_pulled_from_if_it_is_faster_than_the_own_disk(disk_bytes_per_s: float, pulls: bool) -> None:
    q = measured("q", "prefill", **queued(65536))
    p = measured("p", "prefill", tiers=tier(1e9, disk_bytes_per_s))
    cluster = seen(p, q, busy(), p=NUM_BLOCKS, q=NUM_BLOCKS)
    got = chosen(with_reloads(cluster, p=(40, 32)))
    assert got.prefill.worker_id == "p"
    assert (got.prefix_source is not None) is pulls
    terms = next(c.terms for c in got.candidates if c.worker.worker_id == "p" and c.side == "prefill")
    assert terms.get("pulled_blocks", 0) == 32 * pulls
    assert got.prefill_overlap_blocks == NUM_BLOCKS - 32 * pulls
    assert reload_s(got) >= 8 * BLOCK_BYTES / 1e9 - predicted(got).queue_s, "what is in host memory is reloaded anyway"


def pulled_from_q(disk_bytes_per_s: float, *, reader: str = "prefill", **of_disk: float) -> Choice:
    """The choice if an idle worker has nothing, and a busy one has the prefix: 16 blocks on the device, 16 in
    host memory, and 32 on its disk."""
    tiers = [replace(each, **of_disk) if each.tier == "disk" else each for each in tier(1e9, disk_bytes_per_s)]
    q = measured("q", "prefill", tiers=tuple(tiers), **queued(65536))
    a = measured("a", reader, links=(fast_link("q"),))
    return chosen(with_reloads(seen(a, q, *([busy()] if reader == "prefill" else []), q=NUM_BLOCKS), q=(48, 32)))


@pytest.mark.parametrize("reader", ["prefill", "decode", "hybrid"])
def test_blocks_on_the_disk_of_another_worker_are_pulled_after_a_reload(reader: str) -> None:
    got = pulled_from_q(1e8, reader=reader, load_overhead_s=0.003)
    source = got.prefix_source
    assert source is not None
    assert (source.num_blocks, source.num_host_blocks, source.num_disk_blocks) == (NUM_BLOCKS, 16, 32)
    reload_s = 32 * BLOCK_BYTES / 1e8 + 0.003
    assert predicted(got).prefix_pull_s == pytest.approx(reload_s + NUM_BLOCKS * BLOCK_BYTES / 1e9 + DEFAULT_PULL_S)
    terms = next(c.terms for c in got.candidates if c.worker.worker_id == "a" and c.side == "prefill")
    assert (terms["pulled_blocks"], terms["source_reload_s"]) == (NUM_BLOCKS, pytest.approx(reload_s))
    assert predicted(got).prefill_s == pytest.approx(
        COSTS.prefill_s(LONG - NUM_BLOCKS * 16, NUM_BLOCKS * 16, 512), rel=0.02
    )


@pytest.mark.parametrize("changes", [{}, {"loading_bytes": 10**9}], ids=["idle", "busy"])
@pytest.mark.parametrize("disk_bytes_per_s", [0.0, 1e5], ids=["unknown", "slow"])
def test_blocks_on_a_slow_disk_of_another_worker_are_not_pulled(
    disk_bytes_per_s: float, changes: dict[str, float]
) -> None:
    source = pulled_from_q(disk_bytes_per_s, **changes).prefix_source
    assert source is not None
    assert (source.num_blocks, source.num_host_blocks, source.num_disk_blocks) == (NUM_BLOCKS - 32, 16, 0)


def source_on_disk(
    *, reader_token_s: float, start_s: float, block_s: float, layout: KvLayout = LAYOUT, reader: str = "prefill"
) -> PrefixSource | None:
    """The prefix that an idle worker pulls if a slow and busy one has all of it on its disk.

    block_s: time to reload a block of tokens
    """
    block_bytes = layout.block_bytes * layout.windows.num_held_blocks(LONG) / num_blocks_for(LONG, 16)
    disk = TierReport(
        tier="disk", total=20_000, held=100, load_bytes_per_s=block_bytes / block_s, load_overhead_s=start_s
    )
    slow, costs = replace(COSTS, prefill_token_s=0.02), replace(COSTS, prefill_token_s=reader_token_s)
    q = measured("q", "prefill", layout=layout, costs=slow, tiers=(disk,), **queued(65536))
    a = measured("a", reader, layout=layout, costs=costs, links=(fast_link("q"),))
    others = [measured("d", "decode", layout=layout, **decoding(64))] if reader == "prefill" else []
    return chosen(with_reloads(seen(a, q, *others, q=NUM_BLOCKS), q=(NUM_BLOCKS, NUM_BLOCKS))).prefix_source


@pytest.mark.parametrize("reader", ["prefill", "decode"])
@pytest.mark.parametrize(("gain", "is_pulled"), [(1.1 * RELOAD_GAIN, True), (0.9 * RELOAD_GAIN, False)])
def test_a_reload_that_its_owner_would_not_begin_is_not_counted_on(gain: float, is_pulled: bool, reader: str) -> None:
    """It does not begin one that takes about as long as the reader computes."""
    compute_s = replace(COSTS, prefill_token_s=1e-3).prefill_s(NUM_BLOCKS * 16, 0, 512)
    source = source_on_disk(reader_token_s=1e-3, start_s=compute_s / gain, block_s=1e-5, reader=reader)
    assert (source is not None) is is_pulled


@pytest.mark.parametrize(("layout", "num_blocks"), [(LAYOUT, 40), (WINDOWED, None)], ids=["whole", "windowed"])
def test_a_reload_is_shortened_to_what_its_owner_begins(layout: KvLayout, num_blocks: int | None) -> None:
    """A shorter prefix is of no use with windows."""
    block_s = PEER_RELOAD_SHARE * MAX_PULL_S / 40.5
    source = source_on_disk(reader_token_s=0.02, start_s=0.0, block_s=block_s, layout=layout)
    assert (source and source.num_blocks) == (source and source.num_disk_blocks) == num_blocks


def test_a_reload_at_another_worker_waits_for_those_under_way() -> None:
    idle, loading = pulled_from_q(1e8), pulled_from_q(1e8, loading_bytes=10 * BLOCK_BYTES)
    waited_s = predicted(loading).prefix_pull_s - predicted(idle).prefix_pull_s
    assert waited_s == pytest.approx(10 * BLOCK_BYTES / 1e8)


@pytest.mark.parametrize(("disk_bytes_per_s", "source"), [(1e9, "h"), (1e5, "q")])
def test_the_longer_prefix_on_a_disk_competes_with_the_shorter_one_in_memory(
    disk_bytes_per_s: float, source: str
) -> None:
    q = measured("q", "prefill", **queued(65536))
    h = measured("h", "prefill", tiers=tier(1e9, disk_bytes_per_s), **queued(65536))
    a = measured("a", "prefill", links=(fast_link("h"), fast_link("q")))
    cluster = seen(a, q, h, busy(), q=NUM_BLOCKS, h=2 * NUM_BLOCKS)
    got = chosen(with_reloads(cluster, h=(2 * NUM_BLOCKS, 2 * NUM_BLOCKS))).prefix_source
    assert got is not None
    assert got.worker.worker_id == source


def test_workers_with_the_longest_prefix_are_considered_and_those_in_memory_first() -> None:
    holders = {f"h{i}": NUM_BLOCKS for i in range(7)}
    views = [measured(name, "prefill", tiers=tier(1e9, 1e9), **queued(65536)) for name in holders]
    a = measured("a", "prefill", links=(fast_link("h6"),))
    on_disk = {f"h{i}": (NUM_BLOCKS, NUM_BLOCKS) for i in range(6)}
    got = chosen(with_reloads(seen(a, *views, busy(), **holders), **on_disk))
    assert got.holders == ("d", "h0", "h1", "h2", "h6")
    assert got.prefix_source is not None
    assert got.prefix_source.worker.worker_id == "h6"


def test_workers_with_slow_disks_displace_no_holder() -> None:
    slow = [measured(f"h{i}", "prefill", tiers=tier(1e9, 1e5), **queued(65536)) for i in range(5)]
    q = measured("q", "prefill", **queued(65536))
    holders = {f"h{i}": 2 * NUM_BLOCKS for i in range(5)}
    cluster = seen(measured("a", "prefill"), q, *slow, busy(), q=NUM_BLOCKS, **holders)
    got = chosen(with_reloads(cluster, **dict.fromkeys(holders, (2 * NUM_BLOCKS, 2 * NUM_BLOCKS))))
    assert got.prefix_source is not None
    assert got.prefix_source.worker.worker_id == "q"
