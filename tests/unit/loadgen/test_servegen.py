"""ServeGen's client windows: selection by workload, client and time, each with its own rate and
burstiness."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.lengths import Fixed, parse_lengths
from loadgen.plan.plan_check import check_plan
from loadgen.plan.sources.servegen import ClientWindow, choose_windows, read_servegen, replay_servegen
from tests.unit.loadgen.plans import plan

HEADER = "workload,client,window_start_s,rate_rps,cv,pattern,arg1,arg2\n"


def window(client: int, start_s: float = 0, rate_rps: float = 1.0, **changes: Any) -> ClientWindow:
    fields: dict[str, Any] = {
        "workload": "w",
        "client": client,
        "start_s": start_s,
        "rate_rps": rate_rps,
        "family": "gamma",
        "shape": 0.5,
    }
    return ClientWindow(**fields | changes)


def replay(windows: list[ClientWindow], **changes: Any) -> list[Any]:
    fields: dict[str, Any] = {"inputs": Fixed(10), "outputs": Fixed(5), "seed": 0}
    return replay_servegen(windows, **fields | changes)


def test_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_text(HEADER + "w/a,3,600,1.5,2,Gamma,0.25,0.04\nw/a,3,1200,0,,,,\nw/b,12,0,0.1,7.4,Weibull,0.4,0.009\n")
    assert read_servegen(path) == [
        window(3, 600, 1.5, workload="w/a", shape=0.25),
        window(12, 0, 0.1, workload="w/b", family="weibull", shape=0.4),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("workload,client\n", "1: no column `window_start_s`; the first line must name workload, client"),
        (HEADER, " the file has no windows"),
        (HEADER + "w,1,0,1,1,Pareto,1,1\n", "2: the pattern is `Pareto`; it must be Gamma or Weibull"),
        (HEADER + "w,one,0,1,1,Gamma,1,1\n", "2: the client is `one`; it must be an integer"),
        (HEADER + "w,1,0,1,1,Gamma,0,1\n", "2: the shape (`arg1`) is 0; it must be above 0"),
        (HEADER + "w,1,0,fast,1,Gamma,1,1\n", "2: `fast` is not a number of 0 or more"),
        (HEADER + "w,1,0,1\n", "2: 4 cells in `w,1,0,1`"),
    ],
)
def test_invalid_windows_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "windows.csv"
    path.write_text(content)
    with pytest.raises(BadPlan) as caught:
        read_servegen(path)
    assert str(caught.value).startswith(f"{path}:{message}")


def test_windows_are_chosen() -> None:
    windows = [
        window(1, 0, 5),
        window(1, 600, 1),
        window(2, 0, 2),
        window(2, 600, 9),
        window(3, 1200, 1),
        window(1, workload="v"),
    ]
    assert choose_windows(windows, workload="v") == [windows[5]]
    assert choose_windows(windows, workload="w", start_s=599, duration_s=2) == windows[:4]
    assert choose_windows(windows, workload="w", start_s=600) == [windows[1], windows[3], windows[4]]
    assert choose_windows(windows, workload="w", top=1) == [windows[2], windows[3]]
    assert choose_windows(windows, workload="w", top=1, duration_s=600) == [windows[0]]
    assert choose_windows(windows, workload="w", clients=[3, 2]) == windows[2:5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "the file has several workloads; give --workload, one of v, w"),
        ({"workload": "u"}, "no workload `u`; the file has v, w"),
        ({"workload": "w", "clients": [7]}, "no client 7 in `w`; it has 2 clients, 1 to 2"),
        ({"workload": "w", "start_s": 600}, "no selected client sends a request"),
    ],
)
def test_impossible_selections_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        choose_windows([window(1), window(2), window(1, workload="v")], **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape", "cv"), [("gamma", 0.25, 2.0), ("weibull", 0.5, 5**0.5), ("gamma", 4.0, 0.5)]
)
def test_window_has_its_rate_and_gap_cv(family: str, shape: float, cv: float) -> None:
    windows = [window(1, 600 * i, 20.0, family=family, shape=shape) for i in range(10)]
    times = np.array([r.at_s for r in replay(windows)])
    assert len(times) / (10 * 600) == pytest.approx(20, abs=4 * cv * (20 / 6000) ** 0.5)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_clients_are_independent() -> None:
    windows = [window(1), window(2, rate_rps=3.0), window(1, 600, family="weibull", shape=0.4)]
    requests = replay(windows, inputs=parse_lengths("uniform:5-50"))
    check_plan(plan(*requests))
    assert {r.tenant for r in requests} == {"client-1", "client-2"}
    alone = replay(windows[:1] + windows[2:])
    assert [r.at_s for r in requests if r.tenant == "client-1"] == [r.at_s for r in alone]
    assert len({r.segments[0].segment_id for r in requests}) == len(requests)


def test_times_are_the_files_and_rates_scale_on_request() -> None:
    windows = [window(1, 600, 10.0), window(1, 1200, 10.0)]
    all_requests = replay(windows)
    assert all_requests[0].at_s > 600
    cut = replay(windows, start_s=900, duration_s=600)
    assert [r.at_s for r in cut] == pytest.approx(
        [r.at_s - 900 for r in all_requests if 900 <= r.at_s < 1500], abs=2e-6
    )
    assert len(replay(windows, rate_scale=3.0)) == pytest.approx(3 * 12_000, rel=0.1)
    assert replay(windows, limit=10) == all_requests[:10]
    with pytest.raises(BadPlan, match="no request arrives"):
        replay([window(1, rate_rps=1e-9)], duration_s=1.0)
    with pytest.raises(BadPlan, match="`rate_scale` is 0; it must be above 0"):
        replay(windows, rate_scale=0)
