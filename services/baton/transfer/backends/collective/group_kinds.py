"""The kinds of process groups: Gloo for blocks in host memory, NCCL for blocks on a GPU."""

from typing import TYPE_CHECKING

from baton.core.errors import ConfigError
from baton.core.kv.kv_layout import KvLayout
from baton.transfer.backends.collective.gloo_group import GlooGroup, gloo_device
from baton.transfer.backends.collective.host_messages import HostMessages
from baton.transfer.backends.collective.process_group import ProcessGroup
from baton.transfer.backends.collective.rendezvous_store import RendezvousStore
from baton.transfer.backends.host_memory import HOST, Bytes, HostMemory

if TYPE_CHECKING:
    from torch import Tensor


class GlooKind:
    """Implements `GroupKind` for host memory. Each group has a listening socket and a thread of its own."""

    name = "gloo"
    memory_kind = HOST
    device_id = 0

    def __init__(self, layout: KvLayout, memory: HostMemory, *, host: str, tier: HostMemory | None = None) -> None:
        """host: address of this machine that other workers reach.

        Raises ConfigError if it is none of this machine's own.
        """
        self.messages = HostMessages(layout, memory, tier)
        self._host = host
        try:
            gloo_device(host)  # only a check: it is closed at once
        except RuntimeError as error:
            raise ConfigError(
                f"Gloo cannot use the address {host!r} ({str(error).splitlines()[0]}): set --advertise-host to an "
                "address of this machine"
            ) from error

    def open(self, store: RendezvousStore, rank: int) -> ProcessGroup:
        return GlooGroup(store, rank, self._host)

    def close(self) -> None:
        """Nothing is shared."""


class NcclKind:
    """Implements `GroupKind` for the KV cache of a GPU. Not verified: no GPU has run it."""

    name = "nccl"
    memory_kind = "cuda"

    def __init__(self, layout: KvLayout, kv: "Tensor", generation_table: Bytes, tier: HostMemory | None = None) -> None:
        """The arguments are those of `GpuMessages`. Raises ConfigError if torch has no NCCL."""
        from torch.distributed import is_nccl_available

        from baton.transfer.backends.collective.gpu_messages import GpuMessages

        if not is_nccl_available():
            raise ConfigError("this build of torch has no NCCL: use --gpu-kv staged, which moves KV by Gloo")
        self.device_id = kv.device.index or 0
        self._device = kv.device
        self.messages = GpuMessages(layout, kv, generation_table, tier)

    def open(self, store: RendezvousStore, rank: int) -> ProcessGroup:
        from baton.transfer.backends.collective.nccl_group import NcclGroup

        return NcclGroup(store, rank, self._device)

    def close(self) -> None:
        """Nothing is shared."""
