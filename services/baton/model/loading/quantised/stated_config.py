"""Finds where a checkpoint says how it is quantised, and refuses quantised weights that nothing describes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import ModelError

HF_QUANT_CONFIG = "hf_quant_config.json"
"""File in which ModelOpt describes a checkpoint, beside or instead of the `quantization_config`."""
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "BOOL"})
_WEIGHTS = frozenset({"weight", "gate_up_proj", "down_proj"})
"""Last parts of the names of tensors that are floats in every model."""
_MARKS = ("weight_scale", "weight_packed", "weight_zero_point", "qweight", "qzeros", "scale_inv")
"""Parts of the last part of the names of tensors that only quantised weights have."""


def stated_quantisation(path: Path, config: Any) -> dict[str, Any] | None:
    """Return what a checkpoint without a `quantization_config` says elsewhere, as such a configuration.

    config: of the whole model. Returns None if there is nothing. Raises ModelError if it cannot be read.
    """
    older = getattr(config, "compression_config", None)  # of early versions of compressed-tensors
    if isinstance(older, Mapping):
        return {**older, "quant_method": "compressed-tensors"}
    try:
        content = json.loads((path / HF_QUANT_CONFIG).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path / HF_QUANT_CONFIG} cannot be read ({error}); download or copy it again") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("quantization"), Mapping):
        raise ModelError(f"{path / HF_QUANT_CONFIG} has no quantization; download or copy it again")
    return {**content["quantization"], "quant_method": "modelopt"}


def require_plain(path: Path, dtypes: Mapping[str, str]) -> None:
    """Raise ModelError if a checkpoint without a description of its quantisation has quantised weights.

    They would be read as plain ones: codes as values, without their scales. dtypes: names of safetensors'
    types by the names of the tensors.
    """
    for name, dtype in dtypes.items():
        last = name.rpartition(".")[2]
        if (last in _WEIGHTS and dtype not in _PLAIN_DTYPES) or any(mark in last for mark in _MARKS):
            raise ModelError(
                f"{path} has quantised weights ({name} of type {dtype}), and nothing says how to read them: "
                f"config.json has no quantization_config, and there is no {HF_QUANT_CONFIG}. "
                "Download all its JSON files again, or give another checkpoint of this model"
            )
