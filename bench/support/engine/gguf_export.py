"""Writes a checkpoint of plain weights as a GGUF file in bfloat16, so that llama.cpp runs the same weights.

Names of tensors come from the architectures that Baton reads (`baton.model.loading.gguf`), in the other
direction. The vocabulary is made up: benchmarks send token ids, and a server streams a token only if its text
is complete UTF-8, which the texts of real tokens often are not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors import safe_open
from transformers import AutoConfig

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_architectures import ARCHITECTURES, GgufArchitecture

NORMAL = 1
"""Type of a token that is text."""
_TOP = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def _no_values(writer: GGUFWriter, config: Any) -> None:
    """Write nothing: the common values describe the whole model."""


def _gemma3_values(writer: GGUFWriter, config: Any) -> None:
    """Write the windows. Readers assume that every sixth layer sees all tokens; some read nothing else."""
    is_local = [kind == "sliding_attention" for kind in config.layer_types]
    if is_local != [(layer + 1) % 6 != 0 for layer in range(len(is_local))]:
        writer.add_array("gemma3.attention.sliding_window_pattern", is_local)
    writer.add_sliding_window(config.sliding_window)
    writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])


@dataclass(frozen=True, slots=True)
class GgufExport:
    """Architecture of a model type. `values`: adds what it has beside the common values."""

    architecture: str
    values: Callable[[GGUFWriter, Any], None] = _no_values


EXPORTS: Mapping[str, GgufExport] = {
    "llama": GgufExport("llama"),
    "qwen2": GgufExport("qwen2"),
    "qwen3": GgufExport("qwen3"),
    "gemma3_text": GgufExport("gemma3", _gemma3_values),
}
"""Exports by `model_type`. Models with scaled rotary embeddings are refused."""


def export_gguf(model: Path, file: Path) -> Path:
    """Write the model in directory `model` to `file`, unless it exists. Returns `file`.

    Raises ModelError if its type cannot be written.
    """
    if file.exists():
        return file
    config = AutoConfig.from_pretrained(model)
    export = EXPORTS.get(config.model_type)
    if export is None:
        raise ModelError(
            f"{model} is of type {config.model_type}; must be one of {', '.join(sorted(EXPORTS))}. "
            "Convert it with llama.cpp's convert_hf_to_gguf.py, and give the file to --model"
        )
    if (scaled := rope_of(config).get("rope_type", "default")) != "default":
        raise ModelError(f"{model} scales its rotary embedding ({scaled}); convert it with llama.cpp's own converter")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    writer = GGUFWriter(unfinished, export.architecture)
    add_values(writer, config)
    export.values(writer, config)
    add_vocabulary(writer, config.vocab_size)
    architecture = ARCHITECTURES[export.architecture]
    for name, values in tensors_of(model):
        own = tensor_name(architecture, name)
        if own == "output.weight" and config.tie_word_embeddings:
            continue
        stored, kind = stored_values(architecture, config, name, values)
        writer.add_tensor(own, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(file)
    return file


def rope_of(config: Any) -> dict[str, Any]:
    """Return the rotary parameters of the layers that see all tokens."""
    rope = config.rope_parameters
    found: dict[str, Any] = rope.get("full_attention", rope)
    return found


def add_values(writer: GGUFWriter, config: Any) -> None:
    """Add what all architectures have: sizes, the rotary base, and the constant in norms."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope_of(config)["rope_theta"])


def add_vocabulary(writer: GGUFWriter, vocab_size: int) -> None:
    """Add a vocabulary of short ASCII texts, one of which ends a response. Benchmarks ignore the end."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "0", *(f"t{number}" for number in (0, *range(3, vocab_size)))])
    writer.add_token_types([NORMAL] * vocab_size)
    writer.add_token_merges(["t 0"])  # readers require a list that is not empty
    writer.add_eos_token_id(0)


def tensors_of(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint, file by file."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def tensor_name(architecture: GgufArchitecture, name: str) -> str:
    """Return the name in the file, such as `blk.0.attn_q.weight`. Raises ModelError if there is none."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    own = {module: tensor for tensor, module in architecture.layer_names.items()}
    parts = stem.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["model", "layers"] and parts[3] in own:
        return f"blk.{parts[2]}.{own[parts[3]]}.{suffix}"
    raise ModelError(f"{name} has no name in a GGUF file of {architecture.model_type}")


def stored_values(
    architecture: GgufArchitecture, config: Any, name: str, values: torch.Tensor
) -> tuple[Any, GGMLQuantizationType]:
    """Return a tensor as the file has it: matrices in bfloat16, all else in float32, as converters do."""
    if architecture.permutes_rotary and (heads := _rotary_heads(config, name)) is not None:
        values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if values.dim() > 1:
        raw = values.bfloat16().contiguous().view(torch.int16)
        return raw.numpy(), GGMLQuantizationType.BF16
    floats = values.float()
    if name.endswith("norm.weight"):
        floats = floats + architecture.norm_offset
    return floats.numpy(), GGMLQuantizationType.F32


def _rotary_heads(config: Any, name: str) -> int | None:
    if "self_attn.q_proj" in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if "self_attn.k_proj" in name else None
