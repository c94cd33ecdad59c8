"""A simulated cluster: an in-process cluster over simulated components, all derived from one seed."""

from dataclasses import dataclass, field, replace
from random import Random

from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import LAYOUT_VERSION, KvComponent, KvLayout, LayerGroup
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.fleet.local.in_process_cluster import InProcessCluster, WorkerComponents
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.runtime.config.settings import ClusterConfig, WorkerConfig
from baton.sim.sim_executor import SimExecutor, SimStepCost
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_network import Delays, SimNetwork
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.store.memory.memory_stores import MemoryDecisionStore, MemoryKvEventFeed, MemoryMembership
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """The simulated model, and the timing of device, transfers and network."""

    vocab_size: int = 251
    max_model_len: int = 256
    num_blocks: int = 96
    step: SimStepCost = field(default_factory=SimStepCost)
    link: LinkModel = field(default_factory=LinkModel)
    delays: Delays = field(default_factory=Delays)


class SimCluster(InProcessCluster):
    """A cluster of simulated workers. It must be created inside the virtual-time loop that runs it.

    memories: KV memory of each worker's current incarnation, by worker id.
    layout_version: KV layout version of workers that start from now on. Another value simulates another
        release.
    """

    def __init__(self, config: ClusterConfig, model: SimModel, seed: int) -> None:
        rng = Random(seed)
        self.model = model
        self.network = SimNetwork(Random(rng.getrandbits(64)), model.delays)
        self.fabric = SimFabric(Random(rng.getrandbits(64)), model.link)
        self.memories: dict[str, SimMemory] = {}
        self.layout_version = LAYOUT_VERSION
        super().__init__(
            config=config,
            switchboard=self.network,
            membership=MemoryMembership(),
            decisions=MemoryDecisionStore(),
            feed=MemoryKvEventFeed(),
            tokenizer=ByteTokenizer(vocab_size=model.vocab_size, max_model_len=model.max_model_len),
            make_components=self._make_sim_components,
            rng=rng,
        )

    def _make_sim_components(self, worker: WorkerRef, config: WorkerConfig) -> WorkerComponents:
        model = self.model
        layout = replace(sim_layout(config.block_size_tokens), layout_version=self.layout_version)
        memory = SimMemory(model.num_blocks, config.block_size_tokens)
        self.memories[worker.worker_id] = memory
        generations = MemoryGenerationTable(bytearray(ENTRY_BYTES * model.num_blocks), worker.worker_epoch)
        pool = BlockPool(model.num_blocks, config.block_size_tokens, generations)
        backend = SimTransferBackend(
            fabric=self.fabric, worker=worker, layout=layout, memory=memory, generations=generations
        )
        engine_config = EngineConfig(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            block_size_tokens=config.block_size_tokens,
            max_waiting_seqs=config.max_queued_jobs,
        )
        return WorkerComponents(
            engine_config=engine_config,
            pool=pool,
            executor=SimExecutor(layout=layout, memory=memory, vocab_size=model.vocab_size, cost=model.step),
            backend=backend,
            costs=model.step.model,
            close=lambda: self.fabric.kill(backend.memory[0].agent_name),
        )


def sim_layout(block_size_tokens: int) -> KvLayout:
    """Return the KV layout of a small model. It determines the transfer size of a block."""
    components = tuple(KvComponent(name=name, num_kv_heads=2, head_dim=64, dtype="bfloat16") for name in ("k", "v"))
    return KvLayout(
        model_fingerprint="simulated",
        tokenizer_fingerprint="bytes",
        block_size_tokens=block_size_tokens,
        groups=(LayerGroup(layer_begin=0, num_layers=4, components=components),),
    )
