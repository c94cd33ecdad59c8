"""Everything that a worker is built from, and its objects for KV events and transfers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from baton.core.ids import WorkerRef
from baton.core.interfaces import CostStore, KvEventFeed, Membership, Network
from baton.core.step_cost import StepCostModel
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.speculation.draft_model import DraftModel
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.step import Executor
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.observability.health import Health
from baton.runtime.observability.tracing import OFF, Tracing
from baton.runtime.process.byte_budget import ByteBudget
from baton.transfer.backend import TransferBackend
from baton.transfer.owner.kv_owner import SessionMoved
from baton.transfer.owner.owner_service import OwnerService, ReloadPrefix
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.peer_reads import ReaderTimes
from baton.transfer.reader.transfer_observer import NoObserver, TransferObserver
from baton.worker.costs.step_cost_keeper import CostKeeper, work_of
from baton.worker.device.kv_memory.open_transfer import not_available
from baton.worker.device.worker_device import DraftDevice
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.pull_end_observer import PullEndObserver
from baton.worker.reporting.kv_event_publisher import KvEventPublisher
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.worker_regions import WorkerRegions

KV_EVENTS_TTL_S = 30.0
KV_EVENTS_TTL_HEARTBEATS = 10
"""The KV events of a worker outlive it by the longer of these two. After that, no scheduler needs them any
more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """Everything that a worker is built from.

    engine_config, pool, executor, backend, constraints: the opened device
    feed: where KV events are published; None: nowhere
    costs: initial step costs; None: unknown. Steps correct them; the corrected ones go to `cost_store` at
    `costs_key`.
    host_tier, disk: the host tier of the KV and the disk tier; None: there is none
    blocks: copies blocks as bytes, for exports and imports; None: the device cannot
    draft: the draft model; None: there is none. draft_costs: its initial step costs, as `costs`
    budget: the memory budget of the process
    admin_port: port of its metrics; None: there is none
    """

    worker: WorkerRef
    config: WorkerConfig
    engine_config: EngineConfig
    pool: BlockPool
    executor: Executor
    backend: TransferBackend
    constraints: TokenConstraints
    network: Network
    membership: Membership
    health: Health
    rng: Random
    budget: ByteBudget
    observer: TransferObserver | None = None
    feed: KvEventFeed | None = None
    costs: StepCostModel | None = None
    cost_store: CostStore | None = None
    costs_key: str = ""
    host_tier: HostTier | None = None
    disk: DiskTier | None = None
    blocks: StagedBlocks | None = None
    draft: DraftDevice | None = None
    draft_costs: StepCostModel | None = None
    tracing: Tracing = OFF
    admin_port: int | None = None

    @property
    def tiers(self) -> tuple[HostTier | DiskTier, ...]:
        """The slower tiers, the fastest first."""
        return tuple(tier for tier in (self.host_tier, self.disk) if tier is not None)


def build_publisher(parts: WorkerParts) -> KvEventPublisher | None:
    """Build the publisher of KV events. Returns None without a feed."""
    if parts.feed is None:
        return None
    ttl_s = max(KV_EVENTS_TTL_S, KV_EVENTS_TTL_HEARTBEATS * parts.config.heartbeat_s)
    return KvEventPublisher(
        worker=parts.worker,
        pool=parts.pool,
        tiers={tier.tier: tier for tier in parts.tiers},
        feed=parts.feed,
        ttl_s=ttl_s,
        rng=parts.rng,
    )


def draft_cost_keeper(parts: WorkerParts) -> CostKeeper:
    """Return the keeper of the draft model's step costs. It stays empty without a draft model."""
    return CostKeeper(parts.draft_costs, parts.cost_store, "" if parts.draft is None else parts.draft.costs_key)


def build_draft_model(parts: WorkerParts, costs: CostKeeper) -> DraftModel | None:
    """Build the draft model of the engine. Returns None if the worker has none.

    costs: of its steps, which correct them.
    """
    if parts.draft is None:
        return None
    return DraftModel(
        parts.draft.executor,
        parts.draft.pool,
        vocab_size=parts.draft.vocab_size,
        max_model_len=parts.draft.engine_config.max_model_len,
        eos_token_ids=parts.engine_config.eos_token_ids,
        costs=lambda: costs.costs,
        clock=lambda: asyncio.get_running_loop().time(),
        on_step=lambda plan, step_s: costs.observe(work_of(plan), step_s),
    )


def build_owner(parts: WorkerParts, *, reload_prefix: ReloadPrefix, on_session_moved: SessionMoved) -> OwnerService:
    """Build the service that lets peers read this worker's KV.

    reload_prefix: reloads what they cannot read of a prefix
    on_session_moved: called when the session goes on at a peer that has read its KV
    """
    config = parts.config
    regions = parts.pool if parts.host_tier is None else WorkerRegions(parts.pool, parts.host_tier.slots)
    return OwnerService(
        worker=parts.worker,
        layout=parts.executor.layout,
        backend=parts.backend,
        pins=regions,
        lookup=regions.lookup,
        reload_prefix=reload_prefix,
        on_session_moved=on_session_moved,
        lease_s=config.lease_s,
        claim_timeout_s=config.kv_claim_timeout_s,
        reorder_window_s=config.transfer_reorder_window_s,
        tracing=parts.tracing,
    )


def build_reader(parts: WorkerParts, *, on_pull_end: Callable[[], None]) -> KvReader:
    """Build the reader of peers' KV. `on_pull_end` is called after each pull."""
    config = parts.config
    return KvReader(
        worker=parts.worker,
        layout=parts.executor.layout,
        backend=parts.backend,
        network=parts.network,
        pool=parts.pool,
        rng=parts.rng,
        times=ReaderTimes(
            lease_s=config.lease_s,
            renew_s=min(config.heartbeat_s, config.lease_s / 3),
            deadline_min_s=config.transfer_deadline_min_s,
            deadline_max_s=config.transfer_deadline_max_s,
        ),
        min_link_gbps=config.min_link_gbps,
        observer=PullEndObserver(parts.observer or NoObserver(), on_pull_end),
        tracing=parts.tracing,
        not_available=not_available(parts.backend),
    )
