"""Lists the GPUs of this machine by their CUDA names."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.runtime.logging import get_logger

log = get_logger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that CUDA exposes to a process, in order."""
DRIVER = Path("/dev/nvidiactl")
"""Exists wherever NVIDIA GPUs can be used, also in containers without NVIDIA's tools."""
TOOL_TIMEOUT_S = 10.0


def computes_on_cpu(device: str, gpus: Sequence[str], has_gpu_driver: bool) -> bool:
    """Return True if workers are certain to keep their KV cache in host memory.

    `gpus`: the GPUs that were found for `device`.
    """
    return device in ("cpu", "emulated") or (device == "auto" and not gpus and not has_gpu_driver)


def local_gpus(device: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that workers on this machine may use, limited by CUDA_VISIBLE_DEVICES.

    The list is empty if `device` uses no GPU, or if `nvidia-smi` is missing or fails. In the latter case each
    worker uses what CUDA exposes to it. Blocks while `nvidia-smi` runs.
    """
    if device not in ("auto", "cuda"):
        return []
    if (visible := environ.get(VISIBLE)) is not None:
        return [name for part in visible.split(",") if (name := part.strip())]
    if (tool := shutil.which("nvidia-smi", path=environ.get("PATH"))) is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("gpu_listing_failed", reason=str(error))
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
