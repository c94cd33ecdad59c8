"""`loadgen capacity` as a user runs it: short searches on servers with slots, and servers it starts and
stops."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadgen.loadgen_errors import LoadgenError
from loadgen.machine import usable_cores
from loadgen.measure.records_file import read_result
from loadgen.plan.plan_file import read_plan
from loadgen.plan.schedule import peak_rates
from loadgen.send.run.priority import Priority
from loadgen.send.selftest import calibration
from loadgen.send.selftest.calibration import processes_for
from loadgen.send.server.server_process import running_server
from tests.integration.loadgen.rig import LOADGEN, ROOT

LIMIT_S = 150
MAX_SEARCHES = 4
SLOTS_RPS = 4 / 0.09
"""Capacity of 4 slots with responses of 8 tokens: 20 ms and 7 gaps of 10 ms."""
MIN_FOUND_RPS = SLOTS_RPS / 3
SCRIPTED = [sys.executable, "-m", "loadgen.send.selftest.scripted_server", "--ttft", "20ms", "--gap", "10ms"]
QUICK = [
    "--slo",
    "ttft=5s,e2e=300ms",
    "--output-tokens",
    "8",
    "--seconds",
    "1s",
    "--max-trials",
    "6",
    "--start-rate",
    "40",
]
"""The TTFT bound is lax, so that a busy machine may send up to 50 ms late; e2e is the bound that is
missed."""
AS_SERVER = shlex.join(["sh", "-c", "sleep 600 | (" + shlex.join(SCRIPTED) + " --slots {s} --port {port}; kill 0)"])
"""A server that runs until its input ends, and ends all its processes then."""


pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Search:
    """A finished `loadgen capacity` and its result directory."""

    done: subprocess.CompletedProcess[str]
    out: Path


@pytest.fixture(scope="module", autouse=True)
def stored_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store a calibration as a selftest would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        calibration.save(calibration.new_calibration(int(SLOTS_RPS), 320, "normal", "2026-01-01T00:00:00+00:00"))
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with subprocess.Popen(
        [*SCRIPTED, "--slots", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def capacity(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LOADGEN, "capacity", *arguments], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)


def read(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / "capacity.json").read_text())
    return data


def found_rps(done: subprocess.CompletedProcess[str]) -> tuple[float, float, float]:
    """Return the capacity in the last line, and its interval."""
    match = re.fullmatch(
        r"capacity (\S+) req/s \[(\S+), (\S+)\] at 90 % joint attainment \(95 % confidence, \d+ trials\)",
        done.stdout.strip().splitlines()[-1],
    )
    assert match, done.stdout
    found, low, high = map(float, match.groups())
    return found, low, high


def search(server: str, out: Path) -> Search:
    """Run a search, and again if the machine was too busy to send in time, or to answer in time."""
    for number in range(MAX_SEARCHES):
        trial = out.with_name(f"{out.name}-{number}")
        search = Search(
            done=capacity(
                "--url", server, *QUICK, "--processes", "auto", "--out", str(trial), "--api-key", "secret-key"
            ),
            out=trial,
        )
        if search.done.returncode == 3:
            assert "trials in a row were invalid" in search.done.stdout
        elif search.done.returncode or found_rps(search.done)[0] > MIN_FOUND_RPS:
            break
    assert search.done.returncode == 0, search.done.stderr
    return search


@pytest.fixture(scope="module")
def searched(server: str, tmp_path_factory: pytest.TempPathFactory) -> Search:
    return search(server, tmp_path_factory.mktemp("searched") / "found")


def test_search_finds_the_capacity_of_a_server_with_slots(searched: Search, tmp_path: Path) -> None:
    done, out = searched.done, searched.out
    point = read(out)["points"][0]
    trials = point["trials"]
    said = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert [line.split()[0] for line in said] == [trial["directory"] for trial in trials]
    results = [read_result(out / "trials" / trial["directory"]) for trial in trials]
    assert len({result.run.plan_hash for result in results}) == len(trials)
    assert [float(result.run.flags["rate"]) for result in results] == [trial["rate_rps"] for trial in trials]
    assert len({trial["seed"] for trial in trials}) == len(trials)
    peaks = [peak_rates(read_plan(result.path / "plan.jsonl").requests)[0] for result in results]
    assert [result.run.processes for result in results] == [
        min(processes_for(peak, 0, calibration.load(Priority.HIGH)), usable_cores()) for peak in peaks
    ]
    assert max(peaks) > SLOTS_RPS
    assert (
        "secret"
        not in (out / "capacity.json").read_text() + (out / "trials" / trials[0]["directory"] / "run.json").read_text()
    )
    report = subprocess.run(
        [*LOADGEN, "report", *(str(result.path) for result in results), "--out", str(tmp_path / "report")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
    )
    assert report.returncode == 0, report.stderr
    found, low, high = found_rps(done)
    assert low < found < high
    assert MIN_FOUND_RPS < found < 2 * SLOTS_RPS, "in one second not much more than the slots can pile up"
    answer = point["answers"][0]
    assert answer["state"] in ("found", "wide")
    assert answer["capacity_rps"] == pytest.approx(found, rel=0.01)
    broke = [
        trial for trial in trials if trial["rate_rps"] > 2.5 * SLOTS_RPS and not (trial["invalid"] or trial["is_scout"])
    ]
    assert all(trial["judgements"][0]["verdict"] == "broke" for trial in broke)


@pytest.mark.long  # `make test` covers this by tests/unit/loadgen/test_capacity_search.py
def test_two_searches_of_one_server_have_overlapping_intervals(server: str, searched: Search, tmp_path: Path) -> None:
    """Each search draws its own plans; only the server is the same."""
    again = search(server, tmp_path / "again")
    points = [read(one.out)["points"][0] for one in (searched, again)]
    assert not {trial["seed"] for trial in points[0]["trials"]} & {trial["seed"] for trial in points[1]["trials"]}
    (low, high), (other_low, other_high) = (
        (answer["low_rps"], answer["high_rps"]) for answer in (point["answers"][0] for point in points)
    )
    assert low <= other_high
    assert other_low <= high
    assert high < 4 * low, "an interval that holds everything would overlap with any"
    assert other_high < 4 * other_low


@pytest.mark.long
def test_a_sweep_starts_and_stops_a_server_for_each_point(tmp_path: Path) -> None:
    """The second server cannot start, which must not affect the first point."""
    out = tmp_path / "sweep"
    quick = [*QUICK, "--slo-scale", "1,2", "--requests", "60", "--time-limit", "6s"]
    done = capacity("--command", AS_SERVER, "--sweep", "s=4,x", *quick, "--out", str(out))
    assert done.returncode == 2, done.stderr
    first, second = read(out)["points"]
    assert (first["name"], first["error"]) == ("s=4", "")
    assert [answer["slo_scale"] for answer in first["answers"]] == [1.0, 2.0]
    assert all(len(trial["judgements"]) == 2 for trial in first["trials"])
    assert all(
        trial["seconds"] == pytest.approx(max(1.0, 60 / trial["rate_rps"]))
        for trial in first["trials"]
        if not trial["is_scout"]
    )
    assert (out / "s=4" / "trials" / first["trials"][0]["directory"] / "records.jsonl").exists()
    assert "before it was ready" in second["error"]
    assert "invalid int value" in second["error"]
    assert (second["answers"], second["trials"]) == ([], [])
    assert "s=4: " in done.stdout
    assert "s=x: the server exited with code" in done.stdout
    port = re.search(r":(\d+)$", first["url"])
    assert port is not None
    assert_ended(f"--port {port[1]}")


def processes_with(text: str) -> list[str]:
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in listed if text in line and "ps -eo" not in line]


def assert_ended(text: str) -> None:
    """Wait until no process has this text in its command line: another process reaps what was killed."""
    deadline_s = time.monotonic() + 60
    while left := [line for line in processes_with(text) if "<defunct>" not in line]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_stops_the_server_and_keeps_results(tmp_path: Path, number: int) -> None:
    out = tmp_path / "stopped"
    command = [*LOADGEN, "capacity", "--command", AS_SERVER.replace("{s}", "4"), *QUICK, "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("01-"):
                break
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    point = read(out)["points"][0]
    assert point["interrupted"]
    assert point["answers"][0]["state"] == "stopped"
    assert len(point["trials"]) >= 1
    assert "stopped: interrupted" in stdout
    port = re.search(r":(\d+)$", point["url"])
    assert port is not None
    assert_ended(f"--port {port[1]}")


def test_invalid_arguments_are_reported_before_any_trial(server: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "x").touch()
    for number, (arguments, message) in enumerate(
        (
            (["--url", "http://127.0.0.1:1"], "no server answers at"),
            (["--url", server, "nonsense"], "`nonsense` is not a workload"),
            (["--url", server, "random", "--rate", "5"], "--rate is not allowed in the workload"),
            (["--url", server, "--sweep", "p=1"], "--sweep needs --command"),
            (["--command", "serve {q}"], "--sweep has no value for it"),
            (["--command", "no-such-program-anywhere"], "cannot be started"),
            (["--url", server, "--out", str(taken)], "never overwritten"),
            (["--url", server, "--attainment", "100"], "below 100"),
            (["--url", server, "--attainment", "99.9", "--max-rate", "1"], "give longer --seconds"),
            (["--url", server, "--slo", "chat:ttft=1s"], "no class `chat`"),
            (["--command", "sleep {port}", "--url", server], "another server already answers"),
        )
    ):
        out = tmp_path / str(number)
        given = arguments if "--out" in arguments else ["--out", str(out), *arguments]
        done = capacity(*given)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr + done.stdout, (arguments, done.stderr, done.stdout)
        assert "Traceback" not in done.stderr
        assert not list(out.glob("trials/*"))


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(600)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_server_that_ignores_signals_is_killed_with_its_children(tmp_path: Path) -> None:
    is_up = tmp_path / "up"
    program = tmp_path / "stubborn.py"
    program.write_text(STUBBORN)
    with running_server(
        [sys.executable, str(program), str(is_up)],
        lambda: 200 if is_up.exists() else None,
        tmp_path / "log",
        ready_s=60,
        stop_signals=((signal.SIGINT, 0.3), (signal.SIGTERM, 0.3), (signal.SIGKILL, 10.0)),
    ):
        assert len(processes_with(str(program))) == 2
    assert_ended(str(program))


def test_server_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "idle.py"
    program.write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    log = tmp_path / "log"

    def not_ready() -> None:
        """Answer once the program has printed something."""
        while log.exists() and not log.stat().st_size:
            time.sleep(0.01)

    with (
        pytest.raises(LoadgenError, match=r"not ready within 1 s; its last output .*\nloading"),
        running_server([sys.executable, str(program)], not_ready, log, ready_s=1.0),
    ):
        raise AssertionError
    assert not processes_with(str(program))
    assert os.path.getsize(log) > 0
