"""The benchmark `engine_gpu` without a GPU: cells, a variant whose process crashes, FP8 checkpoints."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.worker.device.kv_path import PathSpeed
from bench.scenarios.engine import engine_gpu
from bench.scenarios.engine.engine_gpu import ANSWERS, VARIANTS, GpuBench, Variant
from bench.support import fp8_checkpoint
from bench.support.engine.engine_cells import GPU_CELLS
from bench.support.roofline import Roofline


def test_a_crashed_engine_is_noted_and_the_next_variant_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_gpu, "machine", lambda *names: "a machine")
    monkeypatch.setattr(engine_gpu, "measured", lambda **fields: Roofline(flops=1.0, bytes=1.0))
    monkeypatch.setattr(engine_gpu, "measure_path", lambda path, device: PathSpeed())

    def measure(_bench: GpuBench, variant: Variant) -> dict[str, Any]:
        if variant is VARIANTS["kv-int8"]:
            raise EOFError
        return {"figures": {}}

    monkeypatch.setattr(GpuBench, "_measured", measure)
    arguments = argparse.Namespace(
        out=tmp_path, model=str(tmp_path), device="cuda", minutes=1.0, variants="kv-int8,bf16", kv_gib=1
    )
    bench = GpuBench(arguments)
    bench.run()
    assert "process ended" in bench.saved["kv-int8"]["problem"]
    assert bench.saved["bf16"] == {"figures": {}}


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
