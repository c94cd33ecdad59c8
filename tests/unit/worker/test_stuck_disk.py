"""A copy of NIXL that never ends: the disk is used no more until the worker is restarted."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.sim.sim_disk import READ_LATENCY_S
from baton.worker.disk.os_file import NoAnswer
from baton.worker.tiers import warm_start
from baton.worker.tiers.disk_tier import SILENT_S, STORE_PAUSE_S, DiskTier
from tests.unit.worker.harness import cluster
from tests.unit.worker.test_disk_tier_worker import TENANT, answered, block_to_store, disk_of, hash_of, restarted, start
from tests.unit.worker.test_host_tier_worker import Host
from tests.unit.worker.virtual_loop import virtual

COPY_LIMIT_S = 30.0


def never(*_: Any) -> Any:
    raise NoAnswer("a copy has not ended")


async def read(host: Host, disk: DiskTier) -> None:
    disk._store.read = never  # type: ignore[method-assign]
    assert await host.answer(0) == {}


async def store(host: Host, disk: DiskTier) -> None:
    disk._store.write = never  # type: ignore[method-assign]
    assert await disk.store([block_to_store(hash_of(1), 0)]) == 0


async def erase(host: Host, disk: DiskTier) -> None:
    disk._store.erase = never  # type: ignore[method-assign]
    with pytest.raises(NoAnswer):
        await disk.erase_tenant(TENANT)


def num_logged(caplog: pytest.LogCaptureFixture, event: str) -> int:
    return sum(event in str(record.msg) for record in caplog.records)


@pytest.mark.fault("F-60")
@pytest.mark.parametrize(
    ("stick", "latency_s"),
    [
        pytest.param(read, READ_LATENCY_S, id="read in time"),
        pytest.param(read, SILENT_S / 2, id="late read"),
        pytest.param(read, COPY_LIMIT_S, id="silent read"),
        pytest.param(store, READ_LATENCY_S, id="store"),
        pytest.param(erase, READ_LATENCY_S, id="erase"),
    ],
)
@virtual
async def test_after_a_copy_that_never_ends_the_disk_is_silent_for_good(
    stick: Callable[[Host, DiskTier], Any],
    latency_s: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_start, "LEFT_FREE_SHARE", 1.0)
    async with cluster() as simulated:
        await answered(await start(simulated), 0, 1, 2)
        host = await restarted(simulated)
        await asyncio.sleep(1)
        disk = disk_of(host.node)
        simulated.disks["p"].latency_s = latency_s
        await stick(host, disk)
        await asyncio.sleep(2 * COPY_LIMIT_S)
        assert not disk.answers
        simulated.disks["p"].latency_s = READ_LATENCY_S
        for name in ("read", "write", "erase"):
            disk._store.__dict__.pop(name, None)
        await asyncio.sleep(STORE_PAUSE_S)
        held, reads = disk.counts().held, disk.totals.loaded_blocks
        for prompt in (1, 2, 3):
            assert await host.answer(prompt) == {}
        await asyncio.sleep(STORE_PAUSE_S)
        assert (disk.counts().held, disk.totals.loaded_blocks) == (held, reads)
        assert disk.counts().busy == 0
        (reported,) = simulated.scheduler.reports["p"][-1].tiers
        assert reported.load_bytes_per_s == 1.0
        assert (num_logged(caplog, "disk_kv_stuck"), num_logged(caplog, "disk_kv_answers_again")) == (1, 0)
        assert "restart the worker" in caplog.text
        again = await restarted(simulated)
        assert disk_of(again.node).answers
