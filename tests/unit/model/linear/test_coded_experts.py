"""Compares experts of many weight formats with transformers' own code on the dequantised weights."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from baton.core.errors import ModelError
from baton.model.attention.paged_attention import PAGED
from baton.model.backends.backend_selection import choose_backend
from baton.model.backends.native_layers import DecoderForward
from baton.model.forms.decoder_form import FormUnknown
from baton.model.forms.recognise import gate_of
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels
from baton.model.linear.experts import (
    DOWN,
    GATE_UP,
    ExpertWeights,
    are_replaced,
    bias_name,
    gate_first,
    is_experts,
    replace_experts,
)
from baton.model.linear.linear import Linear
from baton.model.linear.packed_linear import PackedGemm
from baton.model.linear.quantise import quantise
from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors, Weight
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.forward import ModelForward
from baton.model.verification.verify_backend import verify_logits
from tests.model_families import save_random
from tests.scale import sized
from tests.unit.model.conftest import TINY
from tests.unit.model.linear.weight_samples import MXFP4
from tests.unit.model.test_decoder_backends import LENGTH, Prompts, answers, form_of

SIZE = 16
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **TINY, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "gpt-oss": lambda: GptOssConfig(**TINY, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}


def mxfp4(values: torch.Tensor) -> Weight:
    """Return the nearest codes to values; each group of 32 has a power of two as its scale."""
    groups = values.view(len(values), -1, 32)
    scales = torch.exp2((groups.abs().amax(dim=2) / 12).log2().ceil())
    table = torch.tensor(MXFP4)
    codes = (groups[..., None] / scales[:, :, None, None] - table).abs().argmin(dim=3)
    return CodedWeight(codes.flatten(1).to(torch.uint8), 4, 32, GroupFactors(scales, 32), None, MXFP4)


def float8(values: torch.Tensor) -> Weight:
    scales = torch.rand(-(-len(values) // 24), 1) + 0.5
    return FloatWeight(
        (values / scales.repeat_interleave(24, 0)[: len(values)]).to(torch.float8_e4m3fn), scales, (24, 999)
    )


FORMATS: dict[str, Sequence[Callable[[torch.Tensor], Weight]]] = {
    "float8": [float8],
    "int8": [lambda values: quantise(values, 8, 32)],
    "mxfp4": [mxfp4],
    "another format in each expert": [
        lambda values: quantise(values, 4, 16, has_offsets=True),
        float8,
        lambda values: quantise(values, 6, 32),
        FloatWeight,
    ],
}
"""Formats of the experts of a block, in turns."""
EXACT = ("float8",)
"""Formats whose products do not round activations."""


def code(
    module: Any, formats: Sequence[Callable[[torch.Tensor], Weight]], *, apart: bool
) -> list[ExpertWeights[Weight]]:
    """Return a block's weights in other formats. Its own parameters then hold what these stand for.

    apart: gate and up are weights of their own, which need not have one format.
    """
    coded: dict[str, list[list[Weight]]] = {}
    for name in (GATE_UP, DOWN):
        parameter = getattr(module, name)
        matrices = parameter.data.transpose(1, 2) if module.is_transposed else parameter.data
        coded[name] = []
        for expert, matrix in enumerate(matrices):
            parts = matrix.chunk(2) if apart and name == GATE_UP else [matrix]
            coded[name].append(
                [formats[(expert + i) % len(formats)](part.contiguous()) for i, part in enumerate(parts)]
            )
            matrix.copy_(torch.cat([weight.dequantized() for weight in coded[name][-1]]))
    return [ExpertWeights(gate_up, down[0]) for gate_up, down in zip(coded[GATE_UP], coded[DOWN], strict=True)]


def replace_all(loaded: LoadedModel, coded: Sequence[tuple[Any, list[ExpertWeights[Weight]]]]) -> None:
    for module, experts in coded:
        names = (GATE_UP, DOWN)
        biases = {name: getattr(module, bias_name(name)).detach() for name in names} if module.has_bias else None
        replace_experts(module, [gate_first(module, each) for each in experts], biases)


@torch.inference_mode()
def own_logits(loaded: LoadedModel) -> torch.Tensor:
    """Return the logits of `Prompts` from transformers' own code, experts and attention included."""
    loaded.model.set_attn_implementation("eager")
    token_ids = torch.from_numpy(Prompts(loaded, LENGTH).token_ids)
    logits: torch.Tensor = loaded.model(input_ids=token_ids, use_cache=False).logits
    loaded.model.set_attn_implementation(PAGED)
    return logits


def distances(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the root mean square difference of each token's logits, in their standard deviations."""
    return (actual - expected).pow(2).mean(dim=-1).sqrt().flatten() / expected.std()


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels(2)


CASES = [(name, form, apart) for name in MODELS for form in FORMATS for apart in (False, name == "qwen3-moe")]


@pytest.mark.parametrize(
    ("name", "form", "apart"),
    sized(
        [
            ("qwen3-moe", "float8", True),
            ("gpt-oss", "float8", False),
            ("gpt-oss", "mxfp4", False),
            ("qwen3-moe", "another format in each expert", True),
            ("gpt-oss", "another format in each expert", False),
        ],
        sorted(set(CASES)),
    ),
)
def test_native_decoder_equals_transformers_on_dequantised_experts(
    name: str, form: str, apart: bool, tmp_path: Path, kernels: Kernels
) -> None:
    """With codes, products round activations to 8 bits, also in the model's own code with native products.

    Rounding may change the experts of a few tokens, so one in ten may differ more.
    """
    loaded = load_model(save_random(MODELS[name](), tmp_path / "model"), dtype="float32", device="cpu")
    blocks = [module for module in loaded.model.modules() if is_experts(module)]
    coded = [(module, code(module, FORMATS[form], apart=apart)) for module in blocks]
    right = own_logits(loaded)
    replace_all(loaded, coded)
    assert len(coded) == 2
    assert not any(is_experts(module) for module in loaded.model.modules())
    found = answers(loaded, DecoderForward(form_of(loaded), kernels), LENGTH)
    for module in loaded.model.modules():
        if isinstance(module, Linear):
            vars(module)["forward"] = PackedGemm(kernels, module)
    with closing(ModelForward(loaded.model)) as own:
        products = answers(loaded, own, LENGTH)
    if form in EXACT:
        assert (found - right).abs().max() < 2e-4
        assert (products - right).abs().max() < 2e-4
        return
    assert distances(found, right).quantile(0.9) < 0.03
    assert distances(found, right).median() > 1e-4, "activations are rounded"
    assert distances(found, products).quantile(0.9) < 1e-3


@pytest.mark.parametrize(
    ("name", "weights", "dtype"),
    sized(
        [("qwen3-moe", "int8", "float32"), ("gpt-oss", "int4", "bfloat16")],
        [(name, bits, dtype) for name in MODELS for bits in ("int8", "int4") for dtype in ("float32", "bfloat16")],
    ),
)
def test_native_decoder_is_chosen_for_quantised_experts(name: str, weights: str, dtype: str, tmp_path: Path) -> None:
    """The choice includes verification. Experts were packed before, and the decoder shares their weights."""
    path = save_random(MODELS[name](), tmp_path / "model")
    loaded = load_model(path, dtype=dtype, device="cpu", weights=weights)
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert backend.name == "native decoder"
    blocks = [module for module in loaded.model.modules() if are_replaced(module)]
    assert len(blocks) == 2
    assert all(each.is_packed for block in blocks for each in block.modules() if isinstance(each, Linear))
    assert answers(loaded, backend.forward, LENGTH).isfinite().all()
    verify_logits(loaded, SIZE)


@pytest.mark.parametrize("name", list(MODELS))
def test_unknown_gates_are_named(name: str, tmp_path: Path) -> None:
    loaded = load_model(save_random(MODELS[name](), tmp_path / "model"), device="cpu")
    experts: Any = next(module for module in loaded.model.modules() if is_experts(module))
    form = gate_of(experts)
    assert (form.alpha, form.limit, form.up_shift) == (
        (1.702, 7.0, 1.0) if name == "gpt-oss" else (1.0, float("inf"), 0)
    )
    before = experts._apply_gate
    experts._apply_gate = lambda x: before(x).clamp(max=5.0)
    with pytest.raises(FormUnknown, match=r"gate of .*Experts is not one of"):
        form_of(loaded)


def test_experts_of_other_shapes_are_refused(tmp_path: Path) -> None:
    loaded = load_model(save_random(MODELS["qwen3-moe"](), tmp_path / "model"), device="cpu")
    experts: Any = next(module for module in loaded.model.modules() if is_experts(module))
    coded = code(experts, FORMATS["int8"], apart=True)
    with pytest.raises(ModelError, match="gate_up_proj has 3 experts"):
        replace_experts(experts, coded[:3])
