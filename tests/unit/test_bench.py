"""`python -m bench` finds every benchmark by name."""

import ast
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from bench.__main__ import main, overview, scenarios
from bench.scenarios.control import prefix_index


def test_every_scenario_is_listed_and_can_be_run() -> None:
    listed = overview()
    assert len(scenarios()) >= 16
    for name, file in scenarios().items():
        assert f"  {name} " in listed
        assert any(
            isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            for node in ast.parse(file.read_text()).body
        )


def test_unknown_name_exits_with_2_and_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_bench"]) == 2
    assert "scheduler" in capsys.readouterr().err


SCENARIO = """
import subprocess, sys
from bench.__main__ import main
from bench.systems.child_processes import ended_after

def scenario(module, run_name):
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with ended_after(server):
        print(server.pid, flush=True)
        server.wait()

main(["prefix_index"], scenario)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_servers_that_a_benchmark_started(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCENARIO],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a job in the background ignores SIGINT
    ) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.send_signal(number)
        try:
            assert benchmark.wait(60) == 128 + number
            assert not server.is_running()
        finally:
            with suppress(psutil.NoSuchProcess):
                server.kill()


@pytest.mark.parametrize("arguments", [["--pairs", "100"], ["--workers", "3"], ["--prompts", "1"]])
def test_prefix_index_names_an_argument_that_is_too_small(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefix_index", *arguments])
    with pytest.raises(SystemExit):
        prefix_index.main()
    assert f"{arguments[0]} is {arguments[1]}; must be at least" in capsys.readouterr().err


def test_prefix_index_shows_what_announcing_fewer_blocks_costs() -> None:
    figures = prefix_index.announcement_figures(num_chains=60, seed=1)
    assert figures["announced_1_percent"] == figures["found_1_cut_short_percent"] == 100
    assert 12.5 <= figures["announced_8_percent"] < 13
    assert figures["found_8_next_short_percent"] == figures["found_8_next_long_percent"] == 100
    assert 40 < figures["found_8_cut_short_percent"] < 80
    assert 99 < figures["found_8_cut_long_percent"] < 100
