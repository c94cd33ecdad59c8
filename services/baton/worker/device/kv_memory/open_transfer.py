"""Opens the transfer backends of a worker, by `--transfer`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.core.errors import ConfigError
from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.transfer.backend import TransferBackend
from baton.transfer.backends.host_memory import Bytes, HostMemory, allocate_private, allocate_shared
from baton.transfer.backends.several_backends import SeveralBackends
from baton.transfer.backends.staged_backend import StagedBackend

if TYPE_CHECKING:
    from baton.model.device.kv_tensors import KvCache

log = get_logger(__name__)

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def allocator_for(transfer: str) -> Callable[[int, int], HostMemory]:
    """Return what allocates memory that the backends of a worker can use."""
    return allocate_shared if transfer in ("local", "auto") else allocate_private


def open_host_backend(
    config: WorkerConfig, worker: WorkerRef, layout: KvLayout, memory: HostMemory, tier: HostMemory | None = None
) -> TransferBackend:
    """Open the backends of `--transfer` over host memory from `allocator_for`.

    tier: a second region that peers may read.
    Raises ConfigError if the backend cannot be used here. With `auto`, those that cannot are left out.
    """
    open_one = {"nixl": _open_nixl, "local": _open_local, "collective": _open_gloo}
    if config.transfer != "auto":
        return open_one[config.transfer](config, worker, layout, memory, tier)
    return combined([(name, partial(of, config, worker, layout, memory, tier)) for name, of in open_one.items()])


def open_collective_on_gpu(
    config: WorkerConfig,
    worker: WorkerRef,
    cache: "KvCache",
    generation_table: Bytes,
    tier: HostMemory | None = None,
) -> TransferBackend:
    """Open the backend over NCCL for the KV cache of a GPU.

    generation_table: of the cache's blocks, [num_blocks * 32] uint8.
    """
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.group_kinds import NcclKind

    return CollectiveBackend(
        worker=worker,
        layout=cache.layout,
        kind=NcclKind(cache.layout, cache.memory, generation_table, tier),
        num_blocks=cache.num_blocks,
        num_slots=0 if tier is None else tier.num_blocks,
        silence_s=config.transfer_deadline_max_s,
    )


def combined(openers: Sequence[tuple[str, Callable[[], TransferBackend]]]) -> TransferBackend:
    """Open all backends that can be opened, as one. `openers`: by name, the preferred one first.

    Raises ConfigError if none can be opened.
    """
    opened: list[TransferBackend] = []
    problems: dict[str, str] = {}
    for name, open_backend in openers:
        try:
            opened.append(open_backend())
        except Exception as error:  # NIXL's exceptions have no common base
            problems[name] = str(error)
            log.warning("kv_backend_not_available", transfer=name, problem=f"{type(error).__name__}: {error}")
    if not opened:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ConfigError(f"no transfer backend can be used here ({reasons})")
    return SeveralBackends(opened, not_available=problems)


def not_available(backend: TransferBackend) -> Mapping[str, str]:
    """Return by name why backends of `--transfer auto` could not be opened; empty with other settings."""
    inner = backend.host if isinstance(backend, StagedBackend) else backend
    return inner.not_available if isinstance(inner, SeveralBackends) else {}


@contextmanager
def nixl_required() -> Iterator[None]:
    """Raise ConfigError if NIXL is not installed on this platform."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"NIXL is not available here ({error}); on a single machine use --transfer local instead, between machines "
            "--transfer collective"
        ) from error


def nixl_settings(config: WorkerConfig) -> dict[str, Any]:
    """Return the settings of `NixlBackend` that come from the worker's."""
    return {"loopback_only": config.host in _LOOPBACK, "port_range": config.kv_port_range}


def _open_nixl(
    config: WorkerConfig, worker: WorkerRef, layout: KvLayout, memory: HostMemory, tier: HostMemory | None
) -> TransferBackend:
    with nixl_required():
        from baton.transfer.backends.nixl.nixl_backend import NixlBackend

        return NixlBackend.over(memory, worker=worker, layout=layout, tier=tier, **nixl_settings(config))


def _open_local(
    config: WorkerConfig, worker: WorkerRef, layout: KvLayout, memory: HostMemory, tier: HostMemory | None
) -> TransferBackend:
    from baton.transfer.backends.local_backend import LocalBackend

    return LocalBackend(worker=worker, layout=layout, memory=memory, tier=tier)


def _open_gloo(
    config: WorkerConfig, worker: WorkerRef, layout: KvLayout, memory: HostMemory, tier: HostMemory | None
) -> TransferBackend:
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.group_kinds import GlooKind

    return CollectiveBackend(
        worker=worker,
        layout=layout,
        kind=GlooKind(layout, memory, host=_own_host(worker), tier=tier),
        num_blocks=memory.num_blocks,
        num_slots=0 if tier is None else tier.num_blocks,
        silence_s=config.transfer_deadline_max_s,
    )


def _own_host(worker: WorkerRef) -> str:
    """Return the host of the worker's address, which peers reach."""
    return worker.address.rpartition(":")[0].strip("[]") or "127.0.0.1"
