"""Writes GGUF files of random models, with llama.cpp's own library, as its converters do."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from baton.model.loading.gguf.gguf_types import FLOAT_TYPES, block_shape, type_name
from baton.model.loading.model_source import DEMO_DIR

Pick = Callable[[str], int]
"""Returns the number of the tensor type of a matrix, from its name in the file."""
NO_OPTIONS: Mapping[str, Any] = {}
PERMUTED = ("llama", "granite", "smollm3", "mistral3")
"""Architectures whose rows of queries and keys llama.cpp puts into pairs."""


def random_blocks(type_id: int, rows: int, columns: int, seed: int, scale: float = 0.02) -> np.ndarray:
    """Return rows of random blocks of a tensor type, whose factors keep values about as large as `scale`."""
    num_values, num_bytes = block_shape(type_id) or (0, 0)
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * columns // num_values, num_bytes), dtype=np.uint8)
    sizes = {"Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q8_0": 64, "IQ4_NL": 64}
    size = sizes.get(type_name(type_id), 400)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
    halves |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
    for begin in halves.get(type_name(type_id), (0,)):
        factors = (rng.uniform(0.5, 1.5, len(raw)) * scale / size).astype(np.float16)
        raw[:, begin : begin + 2] = factors.view(np.uint8).reshape(-1, 2)
    if type_name(type_id) == "MXFP4":
        raw[:, 0] = 121
    return raw.reshape(rows, -1)


def random_state(config: PreTrainedConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random float32 weights of a model's parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tied = set(model.all_tied_weights_keys)
    return {
        name: torch.randn(tuple(value.shape), generator=generator) * (0.1 if value.dim() > 1 else 0.2)
        for name, value in model.state_dict().items()
        if name not in tied
    }


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of queries or keys as llama.cpp stores them: the two of a rotary pair side by side."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def demo_tokenizer_metadata(writer: Any, *, model: str = "gpt2", pre: str = "qwen2") -> None:
    """Add the vocabulary of the demo's tokenizer, as a converter does."""
    description = json.loads((DEMO_DIR / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    added = {token["content"]: token for token in description["added_tokens"]}
    names = {number: text for text, number in vocabulary.items()} | {token["id"]: text for text, token in added.items()}
    texts = [names[number] for number in range(max(names) + 1)]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types([3 if added.get(text, {}).get("special") else 4 if text in added else 1 for text in texts])
    merges = [each if isinstance(each, str) else " ".join(each) for each in description["model"]["merges"]]
    writer.add_token_merges(merges)


def write_gguf(
    path: Path,
    architecture: str,
    config: Any,
    state: Mapping[str, torch.Tensor],
    *,
    pick: Pick = lambda name: 0,
    extra: Callable[[Any], None] = lambda writer: None,
    tokenizer: Callable[[Any], None] = demo_tokenizer_metadata,
    writer_options: Mapping[str, Any] = NO_OPTIONS,
    separate_experts: bool = False,
) -> dict[str, torch.Tensor]:
    """Write a model of an architecture of llama.cpp. Returns the weights that the file stands for, by name.

    Matrices of a quantised type get random blocks instead of `state`; the result has what they dequantise to.
    writer_options: of `GGUFWriter`, such as `split_max_tensors`, which makes it write several parts.
    separate_experts: write a tensor for each expert, as converters did before April 2024.
    """
    import gguf

    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture, **writer_options)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(20_000.0)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    tokenizer(writer)
    extra(writer)

    def add(own: str, data: np.ndarray, type_id: int) -> None:
        kind = gguf.GGMLQuantizationType(type_id)
        if "_exps." not in own or not separate_experts:
            writer.add_tensor(own, data, raw_dtype=kind)
            return
        for number, part in enumerate(data):
            writer.add_tensor(own.replace("_exps.", f".{number}."), part, raw_dtype=kind)

    effective = {}
    layout = GPT_OSS if architecture == "gpt-oss" else BY_EXPERT
    for seed, (name, value) in enumerate(layout.stored(state).items()):
        stem, _, suffix = name.rpartition(".")
        own = f"{names.get_name(stem)}.{suffix}"
        assert names.get_name(stem), name
        type_id = pick(own) if value.dim() > 1 and suffix == "weight" else 0
        stored = value
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            stored = interleaved(value, heads)
        if type_id in FLOAT_TYPES:
            if architecture == "gemma3" and name.endswith("norm.weight"):
                stored = stored + 1
            kind = FLOAT_TYPES[type_id]
            stored = stored.to(kind)
            add(own, stored.view(torch.int16).numpy() if type_id == 30 else stored.numpy(), type_id)
            effective[name] = value.to(kind).float()
            continue
        rows, columns = stored.shape[:-1].numel(), stored.shape[-1]
        raw = random_blocks(type_id, rows, columns, seed)
        data = raw.reshape(*stored.shape[:-1], -1)
        add(own, data, type_id)
        values = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(type_id)))
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            order = interleaved(torch.arange(rows), heads)
            back = torch.empty_like(values)
            back[order] = values
            values = back
        effective[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return layout.model(effective)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


Tensors = Mapping[str, torch.Tensor]


def _stored_tensors(state: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of a checkpoint, with gate and up of experts apart."""
    out = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            out[name.replace("gate_up_proj", "gate_proj.weight")] = gate.contiguous()
            out[name.replace("gate_up_proj", "up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            out[name + ".weight"] = value
        else:
            out[name] = value
    return out


def _model_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Undo `_stored_tensors`."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat((value, up), dim=1)
        elif name.endswith("experts.down_proj.weight"):
            out[name.removesuffix(".weight")] = value
        elif not name.endswith("experts.up_proj.weight"):
            out[name] = value
    return out


def _stored_gpt_oss(state: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of gpt-oss: its experts are transposed, with the outputs of gate and up in turns."""
    out = {}
    for name, value in state.items():
        part = name.rpartition(".")[2]
        suffix = "bias" if part.endswith("_bias") else "weight"
        rows = value.transpose(1, 2) if part in ("gate_up_proj", "down_proj") else value
        if part.startswith("gate_up_proj"):
            stem = name.removesuffix(part)
            out[f"{stem}gate_proj.{suffix}"] = rows[:, ::2].contiguous()
            out[f"{stem}up_proj.{suffix}"] = rows[:, 1::2].contiguous()
        elif part.startswith("down_proj"):
            out[f"{name.removesuffix('_bias')}.{suffix}"] = rows.contiguous()
        else:
            out[f"{name}.weight" if part == "sinks" else name] = value
    return out


def _model_gpt_oss(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Undo `_stored_gpt_oss`."""
    out = {}
    for name, value in tensors.items():
        stem, _, suffix = name.rpartition(".")
        own = stem + ("_bias" if suffix == "bias" else "")
        if stem.endswith("experts.gate_proj"):
            joined = torch.stack((value, tensors[name.replace("gate_proj", "up_proj")]), dim=2).flatten(1, 2)
            out[own.replace("gate_proj", "gate_up_proj")] = joined if suffix == "bias" else joined.transpose(1, 2)
        elif stem.endswith("experts.down_proj"):
            out[own] = value if suffix == "bias" else value.transpose(1, 2)
        elif not stem.endswith("experts.up_proj"):
            out[stem if stem.endswith("sinks") else name] = value
    return out


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Turns the tensors of a model into those of a checkpoint by expert, and back."""

    stored: Callable[[Tensors], dict[str, torch.Tensor]]
    model: Callable[[Tensors], dict[str, torch.Tensor]]


BY_EXPERT = TensorLayout(_stored_tensors, _model_tensors)
GPT_OSS = TensorLayout(_stored_gpt_oss, _model_gpt_oss)
