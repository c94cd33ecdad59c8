"""Random faults on real processes: no answer is wrong, lost, doubled or truncated, and nothing leaks.

A failing run keeps its files, and names them, its seed and the command that repeats it. Limits of time allow
for a slow machine; limits of safety are exact.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.nemesis.__main__ import how_to_repeat
from tests.nemesis.run import Options, Result, run_nemesis, unavailable_reason
from tests.sim.storm_seeds import drawn_seeds

LOOPBACK_REASON, NAMESPACES_REASON = (unavailable_reason(network) for network in ("loopback", "namespaces"))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(LOOPBACK_REASON), reason=LOOPBACK_REASON or "processes can be disturbed"),
]
needs_namespaces = pytest.mark.skipif(bool(NAMESPACES_REASON), reason=NAMESPACES_REASON or "namespaces are available")


async def run(seconds: float, *, only_good_ends: bool = False, **options: Any) -> Result:
    """Run the nemesis and return its result, which has no problems.

    Goodput is not judged, because other tests run at the same time. `make nemesis` judges it.

    only_good_ends: the faults may cause no error; each request completes, unless its client cancels it.
    """
    if only_good_ends:
        options = {"short_share": 0.0, **options}
    chosen = Options.sized(seconds, judges_goodput=False, **options)
    directory = Path(tempfile.mkdtemp(prefix="bn-", dir="/tmp"))
    result = await run_nemesis(chosen, directory, lambda text: print(text, file=sys.stderr))  # noqa: T201
    where = how_to_repeat(chosen, directory)
    assert result.problems == [], where
    assert result.num_faults > 0, where
    assert result.ends["complete"] > 0, where
    if only_good_ends:
        assert set(result.ends) <= {"complete", "cancelled"}, f"{result.ends}; {where}"
    shutil.rmtree(directory, ignore_errors=True)
    return result


@pytest.mark.fault("F-51")
@pytest.mark.parametrize("seed", drawn_seeds()[:1])
async def test_random_faults_for_a_minute(seed: int) -> None:
    """The seed follows from the hash of the code under `services`, so that new code meets other faults."""
    await run(60.0, seed=seed)


@pytest.mark.long
@pytest.mark.fault("F-51")
@pytest.mark.parametrize("transfer", ["collective", "auto"])
async def test_random_faults_with_other_transports(transfer: str) -> None:
    await run(150.0, seed=11, transfer=transfer)


@pytest.mark.long
@pytest.mark.fault("F-51")
async def test_random_faults_for_ten_minutes() -> None:
    await run(600.0, seed=10)


@pytest.mark.long
@needs_namespaces
@pytest.mark.fault("F-15")
async def test_pairs_that_cannot_reach_each_other_cause_no_errors() -> None:
    """Each of two decode workers loses one prefill worker for some seconds, while their packets are lost."""
    await run(45.0, seed=15, network="namespaces", kinds=("cut_data",), longest_s=8.0, only_good_ends=True)


@pytest.mark.long
@pytest.mark.fault("F-33")
async def test_stepped_and_skewed_clocks_cause_no_errors() -> None:
    """One process after the other gets a wall clock that is an hour off, and a right one again."""
    await run(45.0, seed=33, kinds=("clock",), only_good_ends=True)


@pytest.mark.long
@pytest.mark.fault("F-27", "F-28", "F-29")
async def test_redis_that_hangs_is_full_or_loses_its_data_causes_no_errors() -> None:
    kinds = ("redis_stop", "redis_full", "redis_flush", "redis_restart")
    await run(45.0, seed=27, kinds=kinds, only_good_ends=True)
