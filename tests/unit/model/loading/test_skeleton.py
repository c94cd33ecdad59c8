"""Tests what becomes of weights when codes are not kept, as on a GPU, and of models without a usual form."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AfmoeConfig,
    Dots1Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.flint import FlintConfig

from baton.core.errors import ModelError
from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.experts import ExpertWeights
from baton.model.linear.quantise import quantise
from baton.model.linear.replace import replace_linears
from baton.model.linear.weights import FloatWeight, Weight
from baton.model.loading import skeleton
from baton.model.loading.checkpoint_weights import LoadOptions, open_by_module
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_support import causal_lm_class
from baton.model.loading.skeleton import WeightPolicy, assign_weights, build_skeleton
from tests.model_families import save_random
from tests.unit.model.conftest import TINY
from tests.unit.model.loading.gguf_models import random_state
from tests.unit.model.loading.quantised_models import distance, logits, tokens


class CodedSource:
    """Gives random weights, those of linear layers in 8 bits, one with its columns in another order."""

    description = "codes"
    may_have_more = False

    def __init__(self, config: PreTrainedConfig, *, embedding: bool = False) -> None:
        self.state = random_state(config)
        self._kinds = ("proj", "lm_head", *(("embed_tokens",) if embedding else ()))

    def weight(self, module: str) -> Weight | None:
        values = self.state.get(f"{module}.weight")
        if values is None:
            return None
        if not module.endswith(self._kinds):
            return FloatWeight(values)
        coded = quantise(values, 8, 16)
        self.state[f"{module}.weight"] = coded.dequantized()
        if not module.endswith(("0.mlp.down_proj", "0.self_attn.q_proj")):
            return coded
        order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(3))
        ordered = replace(quantise(values[:, order], 8, 16), input_order=order.int())
        self.state[f"{module}.weight"] = ordered.dequantized()
        return ordered

    def packed_bytes(self) -> int:
        return sum(values.numel() for values in self.state.values())

    def is_coded(self, module: str) -> bool:
        return module.endswith(self._kinds)

    def experts(self, module: str, num_experts: int) -> Sequence[ExpertWeights[Weight]] | None:
        """Return codes of the block's experts; `state` then has what they stand for."""
        coded = []
        for name in ("gate_up_proj", "down_proj"):
            values = self.state[f"{module}.{name}"]
            is_transposed = f"{module}.{name}_bias" in self.state
            matrices = values.transpose(1, 2) if is_transposed else values
            coded.append([quantise(matrix.contiguous(), 8, 16) for matrix in matrices])
            meant = torch.stack([weight.dequantized() for weight in coded[-1]])
            self.state[f"{module}.{name}"] = meant.transpose(1, 2) if is_transposed else meant
        return [ExpertWeights([first], second) for first, second in zip(*coded, strict=True)]

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.state.get(name)

    def rope_factors(self) -> torch.Tensor | None:
        return None

    def unused(self) -> list[str]:
        return []


def build(config: PreTrainedConfig, source: CodedSource, *, keeps_codes: bool) -> PreTrainedModel:
    model = build_skeleton(causal_lm_class(config), config, torch.float32)
    policy = WeightPolicy(dtype=torch.float32, device=torch.device("cpu"), keeps_codes=keeps_codes)
    assign_weights(model, source, policy)
    return model


@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        Qwen2Config(**TINY),
        Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
        Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    ],
    ids=["plain", "biases", "tied", "scaled embedding"],
)
def test_logits_are_those_of_the_dequantised_weights(config: PreTrainedConfig, keeps_codes: bool) -> None:
    source = CodedSource(config, embedding=True)
    model = build(config, source, keeps_codes=keeps_codes)
    reference = causal_lm_class(config)(config).eval()
    reference.load_state_dict(source.state, strict=False)
    reference.tie_weights()
    assert distance(logits(model, tokens(config)), logits(reference, tokens(config))) < 1e-5
    is_plain = [type(module) is nn.Linear for module in model.modules() if "Linear" in type(module).__name__]
    assert all(is_plain) != keeps_codes
    assert isinstance(model.base_model.embed_tokens, WeightEmbedding) == keeps_codes


@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize("transposed", [False, True], ids=["qwen3 moe", "gpt-oss"])
def test_experts_are_coded_or_joined(transposed: bool, keeps_codes: bool) -> None:
    """Without codes the model's own parameters hold them, so that its own kernels run."""
    config = FAMILIES["gpt-oss" if transposed else "qwen3 moe"]()
    source = CodedSource(config)
    model = build(config, source, keeps_codes=keeps_codes)
    reference = causal_lm_class(config)(config).eval()
    reference.load_state_dict(source.state)
    for each in (model, reference):
        each.set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (each(input_ids=tokens(config), use_cache=False).logits for each in (model, reference))
    assert distance(found, expected) < 1e-5
    joined = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    assert len(joined) == (0 if keeps_codes else 4)


def test_skeleton_takes_no_memory_for_parameters() -> None:
    model = build_skeleton(causal_lm_class(LlamaConfig(**TINY)), LlamaConfig(**TINY), torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    expected = causal_lm_class(LlamaConfig(**TINY))(LlamaConfig(**TINY)).base_model.rotary_emb.inv_freq
    assert torch.equal(model.base_model.rotary_emb.inv_freq, expected)


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen3 moe": lambda: Qwen3MoeConfig(**TINY, **MOE, head_dim=16, num_experts=3),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=8),
    "ministral 3": lambda: Ministral3Config(
        **TINY,
        head_dim=16,
        rope_parameters=ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    ),
    "phi 3": lambda: Phi3Config(**TINY, pad_token_id=0, rope_parameters=dict(ROPE)),
    "olmo 2": lambda: Olmo2Config(**TINY),
    "olmo 3": lambda: Olmo3Config(**TINY, sliding_window=8),
    "granite": lambda: GraniteConfig(**TINY, attention_multiplier=0.2, logits_scaling=2.0),
    "smollm 3": lambda: SmolLM3Config(**TINY, pad_token_id=0),
    "gpt-oss": lambda: GptOssConfig(**TINY, head_dim=16, num_local_experts=3, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_loaded_as_transformers_loads_it(name: str, save: Callable[[PreTrainedConfig], Path]) -> None:
    """The names of a checkpoint are translated, computed buffers are right, and no weight is left out."""
    path = save(FAMILIES[name]())
    plain = load_model(path, device="cpu").model
    config, options = plain.config, LoadOptions(dtype=torch.float32, device=torch.device("cpu"), weights="auto")
    with open_by_module(path, type(plain), config, options) as pending:
        model, _ = pending.load()
    for each in (plain, model):
        each.set_attn_implementation("eager")
    with torch.no_grad():
        expected, found = (each(input_ids=tokens(config), use_cache=False).logits for each in (plain, model))
    assert distance(found, expected) < 1e-5
    coded = load_model(path, device="cpu", weights="int8").model
    assert not [each for each, module in coded.named_modules() if type(module) is nn.Linear]
    assert not [each for each, parameter in coded.named_parameters() if parameter.dim() == 3]
    coded.set_attn_implementation("eager")
    with torch.no_grad():
        found = coded(input_ids=tokens(config), use_cache=False).logits
    assert 1e-5 < distance(found, expected) < 0.5


MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "float32 scores": lambda: Dots1Config(
        **TINY, **MOE, head_dim=16, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=0
    ),
    "float32 sinks": lambda: FlintConfig(**TINY, **MOE, head_dim=16, num_experts=4),
    "router in a module": lambda: AfmoeConfig(
        **TINY, **MOE, head_dim=16, num_experts=4, num_shared_experts=1, num_dense_layers=0
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_not_coded_has_the_dtype_and_values_that_transformers_gives_it(
    name: str, save: Callable[[PreTrainedConfig], Path]
) -> None:
    path = save_random(MIXTURES[name](), save(LlamaConfig(**TINY)).parent / "mixture")
    plain, coded = (load_model(path, dtype="bfloat16", device="cpu", weights=each).model for each in ("auto", "int4"))
    own = dict([*coded.named_parameters(), *coded.named_buffers()])
    tensors = [*plain.named_parameters(), *plain.named_buffers()]
    missing = {key.rpartition(".")[0].rpartition(".")[2] for key, _ in tensors if key not in own}
    assert missing <= {"lm_head", "experts", *(f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down"))}
    kept = [(key, value) for key, value in tensors if key in own]
    assert {(key, value.dtype) for key, value in kept} == {(key, own[key].dtype) for key, _ in kept}
    assert all(torch.equal(value, own[key]) for key, value in kept)


def test_missing_and_misshapen_weights_are_refused_by_name() -> None:
    config = LlamaConfig(**TINY)
    source = CodedSource(config)
    del source.state["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks 1 weights of LlamaForCausalLM.*layers\.1\.self_attn\.o_proj"):
        build(config, source, keeps_codes=True)
    source = CodedSource(config)
    source.state["model.norm.weight"] = torch.ones(7)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \(7,\)"):
        build(config, source, keeps_codes=True)


def test_only_linear_layers_of_the_same_shape_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8))
    weight = FloatWeight(torch.randn(8, 32))
    with pytest.raises(ModelError, match="is a LayerNorm"):
        replace_linears(model, {"1": weight})
    with pytest.raises(ModelError, match="8 x 16 in the checkpoint"):
        replace_linears(model, {"0": FloatWeight(torch.randn(8, 16))})
    x, bias = torch.randn(3, 32), model[0].bias
    replace_linears(model, {"0": weight})
    assert torch.allclose(model[0](x), x @ weight.values.T + bias, atol=1e-5)


@pytest.mark.parametrize(("bits", "error"), [(8, 1 / 127), (4, 1 / 7)])
def test_quantised_values_are_within_a_step(bits: int, error: float) -> None:
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    values[3, :32] = 0
    found = quantise(values, bits, 32).dequantized()
    largest = values.view(16, 2, 32).abs().amax(2, keepdim=True)
    assert bool(((found - values).view(16, 2, 32).abs() <= error * largest + 1e-3 * largest).all())
    assert torch.equal(found[3, :32], torch.zeros(32))


def test_plain_weights_are_coded_without_a_float32_copy() -> None:
    """A copy of the output layer of Gemma 3 12B would take 4 GiB."""
    taken = []

    def coder(name: str, values: torch.Tensor) -> Weight:
        taken.append((name, values.dtype))
        return quantise(values, 8, 16)

    policy = WeightPolicy(dtype=torch.float32, device=torch.device("cpu"), keeps_codes=True, coder=coder)
    weight = FloatWeight(torch.randn(4, 32).bfloat16())
    coded = policy.coded("a", weight)
    assert taken == [("a", torch.bfloat16)]
    assert torch.equal(coded.dequantized(), quantise(weight.values.float(), 8, 16).dequantized())
    assert policy.coded("b", coded) is coded
    assert len(taken) == 1


def test_weights_are_dequantised_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the host holds no float32 copy of a whole weight."""
    values = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    policy = WeightPolicy(dtype=torch.bfloat16, device=torch.device("cpu"), keeps_codes=False)
    for weight in (FloatWeight(values.to(torch.float8_e4m3fn), scales, (128, 128)), quantise(values, 4, 32)):
        expected = weight.dequantized().to(torch.bfloat16)
        sizes: list[int] = []
        monkeypatch.setattr(skeleton, "DEQUANTISED_BYTES", 70 * 256 * 20)
        monkeypatch.setattr(type(weight), "dequantized", counted(type(weight).dequantized, sizes))
        assert torch.equal(skeleton._plain_values(weight, policy), expected)
        assert sizes == [70, 70, 70, 70, 20]


def counted(dequantized: Callable[[Any], torch.Tensor], sizes: list[int]) -> Callable[[Any], torch.Tensor]:
    def count(weight: Any) -> torch.Tensor:
        sizes.append(weight.shape[0])
        return dequantized(weight)

    return count


def test_a_gpu_takes_all_weights_in_its_dtype_and_the_host_only_the_largest(
    save: Callable[[PreTrainedConfig], Path],
) -> None:
    config = LlamaConfig(**TINY)
    plain = load_model(save(config), device="cpu").model
    options = LoadOptions(dtype=torch.bfloat16, device=torch.device("cuda"), weights="auto")
    with open_by_module(save(config), type(plain), config, options) as pending:
        assert pending.num_bytes() == 2 * sum(each.numel() for each in plain.parameters())
        largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
        assert pending.host_bytes() == 4 * largest + skeleton.DEQUANTISED_BYTES
