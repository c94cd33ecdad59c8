"""Tests that verification accepts correct models and kernels and refuses wrong ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import (
    BertConfig,
    Cohere2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from baton.core.errors import ModelError
from baton.model.attention.attention_inputs import AttentionStep
from baton.model.attention.paged_attention import PAGED, paged_attention
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.pack_model import rounds_activations
from baton.model.linear.packer import WeightPacker
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.forward import Forward, ForwardOutput, ModelForward
from baton.model.step.step_inputs import PackedStep
from baton.model.verification import verify_backend
from baton.model.verification.verify_backend import verify_logits, verify_masks
from tests.model_families import TINY

ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**TINY, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "llama": lambda: LlamaConfig(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=24),
    "mixtral": lambda: MixtralConfig(**TINY, num_local_experts=4),
    "olmo2": lambda: Olmo2Config(**TINY),
    "phi3": lambda: Phi3Config(**TINY, **ENDS, sliding_window=24),
    "granite": lambda: GraniteConfig(**TINY, logits_scaling=8.0, attention_multiplier=0.1),
    "starcoder2": lambda: Starcoder2Config(**TINY, sliding_window=24),
    "cohere2": lambda: Cohere2Config(**TINY, **ENDS, sliding_window=24),
    "gemma3": lambda: Gemma3TextConfig(**TINY, **ENDS, head_dim=16, sliding_window=24),
    "gpt_oss": lambda: GptOssConfig(**TINY, head_dim=16, num_local_experts=4, sliding_window=24),
}
BERT = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bert": (lambda: BertConfig(**BERT), "not causal"),
    "deepseek_v3": (
        lambda: DeepseekV3Config(
            **(TINY | {"num_key_value_heads": 4}),
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
        ),
        "one head size",
    ),
}


def verify(loaded: LoadedModel, block_size_tokens: int) -> None:
    """Verify the model's own code, as backend selection does."""
    verify_masks(loaded, block_size_tokens)
    verify_logits(loaded, block_size_tokens)


@pytest.mark.parametrize("name", list(SERVED))
def test_supported_architectures_pass(name: str, save: Callable[[PreTrainedConfig], Path]) -> None:
    loaded = load_model(save(SERVED[name]()), device="cpu")
    verify(loaded, block_size_tokens=16)
    assert loaded.config._attn_implementation == PAGED


@pytest.mark.parametrize("name", list(REFUSED))
def test_unsupported_architectures_are_refused(name: str, save: Callable[[PreTrainedConfig], Path]) -> None:
    config, named = REFUSED[name]
    loaded = load_model(save(config()), device="cpu")
    with pytest.raises(ModelError, match=named):
        verify(loaded, block_size_tokens=16)
    assert loaded.config._attn_implementation == PAGED


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block_size_tokens", [1, 16, 64])
def test_half_precision_with_any_block_size_does_not_raise(tiny_dir: Path, dtype: str, block_size_tokens: int) -> None:
    verify(load_model(tiny_dir, dtype=dtype, device="cpu"), block_size_tokens=block_size_tokens)


def sees_one_token_less(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    return paged_attention(query, layer, step, scaling, 20 if window is None else window - 1)


def wrong_scaling(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    return paged_attention(query, layer, step, scaling * 1.05, window)


def reads_unwritten_slots(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    plan = step.plan(layer, window)
    decodes = tuple(replace(group, stale_seqs=None, stale_slots=None) for group in plan.decodes)
    step._plans[0, window] = replace(plan, decodes=decodes)
    return paged_attention(query, layer, step, scaling, window)


def without_sinks(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    return paged_attention(query, layer, step, scaling, window)


def test_kernel_that_ignores_sinks_is_refused(save: Callable[[PreTrainedConfig], Path]) -> None:
    loaded = load_model(save(SERVED["gpt_oss"]()), device="cpu")
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(loaded, 16, kernel=without_sinks)


@pytest.mark.parametrize("kernel", [sees_one_token_less, wrong_scaling, reads_unwritten_slots])
def test_wrong_kernel_is_refused(tiny_dir: Path, kernel: Any) -> None:
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(load_model(tiny_dir, device="cpu"), 16, kernel=kernel)


@pytest.fixture
def coded(tiny_dir: Path) -> LoadedModel:
    """A model whose products round activations to 8 bits."""
    return load_model(
        tiny_dir,
        device="cpu",
        dtype="bfloat16",
        weights="int8",
        packer_for=lambda dtype: WeightPacker(load_kernels(1), dtype=dtype, native_is_faster=True),
    )


def rounds_otherwise(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    attended = paged_attention(query, layer, step, scaling, window)
    return attended * (1 + torch.finfo(attended.dtype).eps)


@pytest.mark.parametrize("is_coded", [True, False])
def test_rounded_numbers_may_differ_as_much_as_the_last_bits_of_embeddings_explain(
    coded: LoadedModel, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, is_coded: bool
) -> None:
    loaded = coded if is_coded else load_model(tiny_dir, device="cpu", dtype="bfloat16")
    assert rounds_activations(loaded.model) == is_coded
    monkeypatch.setattr(verify_backend, "_ROUNDED_LIMIT", 1e-6)
    monkeypatch.setattr(verify_backend, "_NOISE_FACTOR", 0.0)
    verify_logits(loaded, 16, kernel=rounds_otherwise)
    monkeypatch.setattr(verify_backend, "_LAST_BITS_FACTOR", 1e-6)
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(loaded, 16, kernel=rounds_otherwise)


def sees_no_context(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    return paged_attention(query, layer, step, scaling, 1)


@pytest.mark.parametrize("kernel", [sees_no_context, reads_unwritten_slots])
def test_wrong_kernel_is_refused_with_rounded_activations(coded: LoadedModel, kernel: Any) -> None:
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(coded, 16, kernel=kernel)


def wrong_for_long_contexts(
    query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    return paged_attention(query, layer, step, scaling * (1.0 if step.tables.context_len.max() <= 100 else 1.5), window)


def test_longest_finds_errors_at_long_contexts(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, device="cpu")
    verify_logits(loaded, 16, kernel=wrong_for_long_contexts)
    verify_logits(loaded, 16, longest=130)
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(loaded, 16, kernel=wrong_for_long_contexts, longest=130)


def test_window_longer_than_the_test_prompts_is_checked_by_mask(
    save: Callable[[PreTrainedConfig], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has a window that differs from its mask. The short prompts do not show it; the masks do."""
    loaded = load_model(
        save(Qwen3Config(**TINY, head_dim=16, use_sliding_window=True, sliding_window=1000, max_window_layers=1)),
        device="cpu",
    )
    verify(loaded, block_size_tokens=16)
    loaded.model.model.layers[1].self_attn.sliding_window = 999
    with pytest.raises(ModelError, match=r"layer 1 .* differs from its sliding_window 999"):
        verify(loaded, block_size_tokens=16)
    loaded.model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="differs from its sliding_window None"):
        verify(loaded, block_size_tokens=16)


def test_model_that_skips_a_layer_is_refused(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, device="cpu")
    loaded.model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelError, match="exactly once in each of its 2 layers"):
        verify(loaded, block_size_tokens=16)


def test_foreign_errors_become_model_errors(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, device="cpu")
    loaded.model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        verify(loaded, block_size_tokens=16)


def test_max_model_len_shorter_than_the_test_prompts_does_not_raise(tiny_dir: Path) -> None:
    verify(replace(load_model(tiny_dir, device="cpu"), max_model_len=7), block_size_tokens=16)


@pytest.mark.parametrize("is_wrong", [lambda of_all: of_all, lambda of_all: not of_all], ids=["all tokens", "ends"])
def test_wrong_logits_of_one_kind_of_pass_are_refused(is_wrong: Callable[[bool], bool], tiny_dir: Path) -> None:
    """Of passes that compute the logits of all their tokens, or of others."""
    loaded = load_model(tiny_dir, device="cpu")
    right = ModelForward(loaded.model)

    def forward(step: PackedStep) -> ForwardOutput:
        found = right(step)
        of_all = found.logits.shape[0] == step.token_ids.shape[0]
        return replace(found, logits=-found.logits) if is_wrong(of_all) else found

    verify_logits(loaded, 16, forward=right)
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(loaded, 16, forward=cast(Forward, forward))
    right.close()


def test_context_of_one_token_is_verified(tiny_dir: Path) -> None:
    """All prompts take one pass."""
    verify(load_model(tiny_dir, device="cpu", max_model_len=1), block_size_tokens=16)
