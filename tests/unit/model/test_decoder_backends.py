"""Compares the fused and the native decoder with the model's own code, and tests for which models they are
used."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from baton.core.errors import LayoutMismatch, ModelError
from baton.model.attention.attention_inputs import CausalMasks
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends.backend_selection import choose_backend
from baton.model.backends.fused_layers import FusedForward
from baton.model.backends.native_layers import DecoderForward, prefers_native_gemm
from baton.model.backends.native_products import ProductsForward
from baton.model.device.kv_tensors import KvCache
from baton.model.forms.decoder_form import DecoderForm
from baton.model.forms.describe import describe_decoder
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels
from baton.model.linear.pack_model import pack_model
from baton.model.linear.packer import WeightPacker
from baton.model.linear.product_choice import native_gemm_is_faster
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_shapes import shape_config
from baton.model.loading.model_source import DEMO_DIR
from baton.model.step.forward import Forward, ForwardOutput, ModelForward
from baton.model.step.step_inputs import PackedStep, PreparedSequence, pack
from baton.model.verification.verify_backend import verify_logits, verify_masks
from tests.model_families import FAMILIES, SERVED_FAMILIES, TINY, Family, save_random
from tests.scale import sized

LENGTH = 110
"""Tokens of a prompt: several blocks and windows."""
SIZE = 16
EXTREMES: dict[str, Callable[[], PreTrainedConfig]] = {
    "yarn": lambda: LlamaConfig(
        **TINY,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "160 query heads of one KV head": lambda: Qwen3Config(
        **TINY | {"num_attention_heads": 160, "num_key_value_heads": 1}, head_dim=8
    ),
}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels(1)


@pytest.fixture
def two_thread_kernels() -> Kernels:
    """Return the kernels for two threads."""
    return load_kernels(2)


class Prompts:
    """Two prompts of `length` tokens, computed in chunks that cross blocks and windows, then token by token.

    Odd and even layers have different block tables, as if only the odd ones had a window.
    """

    def __init__(self, loaded: LoadedModel, length: int) -> None:
        rng = np.random.default_rng(0)
        num_blocks = -(-length // SIZE)
        self.token_ids = rng.integers(0, loaded.vocab_size, (2, length))
        windows = tuple(1 if layer % 2 else None for layer in range(loaded.config.num_hidden_layers))
        layout = loaded.layout(SIZE, windows)
        self.num_tables, num_ids = layout.windows.num_tables, num_blocks * layout.windows.num_tables
        self.cache = KvCache.zeros(layout, 3 * num_ids, dtype=loaded.dtype)
        self.cache.fill_with_nan()
        self.tables = rng.permutation(3 * num_ids)[: 2 * num_ids].reshape(2, num_ids)
        self._masks = CausalMasks(self.cache.dtype, self.cache.device)
        self.chunks = ((0, 37), (37, 100), (100, length - 6), *((n, n + 1) for n in range(length - 6, length)))

    def step(self, begin: int, end: int) -> PackedStep:
        """Pack tokens [begin, end) of both prompts, without sampling."""
        parts = [
            PreparedSequence(
                seq_id=i,
                token_ids=self.token_ids[i, begin:end],
                position_begin=begin,
                kv_begin=begin,
                block_ids=self.tables[i, : -(-end // SIZE) * self.num_tables].astype(np.int64),
                sample=None,
            )
            for i in range(2)
        ]
        return pack(parts, self.cache, self._masks, paged_attention)


def forward_rows(step: PackedStep, rows: torch.Tensor, forward: Forward) -> ForwardOutput:
    with torch.inference_mode():
        return forward(replace(step, sample_rows=rows))


def answers(loaded: LoadedModel, forward: Forward, length: int = 150) -> torch.Tensor:
    """Return the logits of every token of `Prompts`."""
    prompts, found = Prompts(loaded, length), []
    for begin, end in prompts.chunks:
        step = prompts.step(begin, end)
        forwarded = forward_rows(step, torch.arange(step.token_ids.numel()), forward)
        assert forwarded.finite.all()
        found.append(forwarded.logits.view(2, end - begin, -1))
    return torch.cat(found, dim=1).float()


def form_of(loaded: LoadedModel) -> DecoderForm:
    return describe_decoder(loaded, verify_masks(loaded, SIZE))


def fused(loaded: LoadedModel, kernels: Kernels) -> Forward:
    """Return the decoder for the model's dtype."""
    make = DecoderForward if loaded.dtype == torch.bfloat16 else FusedForward
    return make(form_of(loaded), kernels)


def load_family(name: str, path: Path, dtype: str) -> LoadedModel:
    """Return a tiny model of a family with random weights. They are written to `path` at the first call."""
    directory = path / "family"
    if not directory.exists():
        save_random(FAMILIES[name].config(), directory)
    return load_model(directory, dtype=dtype, device="cpu", max_model_len=FAMILIES[name].max_model_len)


def load_packed(name: str, path: Path, kernels: Kernels) -> LoadedModel:
    """Return a model as `load_family`, in float32, with packed weights."""
    loaded = load_family(name, path, "float32")
    pack_model(loaded.model, WeightPacker(kernels, dtype=loaded.dtype, native_is_faster=True))
    return loaded


@torch.inference_mode()
def transformers_logits(loaded: LoadedModel, length: int) -> torch.Tensor:
    """Return the logits of `Prompts` from transformers' own attention in one pass, in float32."""
    model_class: Any = type(loaded.model)
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    model = model_class.from_pretrained(loaded.path, dtype=torch.float32, attn_implementation=attention)
    token_ids = torch.from_numpy(Prompts(loaded, length).token_ids)
    logits: torch.Tensor = model.eval()(input_ids=token_ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", sized(SERVED_FAMILIES, tuple(FAMILIES)))
def test_each_family_equals_transformers_in_float32(name: str, tmp_path: Path, two_thread_kernels: Kernels) -> None:
    """Prompts are computed in chunks, in batches and token by token."""
    loaded = load_family(name, tmp_path, "float32")
    forward = DecoderForward(form_of(loaded), two_thread_kernels)
    assert (answers(loaded, forward, LENGTH) - transformers_logits(loaded, LENGTH)).abs().max() < 2e-4


@pytest.mark.parametrize("pruned", [0, 1])
def test_layers_may_have_different_numbers_of_experts(pruned: int, tmp_path: Path, two_thread_kernels: Kernels) -> None:
    """One layer has lost two of its four experts."""
    loaded = load_family("mixtral", tmp_path, "float32")
    base: Any = loaded.model.base_model
    mlp = base.layers[pruned].mlp
    for owner, name in ((mlp.gate, "weight"), (mlp.experts, "gate_up_proj"), (mlp.experts, "down_proj")):
        getattr(owner, name).data = getattr(owner, name).data[:2].clone()
    mlp.gate.num_experts = mlp.experts.num_experts = 2
    with closing(ModelForward(loaded.model)) as own:
        right = answers(loaded, own, LENGTH)
    forward = DecoderForward(form_of(loaded), two_thread_kernels)
    assert (answers(loaded, forward, LENGTH) - right).abs().max() < 2e-4


@pytest.mark.parametrize("name", sized(("gemma 3", "gpt-oss"), tuple(FAMILIES)))
def test_other_backends_of_each_family_equal_transformers_in_float32(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    loaded, packed = load_family(name, tmp_path, "float32"), load_packed(name, tmp_path, kernels)
    right = transformers_logits(loaded, LENGTH)
    with closing(ProductsForward(packed.model, kernels)) as products:
        assert (answers(packed, products, LENGTH) - right).abs().max() < 2e-4
    assert (answers(loaded, FusedForward(form_of(loaded), kernels), LENGTH) - right).abs().max() < 2e-4
    with closing(ModelForward(loaded.model)) as own:
        assert (answers(loaded, own, LENGTH) - right).abs().max() < 2e-4, "the model's own code must still work"


@pytest.mark.parametrize("name", sized(("phi 4 mini", "gpt-oss"), tuple(FAMILIES)))
def test_backend_of_each_family(name: str, tmp_path: Path, kernels: Kernels) -> None:
    """The choice includes verification in bfloat16."""
    loaded = load_family(name, tmp_path, "bfloat16")
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert backend.name == ("native decoder" if prefers_native_gemm(loaded.dtype, kernels) else "fused layers")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 70], ids=["all", "a window on one layer"])
def test_unsampled_rows_do_not_change_sampled_ones(
    window: int | None, dtype: str, save: Callable[[PreTrainedConfig], Path], two_thread_kernels: Kernels
) -> None:
    """Compare all rows, the last of each sequence, only one sequence, some in between, and none.

    Logits and KV must be the same, with bfloat16 dot products bit for bit. Some contexts are long enough to
    be split between two threads.
    """
    config = Qwen2Config(
        **TINY | {"hidden_size": 128}, use_sliding_window=bool(window), sliding_window=window, max_window_layers=1
    )
    loaded = load_model(save(config), dtype=dtype, device="cpu")
    forward, prompts = fused(loaded, two_thread_kernels), Prompts(loaded, 900)
    for begin, end in prompts.chunks[:4]:
        step, count = prompts.step(begin, end), end - begin
        before = prompts.cache.memory.clone()
        every = forward_rows(step, torch.arange(2 * count), forward)
        after = prompts.cache.memory.clone()
        is_exact = dtype == "bfloat16" and two_thread_kernels.has_bf16_dot
        for chosen in ({count - 1, 2 * count - 1}, {2 * count - 1}, {0, count // 2, count - 1, count}, set[int]()):
            rows = torch.tensor(sorted(chosen), dtype=torch.int64)
            prompts.cache.memory.copy_(before)
            some = forward_rows(step, rows, forward)
            assert some.finite.all()
            near = 0.0 if is_exact else 1e-5 if dtype == "float32" else 0.06
            torch.testing.assert_close(some.logits, every.logits[rows], atol=near, rtol=0)
            assert torch.equal(prompts.cache.memory, after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_kv_is_reported_for_any_sample_rows(
    dtype: str, save: Callable[[PreTrainedConfig], Path], kernels: Kernels
) -> None:
    """The NaN may be in any layer. Only its own sequence, and only later tokens, are reported."""
    for layer in range(TINY["num_hidden_layers"]):
        loaded = load_model(save(Qwen3Config(**TINY, head_dim=32)), dtype=dtype, device="cpu")
        forward, prompts = fused(loaded, kernels), Prompts(loaded, 150)
        forward_rows(prompts.step(0, 37), torch.tensor([36, 73]), forward)
        block_id = int(prompts.tables[1, prompts.cache.table_of[layer]])
        prompts.cache.layers[layer].keys[block_id, 0, 3, 0] = float("nan")
        is_last = layer + 1 == TINY["num_hidden_layers"]
        for rows in (torch.tensor([62, 125]), torch.empty(0, dtype=torch.int64)):
            finite = forward_rows(prompts.step(37, 100), rows, forward).finite
            assert finite[:63].all()
            wrong = [] if is_last and not rows.numel() else [62] if is_last else list(range(63))
            assert (~finite[63:]).nonzero().flatten().tolist() == wrong


@pytest.mark.parametrize("name", list(EXTREMES))
def test_fused_layers_compute_the_same_as_the_model(
    name: str, save: Callable[[PreTrainedConfig], Path], kernels: Kernels
) -> None:
    loaded = load_model(save(EXTREMES[name]()), dtype="float32", device="cpu")
    with closing(ModelForward(loaded.model)) as own:
        right = answers(loaded, own)
    forward = FusedForward(form_of(loaded), kernels)
    verify_logits(loaded, SIZE, forward=forward)
    assert (answers(loaded, forward) - right).abs().max() < 1e-4


def assert_no_further_from_float32_than_the_model(
    path: Path,
    dtype: str,
    make: Callable[[DecoderForm], Forward],
    length: int = 150,
    max_model_len: int | None = None,
) -> None:
    exact, half = (
        load_model(path, dtype=each, device="cpu", max_model_len=max_model_len) for each in ("float32", dtype)
    )
    with closing(ModelForward(exact.model)) as own:
        right = answers(exact, own, length)
    with closing(ModelForward(half.model)) as own:
        reference = (answers(half, own, length) - right).abs().flatten().quantile(0.99)
    actual = (answers(half, make(form_of(half)), length) - right).abs().flatten().quantile(0.99)
    assert actual <= 1.25 * reference


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_further_from_float32_than_the_model_itself(
    dtype: str, save: Callable[[PreTrainedConfig], Path], kernels: Kernels
) -> None:
    path = save(Qwen3Config(**TINY, head_dim=32))
    assert_no_further_from_float32_than_the_model(path, dtype, lambda form: FusedForward(form, kernels))


def test_native_products_free_the_models_weights(tmp_path: Path, kernels: Kernels) -> None:
    """Afterwards the model computes the same in steps, and its own code raises."""
    loaded = load_family("gpt-oss", tmp_path, "float32")
    with closing(ProductsForward(loaded.model, kernels)) as forward:
        before = answers(loaded, forward, LENGTH)
        forward.release_model_weights()
        assert torch.equal(answers(loaded, forward, LENGTH), before)
        left = {key for key, parameter in loaded.model.named_parameters() if parameter.numel() and parameter.dim() > 1}
        assert left
        assert not any("proj.weight" in key for key in left)
    with pytest.raises(ModelError, match="cannot run"):
        verify_logits(loaded, SIZE)


HALF_PRECISION_FAMILIES = [name for name in FAMILIES if "moe" not in name and name not in ("mixtral", "gpt-oss")]
"""Routing of experts may differ by rounding, which moves single tokens far."""


@pytest.mark.parametrize("name", sized(["gemma 3", "olmo 3", "granite"], HALF_PRECISION_FAMILIES) + list(EXTREMES))
def test_native_decoder_is_as_close_to_float32_as_the_model(
    name: str, tmp_path: Path, two_thread_kernels: Kernels
) -> None:
    family = FAMILIES.get(name) or Family(EXTREMES[name])
    path = save_random(family.config(), tmp_path / "model")
    assert_no_further_from_float32_than_the_model(
        path, "bfloat16", lambda form: DecoderForward(form, two_thread_kernels), LENGTH, family.max_model_len
    )


@pytest.mark.parametrize("name", ["demo", pytest.param("tiny-42m", marks=pytest.mark.long)])
def test_native_decoder_is_as_close_to_float32_for_measured_models(
    name: str, save: Callable[[PreTrainedConfig], Path], two_thread_kernels: Kernels
) -> None:
    path = DEMO_DIR if name == "demo" else save(shape_config(name))
    assert_no_further_from_float32_than_the_model(
        path, "bfloat16", lambda form: DecoderForward(form, two_thread_kernels)
    )


def test_native_decoder_with_contexts_split_on_some_layers(
    save: Callable[[PreTrainedConfig], Path], two_thread_kernels: Kernels
) -> None:
    """Decodes are split along their KV; in one layer the window limits what they see."""
    config = Qwen2Config(
        **TINY | {"hidden_size": 128}, use_sliding_window=True, sliding_window=300, max_window_layers=1
    )
    assert config.hidden_size // config.num_attention_heads == 32
    assert_no_further_from_float32_than_the_model(
        save(config), "bfloat16", lambda form: DecoderForward(form, two_thread_kernels), length=900
    )


def test_native_decoder_uses_the_cache_of_each_step(tiny_dir: Path, kernels: Kernels) -> None:
    """Steps alternate between two caches, as when a backend is verified."""
    loaded = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    forward = DecoderForward(form_of(loaded), kernels)
    expected = answers(loaded, forward)
    pair = Prompts(loaded, 150), Prompts(loaded, 150)
    found: list[list[torch.Tensor]] = [[], []]
    for begin, end in pair[0].chunks:
        for prompts, logits in zip(pair, found, strict=True):
            step = prompts.step(begin, end)
            forwarded = forward_rows(step, torch.arange(step.token_ids.numel()), forward)
            logits.append(forwarded.logits.view(2, end - begin, -1))
    for logits in found:
        assert torch.equal(torch.cat(logits, dim=1).float(), expected)


def test_native_decoder_refuses_the_cache_of_another_model(
    tiny_dir: Path, two_thread_kernels: Kernels, save: Callable[[PreTrainedConfig], Path]
) -> None:
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    other = load_model(save(LlamaConfig(**TINY | {"num_key_value_heads": 1})), dtype="bfloat16", device="cpu")
    forward = DecoderForward(form_of(half), two_thread_kernels)
    with pytest.raises(LayoutMismatch, match="do not fit"):
        answers(other, forward)


def test_native_decoder_refuses_layers_with_different_numbers_of_heads(
    save: Callable[[PreTrainedConfig], Path], kernels: Kernels
) -> None:
    """They share scratch memory of one size. Backends that call each layer run them."""
    loaded = load_model(save(LlamaConfig(**TINY)), device="cpu")
    base: Any = loaded.model.base_model
    base.layers[1].self_attn.q_proj = nn.Linear(64, 128, bias=False)
    base.layers[1].self_attn.o_proj = nn.Linear(128, 64, bias=False)
    form = form_of(loaded)
    with pytest.raises(LayoutMismatch, match="must be one pair"):
        DecoderForward(form, kernels)
    with closing(ModelForward(loaded.model)) as own:
        right = answers(loaded, own)
    assert (answers(loaded, FusedForward(form, kernels)) - right).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("dtype", "has_bf16_dot", "has_amx", "has_onednn", "expected"),
    [
        ("bfloat16", True, False, True, True),
        ("bfloat16", True, True, True, False),
        ("bfloat16", False, False, True, False),
        ("bfloat16", False, False, False, True),
        ("float16", True, False, True, False),
        ("float32", False, False, False, False),
    ],
)
def test_native_gemm_is_preferred_only_for_bfloat16_without_faster_gemm(
    dtype: str, has_bf16_dot: bool, has_amx: bool, has_onednn: bool, expected: bool
) -> None:
    found = native_gemm_is_faster(
        getattr(torch, dtype), has_bf16_dot=has_bf16_dot, has_amx=has_amx, has_onednn_gemm=has_onednn
    )
    assert found is expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_native_gemm_is_not_preferred_for_other_dtypes_on_this_processor(
    two_thread_kernels: Kernels, dtype: str
) -> None:
    assert not prefers_native_gemm(getattr(torch, dtype), two_thread_kernels)


def test_verification_finds_a_decoder_that_differs(save: Callable[[PreTrainedConfig], Path], kernels: Kernels) -> None:
    """The model has a multiplier that the fused decoder does not know."""
    loaded = load_model(save(LlamaConfig(**TINY)), device="cpu")
    forward = FusedForward(form_of(loaded), kernels)
    mlp = loaded.model.base_model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 2 * before(x)
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(loaded, SIZE, forward=forward)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verification_finds_errors_with_few_sample_rows(
    dtype: str, save: Callable[[PreTrainedConfig], Path], kernels: Kernels
) -> None:
    class Shifted:
        def __call__(self, step: PackedStep) -> ForwardOutput:
            found = right(step)
            is_part = step.sample_rows.numel() < step.token_ids.numel()
            return ForwardOutput(logits=found.logits.roll(1, dims=1), finite=found.finite) if is_part else found

        def close(self) -> None: ...

    loaded = load_model(save(Qwen3Config(**TINY, head_dim=32)), dtype=dtype, device="cpu")
    right = fused(loaded, kernels)
    verify_logits(loaded, SIZE, forward=right)
    with pytest.raises(ModelError, match="computes different logits"):
        verify_logits(loaded, SIZE, forward=Shifted())
