"""Tests models with random weights."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from baton.core.errors import ModelError
from baton.model.backends.backend_selection import choose_backend
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_shapes import SHAPES, shape_config
from baton.model.loading.model_support import causal_lm_class
from baton.model.loading.random_init import init_like, init_model
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device.open_device import open_device
from tests.builders import worker_ref
from tests.model_families import FAMILIES, TINY


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_model(Qwen3Config(**TINY), tmp_path / name, seed=seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    changed = {name for name, digest in digests(tmp_path / "c").items() if digest != digests(tmp_path / "a")[name]}
    assert changed == {"model.safetensors"}


def test_shards_hold_the_same_weights(tmp_path: Path) -> None:
    seen = []
    init_model(Qwen3Config(**TINY), tmp_path / "one")
    init_model(
        Qwen3Config(**TINY),
        tmp_path / "many",
        shard_bytes=40_000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) == len(seen) > 3
    assert seen[-1][0] == seen[-1][1]
    one, many = (load_model(tmp_path / name, device="cpu").model.state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_router_logits_are_spread_widely(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **(TINY | {"initializer_range": 0.02}), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    )
    init_model(config, tmp_path / "moe")
    gate = load_model(tmp_path / "moe", device="cpu").model.model.layers[0].mlp.gate.weight
    inputs = torch.randn(1000, TINY["hidden_size"], generator=torch.Generator().manual_seed(0))
    assert (inputs @ gate.T).std(dim=1).mean() > 0.5


def test_output_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ModelError, match="not empty"):
        init_model(Qwen3Config(**TINY), tmp_path)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("tiny-42m", 41_559_552),
        ("tiny-moe", 11_694_080),
        ("gemma3-270m", 268_098_176),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_shapes_have_their_size(shape: str, size: int) -> None:
    """Those of published models have exactly as many parameters as these."""
    config = shape_config(shape)
    with torch.device("meta"):
        model = causal_lm_class(config)(config)
    assert sum(p.numel() for p in model.parameters()) == size
    assert config.vocab_size >= 4096


def test_gemma_has_the_published_windows_and_frequencies() -> None:
    """Every sixth layer sees all tokens, with rotary frequencies of its own."""
    config = shape_config("gemma3-270m")
    assert [kind == "full_attention" for kind in config.layer_types] == [(i + 1) % 6 == 0 for i in range(18)]
    assert (config.sliding_window, config.query_pre_attn_scalar, config.max_position_embeddings) == (512, 256, 32_768)
    thetas = {kind: parameters["rope_theta"] for kind, parameters in config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
    assert config.hidden_activation == "gelu_pytorch_tanh"


def test_unknown_shape_error_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean qwen3-8b"):
        init_like("qwen3-8", tmp_path / "out")
    with pytest.raises(ModelError, match=r"unknown shape 'x'\. Known: tiny-42m, "):
        init_like("x", tmp_path / "out")
    assert set(SHAPES) == {"tiny-42m", "tiny-moe", "gemma3-270m", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama3-8b"}


def test_a_named_shape_is_served(tmp_path: Path) -> None:
    init_like("tiny-moe", tmp_path / "moe")
    loaded = load_model(tmp_path / "moe", device="cpu")
    assert loaded.dtype == torch.bfloat16
    assert choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=16).name == "torch"


def test_a_model_that_is_served_up_to_a_shorter_context_can_be_written(tmp_path: Path) -> None:
    phi = FAMILIES["phi 4 mini"]
    init_model(phi.config(), tmp_path / "phi")
    with pytest.raises(ModelError, match="--max-model-len 128"):
        load_model(tmp_path / "phi", device="cpu")
    assert load_model(tmp_path / "phi", device="cpu", max_model_len=phi.max_model_len).max_model_len == 128


@pytest.mark.long
@pytest.mark.parametrize("shape", ["tiny-42m", "gemma3-270m", "qwen3-0.6b"])
def test_dense_shapes_run_in_the_native_decoder(shape: str, tmp_path: Path) -> None:
    """Random weights make logits depend on the last bits of all numbers, which verification allows for."""
    init_like(shape, tmp_path / shape)
    config = WorkerConfig(
        model=str(tmp_path / shape),
        device="cpu",
        threads_per_worker=2,
        transfer="local",
        max_model_len=4096,
        kv_memory=2**30,
        weight_cache=0,
        speculate="off",
    )
    device = open_device(config, worker_ref("w"))
    device.executor.close()
    assert "native decoder" in device.summary
