"""The GPUs of this machine, by the names under which CUDA shows them to a process."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.runtime.logging import get_logger

log = get_logger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Of a process: the GPUs that CUDA finds in it, in this order."""
DRIVER = Path("/dev/nvidiactl")
"""There in whatever can reach a GPU of NVIDIA's, also in a container without its tools."""
TOOL_LIMIT_S = 10.0


def computes_on_cpu(device: str, gpus: Sequence[str]) -> bool:
    """Whether workers here surely have their KV in host memory; `gpus`: those found for `device`."""
    return device in ("cpu", "emulated") or (device == "auto" and not gpus and not DRIVER.exists())


def local_gpus(device: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Those that workers here may use, as far as this process may; none where they compute on `device` "cpu"
    or "emulated", or where there is no tool of NVIDIA's to ask: then each worker finds what CUDA shows it.
    Blocks for as long as that tool takes."""
    if device not in ("auto", "cuda"):
        return []
    if (shown := environ.get(VISIBLE)) is not None:
        return [name for part in shown.split(",") if (name := part.strip())]
    if (tool := shutil.which("nvidia-smi", path=environ.get("PATH"))) is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TOOL_LIMIT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("gpus_not_listed", why=str(error))
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
