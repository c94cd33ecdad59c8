"""A simulated cluster: an in-process cluster over simulated components, all derived from one seed."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any, TypeVar

from baton.core.cluster.worker_report import WorkerRole
from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import Tier
from baton.core.kv.kv_layout import LAYOUT_VERSION, KvComponent, KvLayout, layer_groups
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer, byte_grammar_tokenizer
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.fleet.local.in_process_cluster import InProcessCluster, WorkerComponents
from baton.gateway.gateway_service import GatewayService
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.runtime.config.settings import ClusterConfig, WorkerConfig
from baton.scheduler.scheduler_service import Scheduler
from baton.sim.sim_disk import DISK_BYTES_PER_S, SimDisk
from baton.sim.sim_executor import SimExecutor, SimStepCost
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_network import Delays, SimNetwork
from baton.sim.sim_stores import SimStores
from baton.sim.sim_tier import COPY_BYTES_PER_S, SimTierMemory
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.sim.virtual_time import PROCESS, ProcessClock, running_loop
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.device.worker_device import DraftDevice
from baton.worker.tiers.host_tier import HostTier, TierTotals
from baton.worker.worker_service import Worker

T = TypeVar("T")

GROUP_LAYERS = 4
"""Layers of the simulated model that see equally far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockModel:
    """Clocks of the simulated hosts. By default all hosts have the same one.

    max_base_s: largest difference between the clocks of two hosts.
    max_drift: largest relative error of a clock's speed.
    """

    max_base_s: float = 0.0
    max_drift: float = 0.0

    def draw(self, rng: Random) -> ProcessClock:
        """Return a random clock."""
        return ProcessClock(rng.uniform(0.0, self.max_base_s), 1.0 + rng.uniform(-self.max_drift, self.max_drift))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """The simulated model, and the timing of device, transfers, network and clocks.

    windows: number of tokens that each group of its layers sees, 0 for all. num_blocks: over all groups.
    draft: step cost of a draft model, which knows no rules; None: there is none.
    copy_bytes_per_s, disk_bytes_per_s: speed of copies between the device and the host tier, and of disks.
    copy_deviation: share by which each of them takes longer or shorter, at random and at most.
    has_fixed_addresses: a process that is started again has the address of its predecessor.
    two_sided: owners of KV take part in reads of it.
    """

    vocab_size: int = 251
    max_model_len: int = 256
    num_blocks: int = 96
    windows: tuple[int, ...] = (0,)
    draft: SimStepCost | None = None
    step: SimStepCost = field(default_factory=SimStepCost)
    link: LinkModel = field(default_factory=LinkModel)
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    copy_deviation: float = 0.0
    delays: Delays = field(default_factory=Delays)
    clocks: ClockModel = field(default_factory=ClockModel)
    has_fixed_addresses: bool = False
    two_sided: bool = False


class SimCluster(InProcessCluster):
    """A cluster of simulated processes. It must be created inside the virtual-time loop that runs it.

    gateways, schedulers: the running ones by process name.
    memories: KV memory of each worker's current incarnation, by worker id.
    host_memories: the slots of its host tier, by worker id.
    disks: the disk of each worker, by worker id.
    tier_totals: counters of the tiers of all incarnations of workers.
    draft_executors: executor of its draft model, by worker id.
    layout_version: KV layout version of workers that start from now on. Another value simulates another
        release.
    """

    def __init__(self, config: ClusterConfig, model: SimModel, seed: int) -> None:
        rng = Random(seed)
        self.config = config
        self.model = model
        self.network = SimNetwork(
            Random(rng.getrandbits(64)), model.delays, keepalive_s=keepalive_s(config.heartbeat_s)
        )
        self.fabric = SimFabric(Random(rng.getrandbits(64)), model.link)
        self.stores = SimStores(Random(rng.getrandbits(64)), lambda: running_loop().now_s)
        self.memories: dict[str, SimMemory] = {}
        self.disks: dict[str, SimDisk] = {}
        self.host_memories: dict[str, SimMemory] = {}
        self.tier_totals: list[tuple[Tier, TierTotals]] = []
        self.draft_executors: dict[str, SimExecutor] = {}
        self.gateways: dict[str, GatewayService] = {}
        self.schedulers: dict[str, Scheduler] = {}
        self.layout_version = LAYOUT_VERSION
        self._clock_rng = Random(rng.getrandbits(64))
        self._disk_rng = Random(rng.getrandbits(64))
        self._has_clock: set[str] = set()
        self._calls: dict[str, dict[asyncio.Task[Any], None]] = {}
        super().__init__(
            config=config,
            switchboard=self.network,
            membership=self.stores.membership,
            decisions=self.stores.decisions,
            feed=self.stores.feed,
            tokenizer=ByteTokenizer(vocab_size=model.vocab_size, max_model_len=model.max_model_len),
            make_components=self._make_sim_components,
            rng=rng,
        )

    async def start_several(self, *, num_schedulers: int, num_gateways: int) -> None:
        """Start as `start` does, with several schedulers and gateways. The second is called `scheduler-1`."""
        await self.start()
        for number in range(1, num_schedulers):
            self.start_scheduler(f"scheduler-{number}")
        for number in range(1, num_gateways):
            await self.start_gateway(f"gateway-{number}")

    def start_scheduler(self, name: str = "scheduler") -> Scheduler:
        scheduler = self._context(name).run(partial(super().start_scheduler, name))
        self.schedulers[name] = scheduler
        return scheduler

    async def start_gateway(self, name: str = "gateway") -> GatewayService:
        start = asyncio.get_running_loop().create_task(super().start_gateway(name), context=self._context(name))
        self.gateways[name] = await start
        self._calls[name] = {}
        return self.gateways[name]

    def start_worker(self, worker_id: str, role: WorkerRole) -> Worker:
        return self._context(worker_id).run(partial(super().start_worker, worker_id, role))

    def call_gateway(self, name: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a client's call inside a gateway. It is cancelled if the gateway is killed."""
        task = asyncio.get_running_loop().create_task(call, context=self._context(name))
        calls = self._calls[name]
        calls[task] = None
        task.add_done_callback(lambda done: calls.pop(done, None))
        return task

    async def kill(self, name: str) -> None:
        self.stores.disconnect(name)
        self.gateways.pop(name, None)
        self.schedulers.pop(name, None)
        calls = self._calls.pop(name, {})
        for call in calls:
            call.cancel()
        # A paused process must run to be cleaned up. Before, it is cut off from all others.
        self.network.cut_off(self._processes[name].address)
        if (disk := self.disks.get(name)) is not None:
            disk.kill()
        self.fabric.allow_reads_of(name)
        running_loop().resume(name)
        await super().kill(name)
        await asyncio.gather(*calls, return_exceptions=True)
        self.stores.connect(name)

    def pause(self, name: str, *, reads_stop: bool = False) -> None:
        """Pause a process, as SIGSTOP does.

        reads_stop: reads of its KV memory wait, too. Two-sided reads always do
        """
        running_loop().pause(name)
        self.network.paused(name)
        if reads_stop or self.model.two_sided:
            self.fabric.block_reads_of(name)

    def resume(self, name: str) -> None:
        """Let a paused process run again. Does nothing if it was killed meanwhile."""
        running_loop().resume(name)
        self.network.resumed(name)
        self.fabric.allow_reads_of(name)

    @property
    def layout(self) -> KvLayout:
        """The KV layout of the workers."""
        return sim_layout(self.config.block_size_tokens, self.model.windows)

    def _address(self, name: str, epoch: int) -> str:
        return f"{name}:1" if self.model.has_fixed_addresses else super()._address(name, epoch)

    def _context(self, name: str) -> Context:
        """Return a context in which code runs as part of a process, and give the process its clock."""
        clocks = self.model.clocks
        if name not in self._has_clock and (clocks.max_base_s or clocks.max_drift):
            self._has_clock.add(name)
            running_loop().set_clock(name, clocks.draw(self._clock_rng))
        context = copy_context()
        context.run(PROCESS.set, name)
        return context

    def _make_sim_components(self, worker: WorkerRef, config: WorkerConfig) -> WorkerComponents:
        model = self.model
        layout = replace(self.layout, layout_version=self.layout_version)
        memory = SimMemory(model.num_blocks, config.block_size_tokens)
        self.memories[worker.worker_id] = memory
        generations = MemoryGenerationTable(bytearray(ENTRY_BYTES * model.num_blocks), worker.worker_epoch)
        pool = BlockPool(
            model.num_blocks,
            config.block_size_tokens,
            generations,
            layout.windows,
            announce_every=config.kv_announce_every,
        )
        num_slots = (config.host_kv_memory or 0) // layout.block_bytes
        tier = SimTierMemory.of(worker, num_slots, config.block_size_tokens) if num_slots else None
        num_disk_slots = (config.disk_kv_size or 0) // layout.block_bytes
        if num_disk_slots and worker.worker_id not in self.disks:
            seed = self._disk_rng.getrandbits(64)
            self.disks[worker.worker_id] = SimDisk(
                num_disk_slots, config.block_size_tokens, seed, model.disk_bytes_per_s, model.copy_deviation
            )
        disk = self.disks.get(worker.worker_id)
        if tier is not None:
            self.host_memories[worker.worker_id] = tier.memory
        host_tier = None if tier is None else self._open_host_tier(tier, worker, memory)
        disk_tier = None if disk is None else disk.open(worker, memory, layout.block_bytes)
        self.tier_totals += [(each.tier, each.totals) for each in (host_tier, disk_tier) if each is not None]
        open_backend = partial(SimTransferBackend, fabric=self.fabric, two_sided=model.two_sided)
        backend = open_backend(worker=worker, layout=layout, memory=memory, generations=generations, tier=tier)
        engine_config = EngineConfig(
            max_num_batched_tokens=config.step_tokens(on_gpu=False),
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            block_size_tokens=config.block_size_tokens,
            max_waiting_seqs=config.max_queued_jobs,
            targets=config.target_factors,
        )
        constraints = TokenConstraints(
            vocab_size=model.vocab_size, tokenizer=partial(sim_grammar_tokenizer, model.vocab_size), in_threads=False
        )
        return WorkerComponents(
            engine_config=engine_config,
            pool=pool,
            executor=SimExecutor(
                layout=layout,
                memory=memory,
                vocab_size=model.vocab_size,
                cost=model.step,
                constraints=constraints,
            ),
            backend=backend,
            constraints=constraints,
            costs=model.step.model,
            host_tier=host_tier,
            disk=disk_tier,
            draft=self._draft_device(worker.worker_id, engine_config) if WorkerRole(config.role).can_decode else None,
            close=backend.kill,
        )

    def _open_host_tier(self, tier: SimTierMemory, worker: WorkerRef, device: SimMemory) -> HostTier:
        model, block_bytes = self.model, self.layout.block_bytes
        return tier.open(
            worker, device, block_bytes, model.copy_bytes_per_s, model.copy_deviation, self.fabric.draws_reuse
        )

    def _draft_device(self, worker_id: str, engine_config: EngineConfig) -> DraftDevice | None:
        """Return a draft model that draws what the model draws without rules; None if there is none."""
        model, size = self.model, engine_config.block_size_tokens
        if model.draft is None:
            return None
        num_blocks = model.num_blocks // len(model.windows)
        executor = SimExecutor(
            layout=sim_layout(size), memory=SimMemory(num_blocks, size), vocab_size=model.vocab_size, cost=model.draft
        )
        self.draft_executors[worker_id] = executor
        generations = MemoryGenerationTable(bytearray(ENTRY_BYTES * num_blocks), 0)
        return DraftDevice(
            executor=executor,
            engine_config=engine_config,
            pool=BlockPool(num_blocks, size, generations),
            vocab_size=model.vocab_size,
            summary="simulated draft model",
            costs_key="",
            costs=model.draft.model,
        )


@cache
def sim_grammar_tokenizer(vocab_size: int) -> GrammarTokenizer:
    """Return the table of `ByteTokenizer`, with the last token as a special one.

    A request gives the last one as a stop token, because simulated models have no end token.
    """
    tokens = [bytes((id_,)) if id_ < 256 else f"<{id_}>".encode() for id_ in range(vocab_size - 1)]
    return byte_grammar_tokenizer([*tokens, b"<end>"], special_token_ids=(vocab_size - 1,))


def keepalive_s(heartbeat_s: float) -> float:
    """Return the time after which gRPC's keepalive breaks streams: two heartbeats and half a second."""
    return 2 * heartbeat_s + 0.5


def sim_layout(block_size_tokens: int, windows: tuple[int, ...] = (0,)) -> KvLayout:
    """Return the KV layout of a small model. It determines the transfer size of a block.

    `windows`: see `SimModel`.
    """
    components = tuple(KvComponent(name=name, num_kv_heads=2, head_dim=64, dtype="bfloat16") for name in ("k", "v"))
    return KvLayout(
        model_fingerprint="simulated",
        tokenizer_fingerprint="bytes",
        block_size_tokens=block_size_tokens,
        groups=layer_groups([(components, window) for window in windows for _ in range(GROUP_LAYERS)]),
    )
