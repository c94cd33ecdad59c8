"""Collects what the verdict about a GPU backend depends on: GPU, driver, libraries and this code."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from baton.model.gpu_check.check_backends import CheckedModel
from baton.model.software_facts import software_facts

DRIVER = Path("/proc/driver/nvidia/version")


def gpu_facts(device: torch.device, model: CheckedModel, config: PreTrainedConfig) -> dict[str, str]:
    """Return the facts, by name. `config`: the reduced one that a child runs."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": f"{properties.name}, {properties.total_memory >> 20} MiB, {properties.major}.{properties.minor}",
        "driver": driver_version(),
        **software_facts(),
        **model_facts(model, config.to_dict()),
    }


def driver_version() -> str:
    """Return the line in which the driver names its version, or CUDA's number for what it supports."""
    try:
        return DRIVER.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        number: Any = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
        return str(number)


def model_facts(model: CheckedModel, config: Mapping[str, Any]) -> dict[str, str]:
    """Return what a verdict depends on of the model: its reduced configuration and the worker's settings."""
    settings = {name: value for name, value in asdict(model).items() if name != "path"}
    text = json.dumps([settings, dict(config)], sort_keys=True, default=str)
    return {"model": f"{config.get('model_type', '')} {blake2b(text.encode(), digest_size=8).hexdigest()}"}
