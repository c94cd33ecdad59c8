"""Pure parts of the benchmarks of quality, start time and model families."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import MistralConfig, Qwen2Config

from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.model_support import causal_lm_class
from bench.scenarios.cluster import goodput
from bench.scenarios.cluster.goodput_pairs import cases_of, loads_of
from bench.scenarios.engine import attention, families
from bench.scenarios.engine.draft_tokens import ALL_TEXTS, SpeculationBench
from bench.scenarios.engine.restart import beyond_ray_s, phases_s
from bench.support import created_model, text_quality
from bench.support.engine.family_shapes import FAMILY_SHAPES, NUM_EXPERTS, family_needs
from bench.support.roofline import Needs
from bench.systems.engines import vocabulary

UP_OUTPUT = """model        demo                                                           0.1 s
ray          local, 2 cores                                                 4.2 s
hybrid h0    ready, 0.8 s of it costs                                      11.0 s
ready http://127.0.0.1:8000    gRPC 127.0.0.1:9000
"""


def test_start_time_leaves_out_the_phase_of_ray() -> None:
    assert phases_s(UP_OUTPUT)["ray"] == 4.2
    assert beyond_ray_s(13.0, UP_OUTPUT) == pytest.approx(8.8)
    with pytest.raises(ValueError, match="has no line for 'ray'; it has none"):
        beyond_ray_s(13.0, "ready\n")


@pytest.mark.parametrize(
    ("change", "allowed", "text"),
    [(0.01, 0.01, "yes (at most +1%)"), (0.051, 0.05, "no (at most +5%)"), (9.0, None, "")],
)
def test_quality_is_judged_by_what_is_allowed(change: float, allowed: float | None, text: str) -> None:
    assert text_quality.judged(change, allowed) == text


def test_a_text_without_a_token_to_predict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="1 texts and at most 100 tokens: nothing to predict"):
        text_quality.read_windows(DEMO_DIR, [tmp_path / "empty"], 100)


def test_windows_count_the_bytes_of_predicted_tokens_only() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    text = "def läuft(x):\n    return x + 1\n"
    ((tokens, num_bytes),) = text_quality.token_windows(tokenizer, [text], 1000)
    first = tokenizer.decode([int(tokens[0])])
    assert num_bytes == len(text.encode()) - len(first.encode())
    assert list(text_quality.token_windows(tokenizer, ["x"], 1000)) == []


def test_windows_end_at_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_quality, "WINDOW", 8)
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    windows = list(text_quality.token_windows(tokenizer, ["import os, sys\n" * 40], 20))
    assert [tokens.size for tokens, _ in windows] == [8, 8, 8]


def test_bits_per_byte_is_the_mean_over_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_quality, "window_nats", lambda loaded, backend, tokens: float(tokens.sum()))
    windows = [(np.array([1, 2]), 5), (np.array([4]), 2)]
    nothing: Any = None
    assert text_quality.bits_per_byte(nothing, nothing, windows) == pytest.approx(1 / np.log(2))


def test_goodput_pairs_name_shapes_that_exist() -> None:
    from baton.model.loading.model_shapes import SHAPES

    loads = loads_of(["tiny-42m", "gemma3-270m"])
    assert {load.model for load in loads} <= SHAPES.keys()
    assert len(loads) == 3
    assert sum(len(cases_of(load)) for load in loads) == 9


@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_a_family_can_be_built(family: str) -> None:
    config = FAMILY_SHAPES[family][1]()
    with torch.device("meta"):
        model: Any = causal_lm_class(config)(config)
    assert len(model.model.layers) == 4


def test_a_mixture_needs_only_the_experts_of_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILY_SHAPES["qwen3-moe"][1]().save_pretrained(tmp_path)
    experts = 4 * NUM_EXPERTS * 3 * 2048 * 768
    monkeypatch.setattr("bench.support.roofline._size", lambda file: experts + 2 * 151_936 * 2048)
    (tmp_path / "model.safetensors").touch()
    assert Needs.of(tmp_path).weight_params == experts + 151_936 * 2048
    assert family_needs(tmp_path).weight_params == experts * 8 // NUM_EXPERTS + 151_936 * 2048


def test_share_of_a_family_uses_the_rates_of_its_own_repeat() -> None:
    needs = Needs(weight_params=10**9, end_params=0, num_layers=1, num_heads=1, num_kv_heads=0, head_dim=1)
    repeats = [{"flops": 1.0, "bytes": 2e10, "tpot-1": 0.2}, {"flops": 1.0, "bytes": 1e10, "tpot-1": 0.2}]
    assert families.shares(needs, repeats, "tpot-1") == [0.5, 1.0]


def test_layers_with_a_window_read_and_compute_no_more_than_it() -> None:
    whole = Needs(weight_params=0, end_params=0, num_layers=3, num_heads=1, num_kv_heads=1, head_dim=1)
    windowed = replace(whole, windows=(4, None, 4))
    assert windowed.decode_bytes(2, 3) == whole.decode_bytes(2, 3) == 2 * 3 * whole.kv_bytes_per_token
    assert windowed.decode_bytes(2, 10) == 2 * (4 + 10 + 4) * 4
    assert windowed.prefill_flops(4) == whole.prefill_flops(4)
    pairs = (1 + 2 + 3 + 4 + 4 + 4) + (1 + 2 + 3 + 4 + 5 + 6)  # the last layer computes one token only
    assert windowed.prefill_flops(6) == 4 * pairs


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(num_hidden_layers=2, sliding_window=8), (8, 8)),
        (Qwen2Config(num_hidden_layers=2, sliding_window=8, use_sliding_window=False), ()),
        (Qwen2Config(num_hidden_layers=2, sliding_window=8, use_sliding_window=True, max_window_layers=1), (None, 8)),
        (FAMILY_SHAPES["olmo-3"][1](), (4096, 4096, 4096, None)),
        (FAMILY_SHAPES["qwen3"][1](), ()),
    ],
)
def test_windows_come_from_the_configuration(tmp_path: Path, config: Any, windows: tuple[int | None, ...]) -> None:
    config.save_pretrained(tmp_path)
    assert Needs.of(tmp_path, 1).windows == windows


def test_a_draft_model_has_the_vocabulary_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(created_model, "init_model", lambda config, directory: config.save_pretrained(directory))
    model = created_model.created_model(MistralConfig(num_hidden_layers=1, vocab_size=777), tmp_path / "model")
    own, other = (SpeculationBench(draft_arguments(tmp_path, draft)) for draft in ("", "tiny-42m"))
    assert own.draft_for(model) is None
    draft = other.draft_for(model)
    assert draft is not None
    assert vocabulary(draft) == 777


def test_figures_of_other_cells_and_drafts_are_kept_apart(tmp_path: Path) -> None:
    settings = [
        {},
        {"batches": "8"},
        {"outputs": 100},
        {"answers": "random"},
        {"draft": "tiny-42m"},
        {"draft": "tiny-42m", "draft_right": 0.5},
    ]
    keys = [SpeculationBench(draft_arguments(tmp_path, **each)).key("m") for each in settings]
    assert len(set(keys)) == len(settings)


def draft_arguments(out: Path, draft: str = "", **more: Any) -> argparse.Namespace:
    usual = {"outputs": 200, "batches": "1,8", "answers": ALL_TEXTS, "draft": draft, "draft_right": 0.7}
    return argparse.Namespace(**{"out": out, **usual, **more})


def test_a_family_that_failed_has_a_row_that_says_why() -> None:
    row = families.row("olmo-2", {"failed": "EOFError: "}, None)
    assert row == ["olmo-2", "OLMo-2-0425-1B", "", "", "", "", "EOFError: "]


@pytest.mark.parametrize(("kv_dtype", "stored"), [("auto", torch.bfloat16), ("int8", torch.int8)])
def test_attention_is_measured_over_kv_of_either_dtype(
    kv_dtype: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "NUM_BLOCKS", 4)
    cache = attention.random_cache(2, 16, kv_dtype)
    kv = cache.layers[-1]
    assert (kv.keys.dtype, cache.dtype, cache.num_blocks) == (stored, torch.bfloat16, 4)
    assert (kv.key_scales is not None) == (kv_dtype == "int8")
    assert kv.values.float().abs().amax(dim=(1, 2, 3)).min() > 0


def model_of_goodput(out: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("bench.scenarios.cluster.goodput.subprocess.run", lambda command, **_: write(Path(command[-1])))
    return goodput.model_directory("tiny-42m", out)


def model_of_family(out: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(created_model, "init_model", lambda config, directory: write(directory))
    return families.family_directory("qwen3", out)


@pytest.mark.parametrize("create", [model_of_goodput, model_of_family])
def test_a_model_that_was_cut_off_is_written_again(
    create: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(directory: Path) -> None:
        directory.mkdir()
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            (directory / name).touch()

    def stopped(directory: Path) -> None:
        write(directory)
        (directory / "model.safetensors").unlink()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(tmp_path, stopped, monkeypatch)
    directory = create(tmp_path, write, monkeypatch)
    assert (directory / "model.safetensors").exists()
    assert create(tmp_path, stopped, monkeypatch) == directory
