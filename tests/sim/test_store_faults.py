"""Faults of the store change neither answers nor TTFT, and a gauge shows them."""

import asyncio
from dataclasses import replace

import pytest

from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_stores import StoreFault
from tests.sim.one_request import Answer, ask
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim


def answers(fault: StoreFault) -> tuple[list[Answer], list[float]]:
    """Answers to requests during a fault, and the gauge of the degraded store before, during and after it."""

    async def main() -> tuple[list[Answer], list[float]]:
        cluster = SimCluster(replace(config("kv_centric"), prefill=2, decode=2), SimModel(), seed=28)
        await cluster.start()
        await asyncio.sleep(3.0)
        degraded = cluster.schedulers["scheduler"]._metrics.store_degraded
        await ask(cluster, 0)
        await asyncio.sleep(3.0)
        gauge = [degraded._value.get()]
        cluster.stores.fault = fault
        answered = []
        for number in range(1, 9):
            answered.append(await ask(cluster, number))
            await asyncio.sleep(1.0)
        gauge.append(degraded._value.get())
        cluster.stores.fault = StoreFault.NONE
        await asyncio.sleep(10.0)
        await ask(cluster, 0)
        await asyncio.sleep(10.0)
        gauge.append(degraded._value.get())
        await cluster.aclose()
        return answered, gauge

    return virtual_time.run(main())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(StoreFault.DOWN, marks=pytest.mark.fault("F-27")),
        pytest.param(StoreFault.HANGING, marks=pytest.mark.fault("F-28")),
        pytest.param(StoreFault.FULL, marks=pytest.mark.fault("F-29")),
    ],
    ids=lambda fault: fault.value,
)
def test_store_fault_changes_no_ttft_and_is_shown_by_the_gauge(fault: StoreFault) -> None:
    (undisturbed, _), (disturbed, gauge) = answers(StoreFault.NONE), answers(fault)
    assert [answer.token_ids for answer in disturbed] == [answer.token_ids for answer in undisturbed]
    for with_fault, without in zip(disturbed, undisturbed, strict=True):
        assert with_fault.known_timeline.attempts == 1
        assert with_fault.known_timeline.ttft_s == pytest.approx(without.known_timeline.ttft_s, abs=0.02)
    assert gauge == [0.0, 1.0, 0.0]
