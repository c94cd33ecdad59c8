"""Runs real workers and a scripted gateway on simulated devices and network, in virtual time.

`SimExecutor` compares every KV slot that a sample attends to with the sequence's own history, so a wrong
block fails the test.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.ids import WorkerRef
from baton.core.interfaces import Member, MemberKind
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import DecodeJob, Job, PrefillJob
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.engine import EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.checksum import extend, token_after
from baton.engine.scheduling.step_queue import StepQueue
from baton.engine.state.step import Executor, StepPlan, StepResult
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.observability.health import Health
from baton.runtime.observability.tracing import OFF, Tracing
from baton.runtime.process.byte_budget import Account
from baton.sim.sim_cluster import sim_grammar_tokenizer
from baton.sim.sim_disk import SimDisk
from baton.sim.sim_executor import SimExecutor, SimStepCost
from baton.sim.sim_memory import SimMemory, contents
from baton.sim.sim_network import Delays, SimNetwork
from baton.sim.sim_tier import SimTierMemory
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.store.memory.memory_stores import MemoryCostStore, MemoryKvEventFeed
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.worker_budget import worker_budget
from baton.worker.worker_parts import WorkerParts
from baton.worker.worker_service import Worker
from tests import builders
from tests.times import TEST_TIMES
from tests.unit.worker.job_builders import VOCAB_SIZE, decode_job, prefill_job
from tests.unit.worker.scripted_gateway import Gateway

BLOCK = 4
SCHEDULER = "scheduler:1"
STEP_COST = SimStepCost(base_s=0.002, per_token_s=0.0001)


class StaticMembership:
    """A directory of members within one process."""

    def __init__(self) -> None:
        self.announced: dict[str, Member] = {}

    async def announce(self, member: Member, ttl_s: float) -> None:
        self.announced[member.member_id] = member

    async def withdraw(self, member: Member) -> None:
        self.announced.pop(member.member_id, None)

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        return tuple(m for m in self.announced.values() if m.kind is kind)


class ListeningScheduler:
    """A scheduler that records reports. `send` sends a command to a worker."""

    def __init__(self) -> None:
        self.reports: dict[str, list[WorkerReport]] = defaultdict(list)
        self.streams: dict[str, Any] = {}

    async def report(self, stream: Any) -> None:
        while True:
            report = await stream.receive()
            self.reports[report.worker.worker_id].append(report)
            self.streams[report.worker.worker_id] = stream

    def send(self, worker_id: str, command: WorkerCommand) -> None:
        self.streams[worker_id].send(command)


class GatedExecutor:
    """An executor whose steps a test can hold back or fail."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.plans: list[StepPlan] = []
        self._turns = StepQueue()

    @property
    def layout(self) -> KvLayout:
        return self.inner.layout

    @property
    def num_blocks(self) -> int:
        return self.inner.num_blocks

    async def execute(self, plan: StepPlan) -> StepResult:
        async with self._turns.turn(plan.step_id):
            self.plans.append(plan)
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return await self.inner.execute(plan)

    def withdraw(self, step_id: int) -> bool:
        return self._turns.withdraw(step_id)

    async def aclose(self) -> None:
        await self.inner.aclose()


class Node:
    """One worker with its simulated device."""

    def __init__(
        self,
        cluster: "Cluster",
        worker_id: str,
        role: str,
        num_blocks: int,
        epoch: int = 1,
        memory_limits: Mapping[Account, int] | None = None,
        kv_windows: tuple[int, ...] = (0, 0),
        **changes: Any,
    ) -> None:
        self.ref = WorkerRef(worker_id=worker_id, worker_epoch=epoch, address=f"{worker_id}:1")
        self.layout = builders.windowed_layout(kv_windows, block_size_tokens=BLOCK)
        self.config = WorkerConfig(
            **{
                **worker_times(),
                "role": role,
                "worker_id": worker_id,
                "schedulers": (SCHEDULER,),
                "kv_announce_every": 1,
                **changes,
            }
        )
        memory = SimMemory(num_blocks, BLOCK)
        generations = MemoryGenerationTable(bytearray(num_blocks * ENTRY_BYTES), epoch)
        self.pool = BlockPool(
            num_blocks, BLOCK, generations, self.layout.windows, announce_every=self.config.kv_announce_every
        )
        self.memory = memory
        self.health = Health("worker")
        constraints = TokenConstraints(
            vocab_size=VOCAB_SIZE, tokenizer=lambda: sim_grammar_tokenizer(VOCAB_SIZE), in_threads=False
        )
        self.executor = GatedExecutor(
            SimExecutor(
                layout=self.layout, memory=memory, vocab_size=VOCAB_SIZE, cost=STEP_COST, constraints=constraints
            )
        )
        engine_config = EngineConfig(
            max_num_batched_tokens=self.config.step_tokens(on_gpu=False),
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=4096,
            block_size_tokens=BLOCK,
            eos_token_ids=(0,),
            max_waiting_seqs=self.config.max_queued_jobs,
        )
        num_disk_slots = (self.config.disk_kv_size or 0) // self.layout.block_bytes
        if num_disk_slots and worker_id not in cluster.disks:
            cluster.disks[worker_id] = SimDisk(num_disk_slots, BLOCK)
        disk = cluster.disks.get(worker_id)
        num_slots = (self.config.host_kv_memory or 0) // self.layout.block_bytes
        tier = SimTierMemory.of(self.ref, num_slots, BLOCK) if num_slots else None
        self.backend = SimTransferBackend(
            fabric=cluster.fabric,
            worker=self.ref,
            layout=self.layout,
            memory=memory,
            generations=generations,
            tier=tier,
            two_sided=cluster.two_sided,
        )
        self.worker = Worker(
            WorkerParts(
                worker=self.ref,
                config=self.config,
                engine_config=engine_config,
                pool=self.pool,
                executor=self.executor,
                backend=self.backend,
                constraints=constraints,
                network=cluster.network.host(self.ref.address),
                membership=cluster.membership,
                health=self.health,
                rng=Random(f"{cluster.seed}-{worker_id}-{epoch}"),
                budget=builders.with_limits(worker_budget(2**30), memory_limits),
                feed=cluster.feed,
                host_tier=None if tier is None else tier.open(self.ref, memory, self.layout.block_bytes),
                disk=None if disk is None else disk.open(self.ref, memory, self.layout.block_bytes),
                costs=STEP_COST.model,
                cost_store=cluster.cost_store,
                costs_key="sim",
                tracing=cluster.tracing,
            )
        )
        cluster.network.listen(self.ref.address, self.worker)
        self.running = asyncio.create_task(self.worker.run(), name=f"worker-{worker_id}")


def worker_times() -> dict[str, Any]:
    names = {item for item in dir(WorkerConfig) if item in TEST_TIMES}
    return {name: TEST_TIMES[name] for name in names}


class Cluster:
    """Workers by id on one simulated network. two_sided: owners of KV take part in reads of it."""

    def __init__(
        self, seed: int, delays: Delays, link: LinkModel, tracing: Tracing = OFF, *, two_sided: bool = False
    ) -> None:
        self.seed = seed
        self.two_sided = two_sided
        self.network = SimNetwork(Random(f"{seed}-network"), delays)
        self.fabric = SimFabric(Random(f"{seed}-fabric"), link)
        self.membership = StaticMembership()
        self.feed = MemoryKvEventFeed()
        self.cost_store = MemoryCostStore()
        self.scheduler = ListeningScheduler()
        self.network.listen(SCHEDULER, self.scheduler)  # type: ignore[arg-type]
        self.nodes: dict[str, Node] = {}
        self.disks: dict[str, SimDisk] = {}
        self.tracing = tracing

    def start(self, worker_id: str, role: str = "hybrid", num_blocks: int = 64, **changes: Any) -> Node:
        node = self.nodes[worker_id] = Node(self, worker_id, role, num_blocks, **changes)
        return node

    def gateway(self, node: Node, name: str = "g0") -> Gateway:
        return Gateway(self.network.host(name), node.ref, name)

    async def kill(self, worker_id: str) -> None:
        node = self.nodes.pop(worker_id)
        node.backend.kill()
        node.running.cancel()
        await self.network.kill(node.ref.address)
        await asyncio.wait((node.running,))

    def cut(self, *addresses: str) -> int:
        """Cut every stream between hosts whose names begin with these addresses.

        Returns how many were cut.
        """
        streams = [
            s for s in self.network.streams.values() if all(any(h.startswith(a) for h in s.hosts) for a in addresses)
        ]
        for stream in streams:
            stream.cut()
        return len(streams)

    def check_clean(self) -> None:
        for node in self.nodes.values():
            node.worker.check_clean()

    async def until_clean(self, within_s: float = 10.0) -> None:
        """Wait until all workers are clean: nothing is left of past requests except cached blocks."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    self.check_clean()
                except AssertionError:
                    await asyncio.sleep(0.05)
                else:
                    return


@asynccontextmanager
async def cluster(
    seed: int = 0,
    *,
    delays: Delays | None = None,
    link: LinkModel | None = None,
    tracing: Tracing = OFF,
    two_sided: bool = False,
) -> AsyncIterator[Cluster]:
    """Yield an empty cluster. Workers that still run at the end are stopped."""
    simulated = Cluster(seed, delays or Delays(), link or LinkModel(), tracing, two_sided=two_sided)
    try:
        yield simulated
    finally:
        for worker_id in list(simulated.nodes):
            await simulated.kill(worker_id)
        await simulated.network.kill(SCHEDULER)


def expected_tokens(job: Job, sample: int = 0) -> list[int]:
    """Return the output tokens of a run without faults."""
    prompt = list(job.token_ids[: job.num_prompt_tokens])
    content = contents(prompt)[-1]
    tokens: list[int] = []
    while len(tokens) < job.sampling.max_tokens:
        token = token_after(content, job.sampling.seed, sample, len(prompt) + len(tokens), VOCAB_SIZE)
        tokens.append(token)
        content = extend(content, token)
        if not job.sampling.ignore_eos and token == 0:
            break
    return tokens


class Pair:
    """A prefill and a decode worker, and a gateway's session to each."""

    def __init__(self, simulated: Cluster, p: Node, d: Node) -> None:
        self.cluster = simulated
        self.p, self.d = p, d
        self.to_p, self.to_d = simulated.gateway(p), simulated.gateway(d)
        self.until_clean = simulated.until_clean
        self.check_clean = simulated.check_clean

    def jobs(self, *, num_tokens: int = 30, **fields: Any) -> tuple[PrefillJob, DecodeJob]:
        """Return the prefill and the decode job of one attempt."""
        return prefill_job(num_tokens, reader=self.d.ref, **fields), decode_job(num_tokens, owner=self.p.ref, **fields)

    def send(self, *, num_tokens: int = 30, **fields: Any) -> tuple[PrefillJob, DecodeJob]:
        """Send both jobs of one attempt at the same time."""
        prefill, decode = self.jobs(num_tokens=num_tokens, **fields)
        self.to_p.send(prefill)
        self.to_d.send(decode)
        return prefill, decode

    async def settle(self) -> None:
        """Wait until messages in flight have arrived."""
        await asyncio.sleep(0.05)


@asynccontextmanager
async def pair(
    seed: int = 0,
    *,
    num_blocks: int = 64,
    p_blocks: int = 64,
    roles: tuple[str, str] = ("prefill", "decode"),
    delays: Delays | None = None,
    link: LinkModel | None = None,
    tracing: Tracing = OFF,
    two_sided: bool = False,
    **changes: Any,
) -> AsyncIterator[Pair]:
    """Yield a prefill worker (`p_blocks` blocks) and a decode worker (`num_blocks` blocks) with a session to
    each.

    `changes` apply to the settings of both workers.
    """
    async with cluster(seed, delays=delays, link=link, tracing=tracing, two_sided=two_sided) as simulated:
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 16} | changes
        both = Pair(
            simulated,
            simulated.start("p", roles[0], p_blocks, **settings),
            simulated.start("d", roles[1], num_blocks, **settings),
        )
        await both.to_p.connect()
        await both.to_d.connect()
        yield both
