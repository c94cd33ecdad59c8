"""A link that is slower than required is refused, shown with the reason, and measured again with pauses."""

import asyncio

import pytest

from baton.core.errors import Reason, Refused
from baton.transfer.reader.speed_requirement import RETRY_MAX_S, RETRY_MIN_S, SpeedRequirement
from tests import builders
from tests.unit.transfer.pulls import pull_all, refusal_of, virtual
from tests.unit.transfer.transfer_rig import OWNER, READ_S, rig

SLOW_READ_S = 10 * READ_S
FAST_GBPS = builders.layout().block_bytes * 8 / READ_S / 1e9
MIN_GBPS = FAST_GBPS / 3


@pytest.mark.fault("F-17")
@virtual
async def test_slow_link_is_refused_before_a_pull_reads_from_it() -> None:
    async with rig(min_link_gbps=MIN_GBPS) as r:
        r.fabric.read_s = SLOW_READ_S
        job, _blocks = r.prefill("a", 18)
        early = r.kv_reader.pull(OWNER, job, have_blocks=0)  # before the link is measured
        await early.first_ready()
        receiving = r.mark_received(early, 5)
        failure = await refusal_of(early.done())
        assert (failure.reason, failure.retriable, failure.blamed) == (Reason.TRANSFER_FAILED, True, OWNER)
        r.release(receiving)
        assert not await r.kv_reader.warmed(OWNER)
        with pytest.raises(Refused, match=r"refused: measured 8.\d\de-05 Gbit/s; --min-link-gbps is"):
            r.kv_reader.pull(OWNER, builders.job_id(1), have_blocks=0)
        (link,) = r.kv_reader.links()
        assert (link.broken, link.problem.startswith("refused: measured")) == (True, True)
        assert (r.observed.broken[-1], r.observed.refused[-1]) == (True, True)
        assert r.fabric.reads == []
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_refused_link_is_measured_again_with_growing_pauses_until_it_is_fast_enough() -> None:
    async with rig(min_link_gbps=MIN_GBPS) as r:
        r.fabric.read_s = SLOW_READ_S
        assert not await r.kv_reader.warmed(OWNER)
        before = r.fabric.probes
        await asyncio.sleep(RETRY_MIN_S - 0.5)
        r.kv_reader.probe(OWNER)  # what a scheduler's command does
        await asyncio.sleep(0.4)
        assert r.fabric.probes == before
        await asyncio.sleep(60)
        assert r.fabric.probes - before == 3 * 2  # after 5, 15 and 35 s, a small and a measured one each
        r.fabric.read_s = READ_S
        await asyncio.sleep(60)
        (link,) = r.kv_reader.links()
        assert (link.broken, link.problem) == (False, "")
        assert r.observed.refused[-1] is False
        await pull_all(r)


@virtual
async def test_probe_of_one_block_does_not_repair_a_refused_link() -> None:
    async with rig(min_link_gbps=MIN_GBPS) as r:
        r.fabric.read_s = SLOW_READ_S
        assert not await r.kv_reader.warmed(OWNER)
        reads = r.kv_reader._links[OWNER.incarnation].reads
        assert reads is not None
        r.fabric.read_s = READ_S
        assert await reads.probe() is not None
        assert reads.broken
        assert reads.num_startable_blocks == 0


@virtual
async def test_link_that_breaks_before_its_measurement_is_measured_when_it_works() -> None:
    async with rig(min_link_gbps=MIN_GBPS) as r:
        r.fabric.reads_may_end.clear()
        assert not await r.kv_reader.warmed(OWNER)
        assert r.kv_reader.links()[0].problem == Reason.TRANSFER_TIMEOUT.value
        r.fabric.read_s = SLOW_READ_S
        r.fabric.reads_may_end.set()
        await asyncio.sleep(2)
        assert r.kv_reader.links()[0].problem.startswith("refused")


@virtual
async def test_link_that_broke_is_measured_again_before_it_is_used() -> None:
    async with rig(min_link_gbps=MIN_GBPS) as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.failing = True
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        receiving = r.mark_received(pull, 5)
        await refusal_of(pull.done())
        r.release(receiving)
        r.fabric.failing, r.fabric.read_s = False, SLOW_READ_S
        await asyncio.sleep(2)
        assert r.kv_reader.links()[0].problem.startswith("refused")


@virtual
async def test_link_is_measured_by_one_task_at_a_time() -> None:
    async with rig() as r:
        r.fabric.reads_may_end.clear()
        r.kv_reader.warm(OWNER)
        await asyncio.sleep(0.1)
        for _command in range(3):
            r.kv_reader.probe(OWNER)
        await asyncio.sleep(0.1)
        assert r.fabric.probes == 1
        r.fabric.reads_may_end.set()
        assert await r.kv_reader.warmed(OWNER)
        before = r.fabric.probes
        r.kv_reader.probe(OWNER)
        await asyncio.sleep(0.1)
        assert r.fabric.probes > before


@virtual
async def test_fast_link_is_used_and_without_a_requirement_any_is() -> None:
    for min_gbps, read_s in ((MIN_GBPS, READ_S), (0.0, SLOW_READ_S)):
        async with rig(min_link_gbps=min_gbps) as r:
            r.fabric.read_s = read_s
            assert await r.kv_reader.warmed(OWNER)
            await pull_all(r)
            assert r.kv_reader.links()[0].problem == ""


def test_pauses_between_measurements_double_to_a_limit_and_start_again_after_a_success() -> None:
    required = SpeedRequirement(8.0)
    assert not required.is_met
    pauses = []
    for _measurement in range(9):
        assert not required.judge(0.5e9, now_s=100.0)
        pauses.append(required.retry_s)
        assert not required.may_measure(100.0 + required.retry_s - 0.1)
        assert required.may_measure(100.0 + required.retry_s)
    assert pauses[:3] == [RETRY_MIN_S, 2 * RETRY_MIN_S, 4 * RETRY_MIN_S]
    assert pauses[-1] == RETRY_MAX_S
    assert required.refusal == "measured 4 Gbit/s; --min-link-gbps is 8"
    assert required.judge(1e9, now_s=500.0)
    assert (required.is_met, required.is_refused, required.retry_s) == (True, False, RETRY_MIN_S)
