"""Writes a model directory as fine-grained FP8, the published form of many checkpoints for GPUs."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BLOCK = 128
"""Rows and columns that share a scale."""
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""


def write_fp8(plain: Path, out: Path) -> Path:
    """Write the model of directory `plain` with FP8 weights in its layers to `out`, once. Return `out`.

    Embedding, output layer and norms stay as they are.
    """
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for file in plain.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(file, out / file.name)
    weight_map = {}
    for number, file in enumerate(sorted(plain.glob("*.safetensors")), 1):
        shard = f"model-{number:05}.safetensors"
        with safe_open(file, "pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # not a dict
        written: dict[str, torch.Tensor] = {}
        for name, values in tensors.items():
            if ".layers." in name and name.endswith("proj.weight") and values.dim() == 2:
                written[name], written[f"{name}_scale_inv"] = to_fp8(values)
            else:
                written[name] = values
        save_file(written, out / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(written, shard))
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((plain / "config.json").read_text())  # written last: it marks a complete checkpoint
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


def to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (float8 values, float32 scales [ceil(n / BLOCK), ceil(k / BLOCK)]) of a weight [n, k]."""
    n, k = values.shape
    padded = torch.zeros(-(-n // BLOCK) * BLOCK, -(-k // BLOCK) * BLOCK)
    padded[:n, :k] = values.float()
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / LARGEST).clamp(min=1e-12)
    coded = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:n, :k]
    return coded.to(torch.float8_e4m3fn).contiguous(), scales
