"""Makes a configuration with few layers, which runs the kernels of the whole model in the same shapes."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

MAX_VOCABULARY = 4096
"""Tokens of the reduced vocabulary. No kernel of a layer depends on it."""
MAX_EXPERTS = 32
MIN_LAYERS = 2
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index")
"""Numbers of dense layers before the first one with experts."""
_DROPPED = ("quantization_config", "transformers_version", "torch_dtype", "architectures")


def reduced_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same kind with as few layers as show every kind of layer.

    Heads, hidden sizes, windows and rotary embeddings are unchanged. Raises ValueError or TypeError if the
    class of `config` does not take the reduced values.
    """
    content = {name: value for name, value in config.to_dict().items() if name not in _DROPPED}
    whole = int(content["num_hidden_layers"])
    layers = min(whole, max(MIN_LAYERS, _layers_of_all_kinds(content, whole), _layers_before_experts(content) + 1))
    for name, value in content.items():
        if isinstance(value, list) and len(value) == whole:
            content[name] = value[:layers]
    content["num_hidden_layers"] = layers
    content["vocab_size"] = min(int(content["vocab_size"]), MAX_VOCABULARY)
    for name in _NUM_EXPERTS:
        if isinstance(content.get(name), int):
            content[name] = min(content[name], max(MAX_EXPERTS, 2 * int(content.get("num_experts_per_tok") or 1)))
    made = type(config).from_dict(content)
    made.dtype = config.dtype
    return made


def _layers_of_all_kinds(content: Mapping[str, Any], whole: int) -> int:
    """Return the length of the shortest beginning that has every value of each list with a value a layer."""
    longest = 0
    for value in content.values():
        if isinstance(value, list) and len(value) == whole:
            texts = [repr(each) for each in value]
            longest = max(longest, *(texts.index(kind) + 1 for kind in set(texts)))
    return longest


def _layers_before_experts(content: Mapping[str, Any]) -> int:
    return max((content[name] for name in _FIRST_DENSE if isinstance(content.get(name), int)), default=0)
