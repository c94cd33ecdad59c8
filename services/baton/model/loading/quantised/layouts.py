"""Finds the layout of a quantised checkpoint. Unknown ones are refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

from baton.core.errors import ModelError
from baton.model.loading.quantised.auto_round import auto_round_layout
from baton.model.loading.quantised.awq import AwqLayout
from baton.model.loading.quantised.compressed_tensors import CompressedTensorsLayout
from baton.model.loading.quantised.gptq import GptqLayout
from baton.model.loading.quantised.module_tensors import CheckpointLayout
from baton.model.loading.quantised.mxfp4 import Mxfp4Layout
from baton.model.loading.quantised.scaled_floats import Fp8Layout, modelopt_layout

LAYOUTS: Mapping[str, Callable[[dict[str, Any]], CheckpointLayout]] = {
    "auto-round": auto_round_layout,
    "awq": AwqLayout,
    "compressed-tensors": CompressedTensorsLayout,
    "fbgemm_fp8": Fp8Layout,
    "fp8": Fp8Layout,
    "gptq": GptqLayout,
    "modelopt": modelopt_layout,
    "mxfp4": Mxfp4Layout,
}
"""Layouts by `quant_method` of the checkpoint's `quantization_config`."""


def layout_of(config: Any) -> CheckpointLayout:
    """Return the layout that `quantization_config` describes. Raises ModelError if it is not supported."""
    content = config if isinstance(config, dict) else config.to_dict() if hasattr(config, "to_dict") else {}
    method = quantisation_method(content)
    if method not in LAYOUTS:
        raise ModelError(
            f"its checkpoint is quantized by an unsupported method (quantization_config: {method}); "
            f"must be one of {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[method](content)


def quantisation_method(config: Mapping[str, Any]) -> str:
    """Return the method that `quantization_config` names, or `unnamed`."""
    return str(config.get("quant_method") or "unnamed")
