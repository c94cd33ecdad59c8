"""Opens an emulated device: real KV memory and transfers, but steps only wait for their predicted time."""

from baton.core.errors import ConfigError
from baton.core.ids import WorkerRef
from baton.core.step_cost import StepCostModel
from baton.engine.constraints.grammar_tokenizer import read_grammar_tokenizer
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.executors.emulated import EmulatedExecutor
from baton.engine.executors.emulated_model import read_emulated_model
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.sizing import free_host_bytes
from baton.engine.speculation.modes import finds_forced_tokens
from baton.runtime.config.durations import format_duration
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.config.worker_settings import draft_model_of, parse_step_costs
from baton.worker.costs.step_cost_keeper import work_of
from baton.worker.device.kv_memory.kv_registration import register_host_memory
from baton.worker.device.kv_memory.open_disk import host_copies, open_disk_tier
from baton.worker.device.kv_memory.open_tier import num_slots_for_worker, open_host_tier
from baton.worker.device.worker_device import Device, engine_config_of, kv_summary, num_blocks_for_worker
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.tiers.tier_copies import CopyThread


def open_emulated_device(config: WorkerConfig, worker: WorkerRef) -> Device:
    """Open a device whose step times come from `emulated_costs`.

    It loads no weights and does not import torch. It samples an end-of-sequence token only where a grammar is
    complete: other answers end at max_tokens or at a stop string.
    """
    from baton.model.loading.model_source import resolve_model

    if draft_model_of(config.speculate) is not None:
        raise ConfigError(
            f"--speculate {config.speculate}: an emulated device runs no draft model; use auto, or another --device"
        )
    costs = parse_step_costs(config.emulated_costs)
    path = resolve_model(config.model)
    model = read_emulated_model(path, dtype=config.dtype, kv_dtype=config.kv_dtype, max_model_len=config.max_model_len)
    layout = model.layout(config.block_size_tokens)
    free = free_host_bytes()
    num_blocks = num_blocks_for_worker(config, layout, model.max_model_len, free)
    num_slots = num_slots_for_worker(config, layout, num_blocks, free)
    kv, registered = register_host_memory(config, worker, layout, num_blocks, num_slots)
    tier = open_host_tier(worker, registered, kv=kv, shares_cores=False)
    disk = open_disk_tier(config, worker, layout, host_copies(kv), shares_cores=False)
    constraints = TokenConstraints(
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer=read_grammar_tokenizer(path, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids),
        finds_forced=finds_forced_tokens(config.speculate),
    )
    pool = BlockPool(
        num_blocks, config.block_size_tokens, registered.generations, announce_every=config.kv_announce_every
    )
    return Device(
        executor=EmulatedExecutor(
            layout=layout,
            kv=kv,
            vocab_size=model.vocab_size,
            step_seconds=lambda plan: costs.step_seconds(work_of(plan)),
            eos_token_ids=model.eos_token_ids,
            constraints=constraints,
        ),
        engine_config=engine_config_of(config, model.max_model_len, eos_token_ids=model.eos_token_ids),
        pool=pool,
        backend=registered.backend,
        constraints=constraints,
        summary=f"emulated, {_costs_summary(costs)}, {kv_summary(config, layout, num_blocks, tier, disk)}",
        host_tier=tier,
        disk=disk,
        blocks=StagedBlocks(layout.block_bytes, host_copies(kv), CopyThread()),
        close_memory=registered.close,
        costs=costs,
    )


def _costs_summary(costs: StepCostModel) -> str:
    step, token, seq = map(format_duration, (costs.step_s, costs.prefill_token_s, costs.decode_seq_s))
    return f"{step} a step, {token} a prompt token, {seq} a decoding sequence"
