"""Describes the architectures of GGUF files: their transformers configuration and the names of their tensors.

Sources: llama.cpp's converters (conversion/*.py), its graphs (src/models/*.cpp), and transformers'
configurations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_metadata import GgufMetadata

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of the rotary frequencies, float32 [head_dim / 2]: how a file has Llama 3's scaling."""
EXPERTS = "mlp.experts"
SINKS = "self_attn.sinks"
"""A parameter of gpt-oss's attention. In a file its name ends in `.weight`, as that of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """Names and values of the files of one architecture.

    model_type: of transformers. layer_names: modules of a layer by the name of the tensor. permutes_rotary:
    rows of query and key are in the order of adjacent pairs, and must be put back into two halves.
    norm_offset: what the file adds to the weights of norms. config: more values of the configuration.
    """

    model_type: str
    layer_names: Mapping[str, str]
    permutes_rotary: bool = False
    norm_offset: float = 0.0
    config: Callable[[GgufMetadata, dict[str, Any]], dict[str, Any]] = field(default=lambda metadata, common: {})


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"{EXPERTS}.gate_proj",
    "ffn_up_exps": f"{EXPERTS}.up_proj",
    "ffn_down_exps": f"{EXPERTS}.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LLAMA = {**_ATTENTION, **_MLP, **_NORMS}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def _llama_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    """Return what Mixtral has beside Llama and Mistral 7B. All of them are the architecture llama."""
    if not metadata.optional_integer("expert_count"):
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _qwen3moe_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always normalises
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


GEMMA3_27B_LAYERS = 62
"""The one size whose queries are scaled by hidden size / heads, as llama.cpp decides it."""


def _gemma3_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    rope = common["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": metadata.optional_number("rope.freq_base_swa") or 10_000.0}
    is_27b = common["num_hidden_layers"] == GEMMA3_27B_LAYERS
    scalar = common["hidden_size"] // common["num_attention_heads"] if is_27b else common["head_dim"]
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "layer_types": _layer_types(metadata, common, default_period=6),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.optional_number("final_logit_softcapping"),
        "attn_logit_softcapping": metadata.optional_number("attn_logit_softcapping"),
    }


def _layer_types(metadata: GgufMetadata, common: dict[str, Any], default_period: int) -> list[str]:
    """Return the kind of each layer. A file has a flag for each, or a period, or neither."""
    number = common["num_hidden_layers"]
    flags = metadata.optional_values("attention.sliding_window_pattern")
    if flags is None:
        period = metadata.optional_integer("attention.sliding_window_pattern") or default_period
        flags = [(layer + 1) % period != 0 for layer in range(number)]
    if len(flags) != number:
        raise metadata.problem("attention.sliding_window_pattern", flags, f"{number} flags")
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _olmo2_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    """Return what OLMo 3 has beside OLMo 2: windows, in whose layers the rotary embedding is not scaled."""
    window = metadata.optional_integer("attention.sliding_window")
    if window is None:
        return {}
    rope = common["rope_parameters"]
    local_theta = metadata.optional_number("rope.freq_base_swa") or rope["rope_theta"]
    local = {"rope_type": "default", "rope_theta": local_theta}
    return {
        "model_type": "olmo3",
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "sliding_window": window,
        "layer_types": _layer_types(metadata, common, default_period=4),
    }


def _phi3_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": metadata.optional_integer("attention.sliding_window") or None,
        "original_max_position_embeddings": metadata.optional_integer("rope.scaling.original_context_length")
        or common["max_position_embeddings"],
    }


def _mistral3_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    """Return what Ministral 3 has beside Mistral: YaRN, and queries that grow with the position.

    Without them it is Mistral Small 3. Neither has a window, which transformers' Mistral has by default.
    """
    beta = metadata.optional_number("attention.temperature_scale")
    if beta is None:
        return {"sliding_window": None}
    more = {"mscale": 1.0, "mscale_all_dim": metadata.optional_number("rope.scaling.yarn_log_multiplier") or 0.0}
    return {
        "model_type": "ministral3",
        "rope_parameters": {**common["rope_parameters"], **more, "llama_4_scaling_beta": beta},
        "sliding_window": None,
    }


def _granite_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    if not metadata.flag("granite.rope.scaling.finetuned", True):  # how llama.cpp marks it
        raise ModelError(f"{metadata.path}: Granite without a rotary embedding is not supported")
    return {
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.optional_number("embedding_scale") or 1.0,
        "residual_multiplier": metadata.optional_number("residual_scale") or 1.0,
        "logits_scaling": metadata.optional_number("logit_scale") or 1.0,
    }


def _gpt_oss_config(metadata: GgufMetadata, common: dict[str, Any]) -> dict[str, Any]:
    """Return the values of gpt-oss. Its gate's limit and factor are those of every file, and not in it.

    The checkpoints do not round the range in which YaRN interpolates; llama.cpp does.
    """
    rope = common["rope_parameters"]
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        "layer_types": _layer_types(metadata, common, default_period=2),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_type="llama", layer_names={**_LLAMA, **_EXPERTS}, permutes_rotary=True, config=_llama_config
    ),
    "qwen2": GgufArchitecture(model_type="qwen2", layer_names=_LLAMA),
    "qwen3": GgufArchitecture(model_type="qwen3", layer_names={**_LLAMA, **_HEAD_NORMS}),
    "qwen3moe": GgufArchitecture(
        model_type="qwen3_moe",
        layer_names={**_ATTENTION, **_NORMS, **_HEAD_NORMS, **_EXPERTS},
        config=_qwen3moe_config,
    ),
    "gemma3": GgufArchitecture(
        model_type="gemma3_text",
        layer_names={**_ATTENTION, **_MLP, **_HEAD_NORMS, **_GEMMA_NORMS},
        norm_offset=1.0,
        config=_gemma3_config,
    ),
    "gpt-oss": GgufArchitecture(
        model_type="gpt_oss",
        layer_names={
            **_ATTENTION,
            **_EXPERTS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": SINKS,
            "ffn_gate_inp": "mlp.router",
        },
        config=_gpt_oss_config,
    ),
    "phi3": GgufArchitecture(
        model_type="phi3",
        layer_names={
            **_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        config=_phi3_config,
    ),
    "olmo2": GgufArchitecture(
        model_type="olmo2",
        layer_names={**_ATTENTION, **_MLP, **_HEAD_NORMS, **_POST_NORMS},
        config=_olmo2_config,
    ),
    "granite": GgufArchitecture(model_type="granite", layer_names=_LLAMA, permutes_rotary=True, config=_granite_config),
    "mistral3": GgufArchitecture(
        model_type="mistral", layer_names=_LLAMA, permutes_rotary=True, config=_mistral3_config
    ),
    "smollm3": GgufArchitecture(model_type="smollm3", layer_names=_LLAMA, permutes_rotary=True),
}
"""Architectures by the name in `general.architecture`."""


def architecture_of(metadata: GgufMetadata) -> GgufArchitecture:
    """Return the description of a file's architecture. Raises ModelError if it is not supported."""
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise ModelError(
            f"{metadata.path} has the architecture {metadata.architecture!r}; must be one of "
            f"{', '.join(sorted(ARCHITECTURES))}. Give the model's Hugging Face checkpoint instead"
        )
    return found


def module_name(architecture: GgufArchitecture, tensor_name: str) -> str | None:
    """Return the model's name for a tensor, such as `model.layers.0.mlp.up_proj.weight`; None if unknown.

    Files of before April 2024 have a tensor for each expert, such as `blk.0.ffn_up.7.weight`. Its name in the
    model ends in `mlp.experts.up_proj.7.weight`.
    """
    stem, _, suffix = tensor_name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    top = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}.get(stem)
    if top is not None:
        return f"{top}.{suffix}"
    parts = stem.split(".")
    if len(parts) not in (3, 4) or parts[0] != "blk" or not all(map(str.isdecimal, parts[1::2])):
        return None
    kind, expert = (f"{parts[2]}_exps", f".{int(parts[3])}") if len(parts) == 4 else (parts[2], "")
    module = architecture.layer_names.get(kind)
    if module is None:
        return None
    return f"model.layers.{int(parts[1])}.{module}{expert}" + ("" if module == SINKS else f".{suffix}")
