"""The benchmark `engine` with fake systems: it goes on after failures, and after a stop."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.scenarios.engine import __main__ as engine
from bench.scenarios.engine.__main__ import FormatBench, parse
from bench.support.engine.engine_formats import Contestant
from bench.support.roofline import Roofline
from bench.systems.engines import EngineFailed


class FakeSystem:
    """Answers at once, or fails in batches."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.num_calls = 0

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        self.num_calls += 1
        if self.contestant.system == "llama.cpp" and len(prompts) > 1:
            raise EngineFailed("no slot")
        if self.contestant.system == "vllm-cpu float32" and num_outputs > 2:
            raise EOFError
        step_s = 0.002 if self.contestant.format == "bf16" else 0.001
        return [[step_s * (i + 1) for i in range(num_outputs)] for _ in prompts]


class Rig:
    """Runs `engine` with fake systems and keeps those that were started."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeSystem] = []
        self._out = out
        monkeypatch.setattr(FormatBench, "_started", lambda bench, stack, model, each, logs: self.start(each))
        monkeypatch.setattr(engine, "measured", lambda *args, **fields: Roofline(flops=1e12, bytes=2e10))
        monkeypatch.setattr(engine, "REST_S", 0.0)

    def start(self, contestant: Contestant) -> FakeSystem:
        if contestant.system == "vllm-cpu":
            raise EngineFailed("--vllm is missing")
        self.started.append(FakeSystem(contestant))
        return self.started[-1]

    def run(self, *more: str) -> FormatBench:
        self.started.clear()
        bench = FormatBench(self.arguments(*more))
        bench.run()
        return bench

    def arguments(self, *more: str) -> argparse.Namespace:
        common = ["--out", str(self._out), "--models", "demo", "--settle-s", "0", "--repeats", "2"]
        return parse([*common, *more])


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def figures_of(bench: FormatBench, format_name: str) -> dict[str, Any]:
    found: dict[str, Any] = bench.saved[f"demo/{format_name}"]
    return found


def test_failures_are_rows_and_the_run_goes_on(rig: Rig) -> None:
    bench = rig.run("--formats", "bf16", "--cells", "tpot-1", "tpot-8")
    found = figures_of(bench, "bf16")
    assert found["figures"]["tpot-8"].keys() == {"Baton, bf16", "Baton's engine alone, bf16", "transformers, bf16"}
    assert found["figures"]["tpot-1"]["Baton, bf16"].keys() == {"0", "1"}
    assert found["failures"]["vllm-cpu, bf16"] == "EngineFailed: --vllm is missing"
    assert found["failures"]["llama.cpp, bf16: tpot-8"] == "EngineFailed: no slot"
    assert "its process ended" in found["failures"]["vllm-cpu float32, bf16: tpot-1"]
    page = bench.page()
    assert "| llama.cpp, bf16: tpot-8 | EngineFailed: no slot |" in page
    assert "Products 1,000 GFLOP/s, reading 20.0 GB/s; 2 repeats" in page


def test_a_system_whose_process_has_ended_is_not_called_again(rig: Rig) -> None:
    rig.run("--formats", "bf16", "--cells", "ttft-128", "tpot-1", "--systems", "vllm-cpu float32")
    (system,) = rig.started
    assert system.num_calls == 1 + 5 + 2  # warming, the tries of ttft-128, and tpot-1, whose second call ends it


def test_a_second_run_measures_only_what_is_missing(rig: Rig) -> None:
    rig.run("--formats", "int8", "--cells", "tpot-1", "--systems", "Baton")
    assert [system.contestant.name for system in rig.started] == ["Baton, int8"]
    bench = rig.run("--formats", "int8", "--cells", "tpot-1", "--systems", "Baton*")
    calls = {system.contestant.name: system.num_calls for system in rig.started}
    assert calls == {"Baton, int8": 1, "Baton's engine alone, int8": 5, "Baton's engine alone, bf16": 5}
    rig.run("--formats", "int8", "--cells", "tpot-1", "--systems", "Baton*")
    assert not rig.started
    assert "| int8 tpot-1, times bf16 | 2.00 | 1.60 | yes |" in bench.page() or "as llama.cpp" in bench.page()


def test_patterns_choose_cells_systems_and_formats(rig: Rig) -> None:
    parsed = rig.arguments("--formats", "int*", "--systems", "vllm*", "--cells", "ttft-*")
    assert parsed.formats == ["int8", "int4"]
    assert parsed.systems == ["vllm-cpu", "vllm-cpu float32"]
    assert parsed.cells == ["ttft-128", "ttft-512", "ttft-2048"]


def test_int8_and_int4_files_have_an_output_layer_of_as_few_bits_and_mixtures_have_not(
    rig: Rig, tmp_path: Path
) -> None:
    """The quantiser is a script that notes its arguments and copies the file."""
    (tmp_path / "tools").mkdir()
    for name in ("llama-server", "llama-quantize"):
        tool = tmp_path / "tools" / name
        tool.write_text('#!/bin/sh\necho "$@"\n[ "$1" = --pure ] && shift\ncp "$1" "$2"\n')
        tool.chmod(0o755)
    bench = FormatBench(rig.arguments("--llama", str(tmp_path / "tools")))
    (model,) = bench.models()
    files = {name: bench._file(model, name) for name in ("bf16", "int8", "int4", "q4_k_m")}
    assert [file.name for file in files.values()] == [
        "demo.gguf", "demo-Q8_0-pure.gguf", "demo-Q4_0-pure.gguf", "demo-Q4_K_M.gguf",
    ]  # fmt: skip
    began = {name: file.with_suffix(".log").read_text().split()[0] for name, file in files.items() if name != "bf16"}
    assert began == {"int8": "--pure", "int4": "--pure", "q4_k_m": str(files["bf16"])}
    needs = bench._llama_needs(model, list(files))
    assert needs["int4"].weight_bits == needs["bf16"].weight_bits == pytest.approx(16, rel=0.01), "as its file has them"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "tpot-9"], "tpot-9 matches none of"),
        (["--systems", "sglang"], "sglang matches none of"),
        (["--formats", "int3"], "int3 matches none of"),
        (["--model", "/nowhere"], "/nowhere: there is no such directory"),
        (["--models", "", "--model", ".", "../" + Path.cwd().name], f"two models have the name {Path.cwd().name}"),
    ],
)
def test_unknown_names_are_refused(
    rig: Rig, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        rig.arguments(*arguments)
    assert message in capsys.readouterr().err
