"""Reads checkpoints of AutoRound, which are packed as GPTQ or AWQ packs them.

Source: the formats of AutoRound's export, as vLLM reads them (`packing_format`, formerly `backend`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from baton.core.errors import ModelError
from baton.model.loading.quantised.awq import AwqLayout
from baton.model.loading.quantised.gptq import GptqLayout
from baton.model.loading.quantised.module_tensors import CheckpointLayout

DEFAULT_PACKING = "auto_round:auto_gptq"
_LAYOUTS: Mapping[str, Callable[[dict[str, Any]], CheckpointLayout]] = {
    "auto_gptq": GptqLayout,
    "gptq": GptqLayout,
    "auto_awq": AwqLayout,
    "awq": AwqLayout,
}
"""Layouts by the second part of the packing's name."""


def auto_round_layout(config: dict[str, Any]) -> CheckpointLayout:
    """Return the layout of `quant_method: auto-round`. Raises ModelError if the packing is not supported."""
    named = [config.get(key) for key in ("packing_format", "backend")]
    packing = next((str(each) for each in named if each not in (None, "auto")), DEFAULT_PACKING)
    parts = packing.split(":")
    layout = _LAYOUTS.get(parts[1]) if parts[0] == "auto_round" and len(parts) > 1 else None
    if layout is None:
        known = ", ".join(f"auto_round:{name}" for name in _LAYOUTS)
        raise ModelError(f"quantization_config: packing_format is {packing!r}; must be one of {known}")
    return layout({"bits": config.get("bits"), "group_size": config.get("group_size")})
