"""Tests of the worker's metrics."""

from prometheus_client import CollectorRegistry

from baton.core.errors import Reason
from baton.worker.worker_metrics import MeteredExecutor, WorkerMetrics
from tests import builders
from tests.unit.worker.harness import pair
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.virtual_loop import virtual


@virtual
async def test_refresh_sets_gauges_and_counts_totals_once() -> None:
    async with pair() as workers:
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        _, decode = workers.send(num_tokens=30)
        await workers.to_d.ended(decode.job)
        workers.p.worker.engine.counters.drafts_verified("ngram", num_drafts=5, num_accepted=3)
        for _ in range(2):
            metrics.refresh(workers.p.worker)
        value = registry.get_sample_value
        assert value("baton_kv_blocks", {"tier": "device", "state": "cached"}) == 7
        assert value("baton_kv_blocks", {"tier": "device", "state": "used"}) == 0
        assert value("baton_leases_ended_total", {"outcome": "released"}) == 1
        assert value("baton_open_leases") == 0
        assert value("baton_draft_tokens_total", {"drafter": "ngram"}) == 5
        assert value("baton_accepted_draft_tokens_total", {"drafter": "ngram"}) == 3


@virtual
async def test_evicted_blocks_are_counted() -> None:
    async with pair(num_blocks=16) as workers:
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        for number in range(3):
            job = decode_job(40, request=b"r%d" % number)
            workers.to_d.send(job)
            await workers.to_d.ended(job.job)
            metrics.refresh(workers.d.worker)
        assert (registry.get_sample_value("baton_evictions_total") or 0) > 0


@virtual
async def test_steps_are_timed() -> None:
    async with pair() as workers:
        registry = CollectorRegistry()
        workers.d.worker.engine_loop.executor = MeteredExecutor(workers.d.executor, WorkerMetrics(registry).engine)
        job = decode_job(30)
        workers.to_d.send(job)
        await workers.to_d.ended(job.job)
        assert registry.get_sample_value("baton_step_seconds_count") == 8
        assert registry.get_sample_value("baton_step_tokens_total") == 37


def test_links_of_gone_workers_are_not_counted_as_broken() -> None:
    registry = CollectorRegistry()
    pulls = WorkerMetrics(registry).pulls
    here, gone = builders.worker_ref("here"), builders.worker_ref("gone")
    for owner in (here, gone):
        pulls.link_changed(owner, transport="tcp", bytes_per_s=1e9, broken=True, refused=False)
    assert registry.get_sample_value("baton_broken_links") == 2
    assert registry.get_sample_value("baton_link_bytes_per_second", {"peer": "gone", "transport": "tcp"}) == 1e9
    pulls.forget_gone({here})
    assert registry.get_sample_value("baton_broken_links") == 1
    assert registry.get_sample_value("baton_link_bytes_per_second", {"peer": "gone", "transport": "tcp"}) is None
    assert registry.get_sample_value("baton_link_bytes_per_second", {"peer": "here", "transport": "tcp"}) == 1e9
    pulls.pull_ended(here, reason=Reason.LEASE_LOST, transfer_bytes=10, duration_s=0.1, read_s=0.05)
    assert registry.get_sample_value("baton_transfers_total", {"transport": "tcp", "outcome": "lease_lost"}) == 1
    assert registry.get_sample_value("baton_transfer_read_seconds_total", {"transport": "tcp"}) == 0.05


def test_refused_links_are_counted_while_their_peer_is_known() -> None:
    registry = CollectorRegistry()
    pulls = WorkerMetrics(registry).pulls
    slow = builders.worker_ref("slow")
    pulls.link_changed(slow, transport="tcp", bytes_per_s=1e6, broken=True, refused=True)
    assert registry.get_sample_value("baton_refused_links") == 1
    pulls.link_changed(slow, transport="tcp", bytes_per_s=1e9, broken=False, refused=False)
    assert registry.get_sample_value("baton_refused_links") == 0
    pulls.link_changed(slow, transport="tcp", bytes_per_s=1e6, broken=True, refused=True)
    pulls.forget_gone(set())
    assert registry.get_sample_value("baton_refused_links") == 0


def test_link_with_a_new_transport_has_one_series() -> None:
    registry = CollectorRegistry()
    pulls = WorkerMetrics(registry).pulls
    for transport, speed in (("tcp", 1e9), ("rc_mlx5", 2e10)):
        pulls.link_changed(
            builders.worker_ref("w0"), transport=transport, bytes_per_s=speed, broken=False, refused=False
        )
    assert registry.get_sample_value("baton_link_bytes_per_second", {"peer": "w0", "transport": "tcp"}) is None
    assert registry.get_sample_value("baton_link_bytes_per_second", {"peer": "w0", "transport": "rc_mlx5"}) == 2e10


def test_new_incarnation_with_another_transport_replaces_the_series() -> None:
    registry = CollectorRegistry()
    pulls = WorkerMetrics(registry).pulls
    before, after = builders.worker_ref("w0", 1), builders.worker_ref("w0", 2)

    def speed(transport: str) -> float | None:
        return registry.get_sample_value("baton_link_bytes_per_second", {"peer": "w0", "transport": transport})

    pulls.link_changed(before, transport="tcp", bytes_per_s=1e9, broken=False, refused=False)
    pulls.link_changed(after, transport="rc_mlx5", bytes_per_s=2e10, broken=False, refused=False)
    pulls.forget_gone({after})
    assert (speed("tcp"), speed("rc_mlx5")) == (None, 2e10)
    pulls.forget_gone(set())
    assert speed("rc_mlx5") is None
    pulls.link_changed(
        before, transport="", bytes_per_s=0.0, broken=True, refused=False
    )  # broken before it was known how
    pulls.forget_gone(set())
    assert speed("") is None


def test_measured_backends_of_a_peer_are_shown_until_it_is_gone() -> None:
    registry = CollectorRegistry()
    pulls = WorkerMetrics(registry).pulls
    peer = builders.worker_ref("w0")

    def speeds() -> list[float | None]:
        return [
            registry.get_sample_value("baton_link_backend_bytes_per_second", {"peer": "w0", "transfer": transfer})
            for transfer in ("nixl", "local", "collective")
        ]

    pulls.backends_measured(peer, {"nixl": 1e9, "local": 8e9})
    assert speeds() == [1e9, 8e9, None]
    pulls.backends_measured(peer, {"local": 7e9, "collective": 0.0})
    assert speeds() == [None, 7e9, 0.0]
    pulls.forget_gone({peer})
    assert speeds() == [None, 7e9, 0.0]
    pulls.forget_gone(set())
    assert speeds() == [None, None, None]


def test_bandwidth_series_is_reset_for_a_new_incarnation() -> None:
    registry = CollectorRegistry()
    pulls = WorkerMetrics(registry).pulls
    before, after = builders.worker_ref("w0", 1), builders.worker_ref("w0", 2)
    pulls.link_changed(before, transport="tcp", bytes_per_s=1e9, broken=False, refused=False)
    pulls.forget_gone({after})  # not measured yet
    assert registry.get_sample_value("baton_link_bytes_per_second", {"peer": "w0", "transport": "tcp"}) is None


def test_worker_info_has_id_role_and_epoch() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry).identify(builders.worker_ref("w0", 255), "decode")
    labels = {"worker": "w0", "role": "decode", "epoch": "00000000000000ff"}
    assert registry.get_sample_value("baton_worker_info", labels) == 1


@virtual
async def test_leases_are_counted_by_outcome() -> None:
    async with pair() as workers:
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        prefill, _ = workers.jobs(num_tokens=30)
        workers.to_p.send(prefill)  # no reader follows
        await workers.to_p.ended_prefill(prefill.job)
        metrics.refresh(workers.p.worker)
        assert registry.get_sample_value("baton_kv_blocks_held_for_others") == 8
        await workers.until_clean()
        metrics.refresh(workers.p.worker)
        ended = {
            outcome: registry.get_sample_value("baton_leases_ended_total", {"outcome": outcome}) for outcome in OUTCOMES
        }
        assert ended == {"released": 0, "abandoned": 0, "expired": 0, "unclaimed": 1}
        assert registry.get_sample_value("baton_kv_blocks_held_for_others") == 0


OUTCOMES = ("released", "abandoned", "expired", "unclaimed")
