"""Cost fuzzing: no request, legal or malformed, blocks the gateway's event loop or takes much of its memory.

A real gateway process serves random requests at every legal extreme, and malformed ones, in pipelined
batches. See `cost_fuzz/measured_batch.py` for the limits.
"""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.gateway.cost_fuzz.cost_case import CostCase
from tests.integration.gateway.cost_fuzz.drawn_cases import CaseDrawer
from tests.integration.gateway.cost_fuzz.extremes import extremes
from tests.integration.gateway.cost_fuzz.measured_batch import GatewayMeter, find_failing
from tests.integration.gateway.gateway_process import gateway_process
from tests.integration.gateway.stub_cluster import HEARTBEAT_S
from tests.scale import sized

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc for the largest memory of a process"),
]

BATCH = 500
ROOT = Path(__file__).resolve().parents[3]
NUM_BATCHES = sized(4, 60)
MIN_SERVED = 0.8
"""Share of the legal requests that must be served, so that their cost is measured."""
MAX_RESPONSE_BYTES = 32 * 2**20
EXTREMES = extremes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def meter(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMeter]:
    report = tmp_path_factory.mktemp("cost") / "slow_callbacks"
    report.touch()
    package = "tests.integration.gateway.cost_fuzz"
    async with gateway_process(
        stub=f"{package}.instant_cluster",
        command=lambda config: [
            *(sys.executable, "-m", f"{package}.measured_gateway", str(report)),
            *("gateway", "--config", str(config)),
        ],
        log_level="warning",
        max_response_bytes=MAX_RESPONSE_BYTES,
        receive_deadline_s=60.0,
        heartbeat_s=HEARTBEAT_S,
        detection_s=60.0,
        scheduler_wait_s=60.0,
    ) as process:
        meter = GatewayMeter(process, report)
        await meter.warm_up()
        yield meter
        await process.check_grpc()


@pytest.mark.fault("F-36", "F-37", "F-38")
@pytest.mark.parametrize("case", EXTREMES.values(), ids=EXTREMES)
async def test_extreme_request_costs_little(meter: GatewayMeter, case: CostCase) -> None:
    cost = await meter.measure([case])
    assert not (problems := await find_failing(meter, [case], cost)), "\n".join(problems)
    assert not case.is_legal or cost.answers[0].status == 200, cost.answers[0]


@pytest.fixture(scope="module")
def drawer() -> Iterator[CaseDrawer]:
    with CaseDrawer(BATCH) as drawer:
        yield drawer


@pytest.mark.fault("F-36", "F-37", "F-38")
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
async def test_batch_of_random_requests_costs_little(meter: GatewayMeter, drawer: CaseDrawer, batch: int) -> None:
    cases = await asyncio.to_thread(drawer.cases, batch)
    assert len(cases) == BATCH
    light = [case for case in cases if not case.is_heavy]
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    for together in (light, *([case] for case in cases if case.is_heavy)):
        cost = await meter.measure(together)
        problems += await find_failing(meter, together, cost)
        statuses.update(
            answer.status
            for case, answer in zip(together, cost.answers, strict=True)
            if case.is_legal and not case.may_time_out
        )
    assert not problems, f"seed {batch}:\n" + "\n".join(problems)
    assert statuses[200] > MIN_SERVED * statuses.total(), statuses


async def test_cases_depend_on_the_seed_only() -> None:
    """Not on the order of a set, which differs between processes."""
    code = "from tests.integration.gateway.cost_fuzz.drawn_cases import drawn_cases; print(drawn_cases(1, 30))"
    drawn = [
        await asyncio.to_thread(
            subprocess.check_output,
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
        )
        for hash_seed in ("1", "2")
    ]
    assert drawn[0] == drawn[1]
