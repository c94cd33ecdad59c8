"""Checks how KV gets from one GPU process of this machine to another, and torch's GPU allocator."""

import os
import shutil
from collections.abc import Iterator, Mapping

from baton.core.errors import ConfigError
from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn
from baton.fleet.doctor.doctor_software import cuda_of_pytorch
from baton.worker.device.gpu_allocator import require_plain_segments
from baton.worker.device.kv_memory.kv_path import KvPath, PathSpeed, choose_kv_path, measure_path


def gpu_kv() -> Iterator[Finding]:
    """Measure both paths of GPU KV, if there is a GPU that PyTorch can use."""
    if shutil.which("nvidia-smi") is None or cuda_of_pytorch() is None:
        return
    yield from allocator_findings(os.environ)
    yield kv_path_finding(measure_path(KvPath.DIRECT), measure_path(KvPath.STAGED))


def allocator_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if a variable of torch's allocator keeps workers from starting with NIXL."""
    try:
        require_plain_segments(environ)
    except ConfigError as error:
        yield fail("gpu allocator", "expandable_segments", str(error))


def kv_path_finding(direct: PathSpeed, staged: PathSpeed) -> Finding:
    """Return the finding about the paths, from their speeds."""
    name, choice = "gpu kv", choose_kv_path(direct, staged)
    if direct.problem and staged.problem:
        return warn(name, choice.reason, "use --transfer local on a single machine")
    if choice.path is KvPath.STAGED:
        advice = "workers stage KV through host memory; see GPU node in the guides about UCX and NVLink"
        return warn(name, choice.reason, advice)
    return ok(name, choice.reason)
