"""Every causal language model of transformers is built, or refused with the reason."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from baton.core.errors import ModelError
from baton.model.backends.backend_selection import NOTICED_SHARE
from baton.model.linear.pack_model import unknown_matrices
from baton.model.linear.replace import unify_forms
from baton.model.loading.model_support import causal_lm_class
from baton.model.loading.skeleton import build_skeleton

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), 96),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
"""Sizes by the names that configurations use."""


def small_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    """Return a configuration with these sizes; None if the class has no defaults or does not take them.

    Sizes that do not fit the others may be left: then the model's code fails, which is what is tested.
    """
    try:
        known: dict[str, Any] = config_class().to_dict()
        return config_class(**{name: value for name, value in SMALL.items() if name in known})
    except Exception:
        return None


@pytest.mark.long
def test_every_architecture_is_built_or_refused() -> None:
    outcomes: dict[str, str] = {}
    unknown: dict[str, float] = {}
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = small_config(config_class)
        if config is None:
            continue
        try:
            model = build_skeleton(causal_lm_class(config), config, torch.float32)
        except ModelError as error:
            outcomes[config.model_type] = "cannot build" if "cannot build" in str(error) else "refused"
        else:
            outcomes[config.model_type] = "built"
            unify_forms(model)
            unknown[config.model_type] = sum(unknown_matrices(model).values())
    assert list(outcomes.values()).count("built") > 60
    assert {"refused", "cannot build"} <= set(outcomes.values())
    assert {outcomes[name] for name in ("llama", "qwen3", "gemma3_text", "olmo3", "granite", "mistral")} == {"built"}
    assert {name for name, share in unknown.items() if share > NOTICED_SHARE} == {"jetmoe", "longcat_flash"}
