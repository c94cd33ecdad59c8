"""The benchmark `engine_gpu` without a GPU: cells, a variant whose process crashes, FP8 checkpoints."""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.model.loading.model_source import DEMO_DIR
from baton.worker.device.kv_memory.kv_path import PathSpeed
from bench.scenarios.engine import engine_gpu
from bench.scenarios.engine.engine_gpu import ANSWERS, FIRST, VARIANTS, GpuBench, ReadyEngine, Variant
from bench.support import fp8_checkpoint
from bench.support.engine.engine_cells import GPU_CELLS
from bench.support.roofline import Roofline
from bench.systems.engines import answer_within


class ScriptedEngines:
    """Takes the place of all engines. Those with a prompt of `crash_tokens` tokens crash."""

    def __init__(self, bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        self.num_starts = 0
        self.crash_tokens = 0
        self.on_answer: Callable[[], object] = lambda: None
        monkeypatch.setattr(bench, "_engine", self._engine)

    @contextmanager
    def _engine(self, variant: Variant) -> Iterator[ReadyEngine]:
        self.num_starts += 1
        yield ReadyEngine(compute=self._compute, summary="scripted", start_s=float(self.num_starts))

    def _compute(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        self.asked.append((len(prompts), len(prompts[0])))
        self.on_answer()
        if len(prompts[0]) == self.crash_tokens:
            raise EOFError
        return [[0.5 + 0.25 * number for number in range(num_outputs)] for _ in prompts]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuBench:
    monkeypatch.setattr(engine_gpu, "machine", lambda *names: "a machine")
    monkeypatch.setattr(engine_gpu, "measured", lambda **fields: Roofline(flops=1.0, bytes=1.0))
    monkeypatch.setattr(engine_gpu, "measure_path", lambda path, device: PathSpeed())
    return GpuBench(
        argparse.Namespace(
            out=tmp_path, model=str(DEMO_DIR), device="cuda", minutes=1.0, variants="bf16,steps-512", kv_gib=64
        )
    )


def test_a_crashed_engine_is_noted_and_the_next_variant_is_measured(
    bench: GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = ScriptedEngines(bench, monkeypatch)
    engines.crash_tokens = 512
    bench.run()
    assert "ttft-512: the engine's process ended" in bench.saved["bf16"]["problem"]
    assert engines.num_starts == 2


def test_figures_are_kept_at_once_and_the_next_run_goes_on(
    bench: GpuBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = ScriptedEngines(bench, monkeypatch)
    engines.crash_tokens = 2048
    bench.run()
    kept = json.loads((tmp_path / "engine_gpu.json").read_text())["bf16"]
    assert (kept["start_s"], kept["summary"]) == (1.0, "scripted")
    assert kept["figures"] == {"tpot-1": 0.25, "tpot-8": 0.25, "ttft-512": 0.5}
    assert list(kept["problems"]) == ["ttft-2048"]
    engines.crash_tokens = 0
    engines.asked.clear()
    bench.run()
    kept = bench.saved["bf16"]
    assert (1, 512) not in engines.asked[: len(VARIANTS["bf16"].cells)], "it is not measured again"
    assert set(kept["figures"]) == {cell.name for cell in VARIANTS["bf16"].cells}
    assert list(kept["figures"])[-1] == "ttft-2048", "cells that failed come last"
    assert (kept["problem"], kept["problems"], kept["start_s"]) == ("", {}, 1.0)
    assert "tpot-64x2048" in kept["figures"]
    bench.run()
    assert engines.num_starts == 4, "nothing is missing any more"


def test_the_most_telling_cells_are_measured_first(bench: GpuBench) -> None:
    names = [cell.name for cell in bench._missing_cells("bf16")]
    assert tuple(names[: len(FIRST)]) == FIRST
    assert [name for name in names if name.startswith("mix")] == names[-3:]


def test_no_cell_starts_after_the_time(bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ScriptedEngines(bench, monkeypatch)

    def end_the_time() -> None:
        if len(engines.asked) == 4:
            bench._ends_s = 0.0

    engines.on_answer = end_the_time
    bench.run()
    assert list(bench.saved["bf16"]["figures"]) == ["tpot-1"], "WARM and this cell take two answers each"
    assert "minutes are over" in bench.saved["bf16"]["problem"]
    assert engines.num_starts == 1


def test_an_engine_that_does_not_answer_is_given_up() -> None:
    own_end, _engine_end = multiprocessing.Pipe()
    with pytest.raises(RuntimeError, match=r"no answer within 0.01 s"):
        answer_within(own_end, 0.01)


def test_an_fp8_checkpoint_that_was_cut_off_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, out = tmp_path / "plain", tmp_path / "fp8"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 8)}, plain / "model.safetensors")

    def stopped(*_arguments: Any, **_fields: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(fp8_checkpoint, "save_file", stopped)
        with pytest.raises(KeyboardInterrupt):
            fp8_checkpoint.write_fp8(plain, out)
    fp8_checkpoint.write_fp8(plain, out)
    assert (out / "model-00001.safetensors").exists()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_each_cell_has_a_name_of_its_own() -> None:
    cells = [*GPU_CELLS, *ANSWERS]
    assert len({cell.name for cell in cells}) == len(cells)
    assert {"ttft-8192", "tpot-8", "tpot-8x2048", "tpot-8x320", "mix-32x64-256"} < {cell.name for cell in cells}
