"""Decides whether peers read a GPU's KV directly, or from a copy in host memory, by which is measured faster.

Registration of GPU memory succeeds in cases in which UCX then reads it over TCP: no NVLink, separate PID
namespaces, or a missing CUDA module. Staging through host memory is several times faster there.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version

from baton.runtime.child.process_pair import ProcessPairFailed, run_pair
from baton.runtime.child.verdict_cache import VerdictCache
from baton.runtime.logging import get_logger
from baton.transfer.backends.nixl.pair_transport import UNKNOWN_TRANSPORT, ucx_environment

log = get_logger(__name__)

PAIR_MODULE = "baton.worker.device.kv_memory.kv_path_pair"
PAIR_S = 60.0
"""Longest time of each process of a pair, most of which is starting CUDA and NIXL while others start, too."""
TOOL_TIMEOUT_S = 10.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


class KvPath(Enum):
    """The memory from which peers read a GPU's KV: its own, or a copy in host memory."""

    DIRECT = "direct"
    STAGED = "staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSpeed:
    """Speed of one path between two processes of this machine.

    bytes_per_s: for staged KV with both copies. transport: of the read between the processes.
    problem: why nothing could be read; empty on success.
    """

    bytes_per_s: float = 0.0
    transport: str = ""
    problem: str = ""

    @property
    def text(self) -> str:
        """The speed or the problem, for people."""
        if self.problem:
            return f"failed: {self.problem}"
        transport = self.transport if self.transport not in ("", UNKNOWN_TRANSPORT) else "an unknown transport"
        return f"{self.bytes_per_s / 1e9:.2g} GB/s over {transport}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPathChoice:
    """The chosen path. reason: what it was chosen by, for people."""

    path: KvPath
    reason: str


MEASURING = "measures how peers read its KV, once after each boot"

Measure = Callable[[KvPath], PathSpeed]


def choose_kv_path(direct: PathSpeed, staged: PathSpeed) -> KvPathChoice:
    """Choose the faster path. A path that failed is not used, unless both did: then registration decides."""
    reason = f"direct {direct.text}; staged {staged.text}"
    if direct.problem and staged.problem:
        return KvPathChoice(path=KvPath.DIRECT, reason=reason)
    if direct.problem:
        return KvPathChoice(path=KvPath.STAGED, reason=reason)
    if staged.problem or direct.bytes_per_s >= staged.bytes_per_s:
        return KvPathChoice(path=KvPath.DIRECT, reason=reason)
    return KvPathChoice(path=KvPath.STAGED, reason=reason)


def kv_path_for(
    setting: str,
    *,
    cache: VerdictCache | None = None,
    measure: Measure | None = None,
    facts: Mapping[str, str],
    say: Callable[[str], object] = lambda text: None,
) -> KvPathChoice:
    """Return the path of a worker. `setting`: `auto` measures both, unless the cache has the speeds.

    say: told before they are measured.

    Call it before the model is loaded, because the processes that measure need memory on the GPU. Speeds of
    failed paths are not cached. Blocks for some seconds, at most for 4 times `PAIR_S`.
    """
    if setting != "auto":
        return KvPathChoice(path=KvPath(setting), reason=f"--gpu-kv {setting}")
    cache = cache or VerdictCache()
    with cache.locked("kv-path", 4 * PAIR_S):
        speeds = _speeds_from(cache.find(facts))
        if speeds is None:
            say(MEASURING)
            speeds = {path: (measure or measure_path)(path) for path in KvPath}
            if not any(speed.problem for speed in speeds.values()):
                plain = {path.value: [speed.bytes_per_s, speed.transport] for path, speed in speeds.items()}
                cache.keep(facts, plain)
    choice = choose_kv_path(speeds[KvPath.DIRECT], speeds[KvPath.STAGED])
    say = log.warning if choice.path is KvPath.STAGED else log.info
    say("gpu_kv_path_chosen", path=choice.path.value, reason=choice.reason, file=str(cache.path(facts)))
    return choice


def _speeds_from(kept: Mapping[str, object] | None) -> dict[KvPath, PathSpeed] | None:
    """Return the speeds in a cached verdict; None if it is not one."""
    found: dict[KvPath, PathSpeed] = {}
    for path in KvPath:
        match (kept or {}).get(path.value):
            case [float() | int() as bytes_per_s, str() as transport]:
                found[path] = PathSpeed(bytes_per_s=float(bytes_per_s), transport=transport)
            case _:
                return None
    return found


def path_facts() -> dict[str, str]:
    """Return what the speeds depend on: the GPU and its peer, the driver, NIXL, and UCX's environment."""
    from baton.model.device.device_info import gpu_name_and_uuid
    from baton.model.gpu_check.gpu_facts import driver_version

    name, own = gpu_name_and_uuid()
    try:
        nixl = version("nixl")
    except PackageNotFoundError:
        nixl = "not installed"
    return {
        "kv path": f"{name} {own} from {peer_gpu(own, listed_gpus()) or 'itself'}",
        "driver": driver_version(),
        "nixl": nixl,
        "ucx": ucx_environment(),
    }


def measure_path(path: KvPath, device: str = "cuda") -> PathSpeed:
    """Read KV between two processes, if possible of two GPUs of this machine."""
    owner_environ: dict[str, str] = {}
    if device == "cuda":
        from baton.model.device.device_info import gpu_name_and_uuid

        other = peer_gpu(gpu_name_and_uuid()[1], listed_gpus())
        owner_environ = {} if other is None else {VISIBLE: other}
    speed = _measured(path, device, owner_environ)
    if speed.problem and owner_environ:  # the other GPU may be full, or forbidden to this process
        return _measured(path, device, {})
    return speed


def _measured(path: KvPath, device: str, owner_environ: Mapping[str, str]) -> PathSpeed:
    arguments = (PAIR_MODULE, path.value, device)
    try:
        answer = run_pair([*arguments, "owner"], [*arguments, "reader"], PAIR_S, owner_environ)
        found = json.loads(answer.splitlines()[-1])
        return PathSpeed(bytes_per_s=float(found["bytes_per_s"]), transport=str(found["transport"]))
    except ProcessPairFailed as error:
        return PathSpeed(problem=str(error))
    except (LookupError, ValueError, TypeError):
        return PathSpeed(problem="the reading process printed no valid result")


def peer_gpu(own: str, listed: Sequence[str]) -> str | None:
    """Return the first GPU of this machine that is not `own`, as its UUID; None if there is none."""
    return next((uuid for uuid in listed if uuid != own), None)


def listed_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that `nvidia-smi` lists; none if it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("gpu_listing_failed", reason=str(error))
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
