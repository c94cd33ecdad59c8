"""Both of our decoders against the model's own code: same numbers, whatever an architecture's window, bias, norms; or not taken at all."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GraniteConfig, LlamaConfig, MistralConfig, Olmo2Config, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from baton.core.errors import LayoutMismatch, ModelError
from baton.engine.model import decoder
from baton.engine.model.attention import paged_attention
from baton.engine.model.attention_step import Asked, CausalMasks
from baton.engine.model.decoder import DecoderForward, can_decode
from baton.engine.model.decoder_layers import can_fuse
from baton.engine.model.forward import Forward, ModelForward
from baton.engine.model.fused import FusedForward
from baton.engine.model.hub import DEMO_DIR
from baton.engine.model.kv_cache import KvCache
from baton.engine.model.loading import LoadedModel, load_model
from baton.engine.model.native.library import Kernels, load_kernels
from baton.engine.model.self_proof import prove_masks, prove_numbers
from baton.engine.model.shapes import shape_config
from baton.engine.model.step_inputs import Part, pack
from tests.unit.engine.model.conftest import TINY

SIZE = 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama with attention biases": lambda: LlamaConfig(**TINY, attention_bias=True),
    "llama3 rotary": lambda: LlamaConfig(**TINY, rope_parameters=LLAMA3),
    "yarn": lambda: LlamaConfig(
        **TINY, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    ),
    "mistral with a window": lambda: MistralConfig(**TINY, sliding_window=40),
    "qwen2, a window on one layer": lambda: Qwen2Config(**TINY, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True),
    "160 query heads of one KV head": lambda: Qwen3Config(**TINY | {"num_attention_heads": 160, "num_key_value_heads": 1}, head_dim=8),
}
NOT_FUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "olmo2": lambda: Olmo2Config(**TINY),
    "granite": lambda: GraniteConfig(**TINY),
    "mlp biases": lambda: LlamaConfig(**TINY, mlp_bias=True),
    "another activation": lambda: LlamaConfig(**TINY, hidden_act="gelu"),
}


class Quantized(nn.Linear):
    """Computes something of its own."""


def _set_dtype(base: Any) -> None:
    base.norm.weight.data = base.norm.weight.data.bfloat16()


def _set_rotary(base: Any) -> None:
    base.rotary_emb.inv_freq = base.rotary_emb.inv_freq[:4]


def _set_eps(base: Any) -> None:
    base.layers[1].self_attn.k_norm.variance_epsilon = 1e-3


def _set_bias(base: Any) -> None:
    base.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.zeros(64))


def _set_kind(base: Any) -> None:
    base.layers[1].mlp.down_proj.__class__ = Quantized


def _set_embedding(base: Any) -> None:
    base.embed_tokens.__class__ = type("ScaledEmbedding", (nn.Embedding,), {})


def _set_width(base: Any) -> None:
    base.layers[1].mlp.up_proj = nn.Linear(64, 80, bias=False)


def _set_depth(base: Any) -> None:
    base.layers.append(base.layers[0])


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels(1)


def answers(loaded: LoadedModel, forward: Forward, length: int = 150) -> torch.Tensor:
    """Logits of two prompts of so many tokens, in chunks that cross blocks and windows, and then one token at a time."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, loaded.vocab_size, (2, length))
    num_blocks = -(-length // SIZE)
    cache = KvCache.zeros(loaded.layout(SIZE), 3 * num_blocks)
    cache.blocks.fill_(float("nan"))
    tables = rng.permutation(3 * num_blocks)[: 2 * num_blocks].reshape(2, num_blocks)
    masks = CausalMasks(cache.dtype, cache.device)
    found = []
    for begin, end in ((0, 37), (37, 100), (100, length - 6), *((n, n + 1) for n in range(length - 6, length))):
        parts = [
            Part(
                seq_id=i,
                token_ids=prompts[i, begin:end],
                position_begin=begin,
                kv_begin=begin,
                block_ids=tables[i, : -(-end // SIZE)].astype(np.int64),
                sample=None,
            )
            for i in range(2)
        ]
        step = pack(parts, cache, masks, paged_attention)
        with torch.inference_mode():
            forwarded = forward(replace(step, sample_rows=torch.arange(step.token_ids.numel())))
        assert forwarded.finite.all()
        found.append(forwarded.logits.view(2, end - begin, -1))
    return torch.cat(found, dim=1).float()


@pytest.mark.parametrize("name", list(FUSED))
def test_it_computes_what_the_model_does(name: str, save: Callable[[PreTrainedConfig], Path], kernels: Kernels) -> None:
    loaded = load_model(save(FUSED[name]()), dtype="float32", device="cpu")
    with closing(ModelForward(loaded.model)) as own:
        right = answers(loaded, own)
    assert can_fuse(loaded.model)
    forward = FusedForward(loaded.model, prove_masks(loaded, SIZE), kernels)
    prove_numbers(loaded, SIZE, forward=forward)
    assert (answers(loaded, forward) - right).abs().max() < 1e-4
    with closing(ModelForward(loaded.model)) as own:
        assert (answers(loaded, own) - right).abs().max() < 1e-4, "the model still runs by itself"


@pytest.fixture
def whole_kernels() -> Kernels:
    """For two threads."""
    return load_kernels(2)


def assert_no_further_from_float32_than_the_model(
    path: Path, dtype: str, make: Callable[[PreTrainedModel, tuple[Asked, ...]], Forward], length: int = 150
) -> None:
    exact, half = load_model(path, dtype="float32", device="cpu"), load_model(path, dtype=dtype, device="cpu")
    with closing(ModelForward(exact.model)) as own:
        right = answers(exact, own, length)
    with closing(ModelForward(half.model)) as own:
        theirs = (answers(half, own, length) - right).abs().flatten().quantile(0.99)
    ours = (answers(half, make(half.model, prove_masks(half, SIZE)), length) - right).abs().flatten().quantile(0.99)
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_further_from_float32_than_the_model_itself(
    dtype: str, save: Callable[[PreTrainedConfig], Path], kernels: Kernels
) -> None:
    path = save(Qwen3Config(**TINY, head_dim=32))
    assert_no_further_from_float32_than_the_model(path, dtype, lambda model, asked: FusedForward(model, asked, kernels))


@pytest.mark.parametrize("name", list(FUSED))
def test_the_whole_decoder_is_no_further_from_float32_either(
    name: str, save: Callable[[PreTrainedConfig], Path], whole_kernels: Kernels
) -> None:
    path = save(FUSED[name]())
    assert_no_further_from_float32_than_the_model(path, "bfloat16", lambda model, asked: DecoderForward(model, asked, whole_kernels))


@pytest.mark.parametrize("name", ["demo", pytest.param("tiny-42m", marks=pytest.mark.long)])
def test_the_whole_decoder_is_no_further_with_models_that_are_measured(
    name: str, save: Callable[[PreTrainedConfig], Path], whole_kernels: Kernels
) -> None:
    path = DEMO_DIR if name == "demo" else save(shape_config(name))
    assert_no_further_from_float32_than_the_model(path, "bfloat16", lambda model, asked: DecoderForward(model, asked, whole_kernels))


def test_the_whole_decoder_over_contexts_that_are_split_on_some_layers(
    save: Callable[[PreTrainedConfig], Path], whole_kernels: Kernels
) -> None:
    """Single tokens are attended to in parts; of one layer only what its window shows."""
    config = Qwen2Config(**TINY | {"hidden_size": 128}, use_sliding_window=True, sliding_window=300, max_window_layers=1)
    assert config.hidden_size // config.num_attention_heads == 32
    assert_no_further_from_float32_than_the_model(
        save(config), "bfloat16", lambda model, asked: DecoderForward(model, asked, whole_kernels), length=900
    )


def test_the_whole_decoder_wants_its_own_models_cache(
    tiny_dir: Path, whole_kernels: Kernels, save: Callable[[PreTrainedConfig], Path]
) -> None:
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    other = load_model(save(LlamaConfig(**TINY | {"num_key_value_heads": 1})), dtype="bfloat16", device="cpu")
    forward = DecoderForward(half.model, prove_masks(half, SIZE), whole_kernels)
    with pytest.raises(LayoutMismatch, match="do not fit"):
        answers(other, forward)


@pytest.mark.parametrize(
    ("dtype", "multiplies_pairs", "has_amx", "has_onednn", "wanted"),
    [
        ("bfloat16", True, False, True, True),
        ("bfloat16", True, True, True, False),
        ("bfloat16", False, False, True, False),
        ("bfloat16", False, False, False, True),
        ("float16", True, False, True, False),
        ("float32", False, False, False, False),
    ],
)
def test_the_whole_decoder_is_for_bfloat16_where_no_products_are_faster(
    tiny_dir: Path,
    whole_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    multiplies_pairs: bool,
    has_amx: bool,
    has_onednn: bool,
    wanted: bool,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(decoder, "has_onednn_products", lambda dtype: has_onednn)
    monkeypatch.setattr(whole_kernels, "multiplies_pairs", multiplies_pairs)
    assert can_decode(load_model(tiny_dir, dtype=dtype, device="cpu").model, whole_kernels) is wanted


@pytest.mark.parametrize("name", list(NOT_FUSED))
def test_others_run_by_their_own_code(name: str, save: Callable[[PreTrainedConfig], Path]) -> None:
    assert not can_fuse(load_model(save(NOT_FUSED[name]()), device="cpu").model)


@pytest.mark.parametrize(
    "change",
    [_set_dtype, _set_rotary, _set_eps, _set_bias, _set_kind, _set_embedding, _set_width, _set_depth],
    ids=lambda f: f.__name__[5:],
)
def test_a_module_that_is_not_as_it_is_taken_for(change: Callable[[Any], None], save: Callable[[PreTrainedConfig], Path]) -> None:
    model = load_model(save(Qwen3Config(**TINY, head_dim=32)), device="cpu").model
    assert can_fuse(model)
    change(model.base_model)
    assert not can_fuse(model)


def test_a_decoder_that_is_not_this_one_is_found_out(save: Callable[[PreTrainedConfig], Path], kernels: Kernels) -> None:
    """A multiplier that the fused decoder does not know."""
    loaded = load_model(save(LlamaConfig(**TINY)), device="cpu")
    forward = FusedForward(loaded.model, prove_masks(loaded, SIZE), kernels)
    mlp = loaded.model.base_model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 2 * before(x)
    with pytest.raises(ModelError, match="computes something else"):
        prove_numbers(loaded, SIZE, forward=forward)
