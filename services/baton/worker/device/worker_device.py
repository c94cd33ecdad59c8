"""`Device`: the executor, engine limits, block pool and transfer backend of one worker, and how they are
sized."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import windows_text
from baton.core.step_cost import StepCostModel
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.sizing import DEVICE_SHARE, HOST_SHARE, num_kv_blocks
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.step import Executor
from baton.runtime.config.byte_sizes import MIB
from baton.runtime.config.settings import WorkerConfig
from baton.transfer.backend import TransferBackend
from baton.worker.device.gpu_use import step_tokens_of
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDevice:
    """A draft model with its own executor and KV memory, see `Device`.

    vocab_size: of the model that verifies: drafts have ids below it
    """

    executor: Executor
    engine_config: EngineConfig
    pool: BlockPool
    vocab_size: int
    summary: str
    costs_key: str
    costs: StepCostModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Everything that a worker computes with and moves KV with.

    summary: one line for logs and the console
    constraints: prepares grammars and computes masks; the executor has the same object
    close_memory: frees the KV memory; call it after executor and backend are closed
    costs: step costs that are known without measuring; None otherwise
    costs_key: key under which measured step costs are stored; empty if they are neither measured nor stored
    draft: the draft model; None without one
    host_tier, disk: the host tier of the KV and the disk tier; None without one
    blocks: copies blocks as bytes, for exports and imports; None if the device cannot
    """

    executor: Executor
    engine_config: EngineConfig
    pool: BlockPool
    backend: TransferBackend
    constraints: TokenConstraints
    summary: str
    close_memory: Callable[[], None]
    costs: StepCostModel | None = None
    costs_key: str = ""
    draft: DraftDevice | None = None
    host_tier: HostTier | None = None
    disk: DiskTier | None = None
    blocks: StagedBlocks | None = None

    async def aclose(self) -> None:
        """Close the executor after its current step, wait briefly for running reads, then free the memory."""
        await self.executor.aclose()
        if self.draft is not None:
            await self.draft.executor.aclose()
        await self.backend.aclose()
        for copying in (self.host_tier, self.disk, self.blocks):
            if copying is not None:
                await copying.aclose()
        self.constraints.close()
        self.close_memory()


class DraftSize(Protocol):
    """Sizes of a draft model. layout: of its KV. step_bytes: peak activations of its largest step."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def step_bytes(self) -> int: ...


def engine_config_of(config: WorkerConfig, max_model_len: int, eos_token_ids: tuple[int, ...]) -> EngineConfig:
    """Return the engine limits of a worker, from its settings and its model."""
    return EngineConfig(
        max_num_batched_tokens=step_tokens_of(config),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size_tokens=config.block_size_tokens,
        eos_token_ids=eos_token_ids,
        max_waiting_seqs=config.max_queued_jobs,
        targets=config.target_factors,
    )


def num_blocks_for_worker(
    config: WorkerConfig,
    layout: KvLayout,
    max_model_len: int,
    free_bytes: int,
    *,
    step_bytes: int = 0,
    is_host: bool = True,
    draft: DraftSize | None = None,
) -> int:
    """Return how many KV blocks this worker allocates.

    free_bytes: free host memory, or this worker's part of the free GPU memory; step_bytes: peak activations
    of the largest step; draft: a draft model, which holds as many tokens, and takes turns with the model.
    """
    return num_kv_blocks(
        layout,
        draft_block_bytes=0 if draft is None else -(-draft.layout.block_bytes // num_blocks_per_draft_block(layout)),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        chunk_tokens=step_tokens_of(config),
        free=free_bytes,
        step_bytes=step_bytes if draft is None else max(step_bytes, draft.step_bytes),
        share=HOST_SHARE if is_host else DEVICE_SHARE,
        num_sharing=config.workers_on_host if is_host else 1,  # free GPU memory is divided by the caller
        kv_memory=config.kv_memory,
    )


def num_blocks_per_draft_block(layout: KvLayout) -> int:
    """Return for how many KV blocks of the model a draft model gets one.

    A block of a draft model holds all its layers, while the model has a block for each table. Those without
    a window hold all tokens of a sequence, and so must the draft model.
    """
    return max(1, sum(not table.window for table in layout.tables))


def kv_summary(
    config: WorkerConfig, layout: KvLayout, num_blocks: int, tier: HostTier | None, disk: DiskTier | None
) -> str:
    """Describe the KV memory, with the slots of the host tier and those of the disk tier, for the one-line
    device summary."""
    size_mib = num_blocks * layout.block_bytes / MIB
    blocks = f"{num_blocks} blocks of {layout.block_size_tokens} tokens"
    if len(layout.tables) > 1:
        blocks += f" for {windows_text(layout.tables)}"
    slower = ""
    if tier is not None:
        slower = f", {tier.slots.num_slots * layout.block_bytes / MIB:.0f} MiB of host KV"
    if disk is not None:
        slower += (
            f", {disk.slots.num_slots * layout.block_bytes / MIB:.0f} MiB of disk KV ({disk.num_restored} blocks kept)"
        )
    return f"KV {blocks} in {layout.kv_dtype} ({size_mib:.0f} MiB){slower}, {config.transfer}"
