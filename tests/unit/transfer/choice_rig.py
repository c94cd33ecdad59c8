"""Runs an owner and a reader in one process that have several transfer backends, in virtual time."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.engine.tiers.slots import TierSlots
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.transfer.backends.several_backends import SeveralBackends
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests import builders
from tests.unit.transfer.transfer_rig import (
    OWNER,
    READ_S,
    READER,
    Fabric,
    FakeBackend,
    Observed,
    PeerEnd,
    Rig,
    host,
    kv_reader_of,
    owner_service,
)

NAMES = ("one", "two", "three")


class Choice:
    """A rig whose owner and reader have three backends over the same memory, each with its own fabric."""

    def __init__(self, rig: Rig, fabrics: dict[str, Fabric], backends: dict[str, tuple[FakeBackend, FakeBackend]]):
        self.rig, self.fabrics, self.backends = rig, fabrics, backends

    @property
    def transport(self) -> str:
        (link,) = self.rig.kv_reader.links()
        return link.transport

    @property
    def reason(self) -> str:
        (link,) = self.rig.kv_reader.links()
        return link.choice


@asynccontextmanager
async def choice_rig(
    *,
    min_link_gbps: float = 0.0,
    owner_names: Sequence[str] = NAMES,
    not_available: Mapping[str, str] | None = None,
) -> AsyncIterator[Choice]:
    """`owner_names`: the backends of the owner. `not_available`: what the reader could not open, and why."""
    fabrics = {name: Fabric() for name in NAMES}
    network, observed = InProcessNetwork(), Observed()
    first = fabrics[NAMES[0]]
    owner, reader = host(first, OWNER), host(first, READER)
    backends: dict[str, tuple[FakeBackend, FakeBackend]] = {}
    for name, fabric in fabrics.items():
        pair = [
            FakeBackend(fabric, of.worker, builders.layout(), first.tables[of.worker.worker_id], transfer=name)
            for of in (owner, reader)
        ]
        for of in (owner, reader):
            fabric.blocks[of.worker.worker_id] = of.contents
        backends[name] = (pair[0], pair[1])
    owner = replace(owner, backend=SeveralBackends([backends[name][0] for name in owner_names]))  # type: ignore[arg-type]
    reader = replace(reader, backend=SeveralBackends([backends[name][1] for name in NAMES]))  # type: ignore[arg-type]
    service = owner_service(owner, pins=owner.pool, lookup=owner.pool.lookup)
    end = PeerEnd(service)
    network.add_worker(OWNER.address, end)
    kv_reader = kv_reader_of(reader, network, observed, min_link_gbps=min_link_gbps, not_available=not_available)
    table = MemoryGenerationTable(bytearray(4 * ENTRY_BYTES), OWNER.worker_epoch)
    rig = Rig(
        fabric=first,
        owner=owner,
        reader=reader,
        slots=TierSlots(4, table),
        service=service,
        end=end,
        kv_reader=kv_reader,
        network=network,
        observed=observed,
    )
    yield Choice(rig, fabrics, backends)
    await kv_reader.aclose()
    await service.aclose()
    for pair in backends.values():
        for backend in pair:
            await backend.aclose()


def slow_down(choice: Choice, **factors: float) -> None:
    for name, factor in factors.items():
        choice.fabrics[name].read_s = factor * READ_S
