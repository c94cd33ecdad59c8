"""Tests the form that is found of a model: what its configuration says, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    Dots1Config,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Starcoder2Config,
)

from baton.model.forms.decoder_form import ExpertsForm, FormUnknown
from baton.model.linear.linear import Linear
from baton.model.linear.quantise import quantise
from baton.model.loading.model_loader import load_model
from tests.model_families import ENDS, FAMILIES, TINY, save_random
from tests.unit.model.test_decoder_backends import form_of

UNKNOWN: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "layer norms": (lambda: Starcoder2Config(**TINY), "LayerNorm"),
    "a parallel MLP": (lambda: CohereConfig(**TINY, **ENDS), "CohereLayerNorm"),
    "interleaved rotary": (lambda: Glm4Config(**TINY, **ENDS, head_dim=16), "queries or keys in another way"),
    "another activation": (lambda: LlamaConfig(**TINY, hidden_act="relu"), r"activation \(ReLU"),
    "shared experts": (
        lambda: Qwen2MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1),
        "other weights beside its experts",
    ),
}


class Quantized(nn.Linear):
    """A linear layer of another type."""


def _add_gate(base: Any) -> None:
    attention = base.layers[1].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: inputs[0] * 2)


def _set_kind(base: Any) -> None:
    base.layers[1].mlp.down_proj.__class__ = Quantized


def _add_to_embedding(base: Any) -> None:
    base.layers[0].register_forward_pre_hook(lambda module, inputs: inputs[0] * 1.5)


def _double_mlp(base: Any) -> None:
    mlp = base.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 2 * before(x)


def _add_parameter(base: Any) -> None:
    base.layers[1].self_attn.temperature = nn.Parameter(torch.ones(1), requires_grad=False)


def _add_coded_product(base: Any) -> None:
    """It has no parameters."""
    base.layers[1].mlp.adapter = Linear(quantise(torch.randn(64, 64), 8, 32))


def _set_frequencies(base: Any) -> None:
    rotary = base.rotary_emb
    before = rotary.forward
    rotary.forward = lambda x, position_ids: before(x, position_ids // 2)


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_unknown_forms_are_named(name: str, save: Callable[[PreTrainedConfig], Path]) -> None:
    config, named = UNKNOWN[name]
    with pytest.raises(FormUnknown, match=named):
        form_of(load_model(save(config()), device="cpu"))


def test_shared_experts_are_found_if_their_weights_are_coded(save: Callable[[PreTrainedConfig], Path]) -> None:
    mixture = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Dots1Config(**TINY, **mixture, head_dim=16, first_k_dense_replace=0)
    with pytest.raises(FormUnknown, match="other weights beside its experts"):
        form_of(load_model(save(config), device="cpu", weights="int8"))


@pytest.mark.parametrize(
    "change",
    [_add_gate, _set_kind, _add_to_embedding, _double_mlp, _add_parameter, _add_coded_product, _set_frequencies],
    ids=lambda f: f.__name__[1:],
)
def test_changed_module_has_no_known_form(
    change: Callable[[Any], None], save: Callable[[PreTrainedConfig], Path]
) -> None:
    loaded = load_model(save(Qwen3Config(**TINY, head_dim=32)), device="cpu")
    form_of(loaded)
    change(loaded.model.base_model)
    with pytest.raises(FormUnknown):
        form_of(loaded)


@pytest.mark.parametrize("cap", [20.0, None])
def test_a_soft_cap_is_found_however_small_the_logits_are(
    cap: float | None, save: Callable[[PreTrainedConfig], Path]
) -> None:
    """In bfloat16 it changes these logits less than rounding does, and those of a trained model much."""
    config = Gemma3TextConfig(**TINY | {"initializer_range": 0.02}, **ENDS, head_dim=32, final_logit_softcapping=cap)
    assert form_of(load_model(save(config), dtype="bfloat16", device="cpu")).softcap == cap


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe, not normalised"])
def test_normalisation_of_experts_is_found_if_one_of_them_has_all_weight(name: str, tmp_path: Path) -> None:
    """The weights of the chosen experts then sum to almost one without it."""
    loaded = load_model(save_random(FAMILIES[name].config(), tmp_path / "model"), dtype="bfloat16", device="cpu")
    base: Any = loaded.model.base_model
    base.layers[0].mlp.gate.weight.mul_(20.0)
    mlp = form_of(loaded).layers[0].mlp
    assert isinstance(mlp, ExpertsForm)
    assert mlp.normalised is ("not" not in name)
