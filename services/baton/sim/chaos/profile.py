"""Load, fault rates and settings of a storm. The settings of each seed are drawn at random."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from baton.core.kv.kv_layout import KvLayout
from baton.core.request import NO_SLO, Slo
from baton.runtime.config.settings import ClusterConfig
from baton.sim.chaos.random_pulls import RANDOM_PULLS
from baton.sim.sim_cluster import ClockModel, SimModel, sim_layout
from baton.sim.sim_executor import SimStepCost
from baton.sim.sim_network import Delays
from baton.sim.sim_transfer_backend import LinkModel

STUCK_S = 5.0
"""Time for which a stuck read makes no progress. Longer than the deadline of a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosProfile:
    """Load and faults of a storm.

    num_requests: requests within `duration_s` seconds.
    cancelled, stopped, hurried: shares of requests whose client cancels, that have a stop string, and that
        have a deadline of at most `hurried_s`.
    long: share of requests with several samples of `long_tokens`, one of which a stop string ends early. On
        slow devices the others take longer than `CancelAudit` lets an unwanted sample run.
    ruled: share of the requests without a stop string that have rules which forbid tokens.
    salted, scored: shares of requests with a salt of their cache, and with logprobs of the prompt.
    cuts_per_s, deaths_per_s, pauses_per_s, partitions_per_s, data_partitions_per_s, store_faults_per_s,
        clock_jumps_per_s, disk_faults_per_s: mean rates of the faults.
    down_s: longest time until a killed process is restarted.
    pause_s, partition_s, store_fault_s, disk_fault_s: shortest and longest duration.
    max_jump_s: longest jump of a clock.
    num_prefixes: number of distinct prompt prefixes, which requests share.
    max_prompt_tokens, max_tokens: limits of prompt and output length.
    """

    num_requests: int = 120
    duration_s: float = 8.0
    cancelled: float = 0.2
    stopped: float = 0.2
    hurried: float = 0.1
    hurried_s: float = 1.5
    long: float = 0.04
    long_tokens: int = 120
    ruled: float = 0.25
    salted: float = 0.1
    scored: float = 0.1
    cuts_per_s: float = 1.5
    deaths_per_s: float = 0.5
    pauses_per_s: float = 0.25
    partitions_per_s: float = 0.3
    data_partitions_per_s: float = 0.3
    store_faults_per_s: float = 0.4
    clock_jumps_per_s: float = 0.3
    disk_faults_per_s: float = 1.5
    down_s: float = 1.5
    pause_s: tuple[float, float] = (0.3, 20.0)
    partition_s: tuple[float, float] = (0.2, 4.0)
    store_fault_s: tuple[float, float] = (0.3, 4.0)
    disk_fault_s: tuple[float, float] = (0.3, 2.0)
    max_jump_s: float = 1.5
    num_prefixes: int = 6
    max_prompt_tokens: int = 120
    max_tokens: int = 24


_BASELINES = ("least_loaded", "round_robin", "random")
"""Policies that never pull prefixes, half of which are replaced by `random_pulls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormSettings:
    """Everything that a storm's seed determines before it begins.

    num_schedulers, num_gateways: processes besides the workers of `config`.
    slo: SLO of all requests.
    """

    config: ClusterConfig
    model: SimModel
    num_schedulers: int = 2
    num_gateways: int = 2
    slo: Slo = NO_SLO

    def __str__(self) -> str:
        config, model = self.config, self.model
        return (
            f"{config.prefill}P+{config.decode}D+{config.hybrid}H policy={config.policy} admission={config.admission} "
            f"block={config.block_size_tokens} blocks={model.num_blocks} step={config.step_tokens(on_gpu=False)} "
            f"seqs={config.max_num_seqs} step_s={model.step.base_s:g} lease={config.lease_s:g}s "
            f"attempts={config.max_attempts} queued={config.max_queued_requests} "
            f"host={config.host_kv_memory or 0} disk={config.disk_kv_size or 0} eviction={config.kv_eviction} "
            f"windows={model.windows} drafts={model.draft is not None} "
            f"fixed_addresses={model.has_fixed_addresses} stuck={model.link.stuck:g} "
            f"reused={model.link.reused:g}/{model.link.reused_reloads:g} late={model.delays.late:g} "
            f"two_sided={model.two_sided} failed={model.link.failed:g}"
        )


def draw_settings(rng: Random) -> StormSettings:
    """Draw the settings of one storm.

    Times are those of the tests: about a tenth of the defaults. Every role has at least two workers, so that
    one of them can fail.
    """
    block_size = rng.choice((4, 8, 16))
    values: dict[str, Any] = {
        "log_dir": None,
        "prefill": rng.choice((2, 2, 3)),
        "decode": rng.choice((2, 2, 3)),
        "hybrid": rng.choice((0, 0, 2)),
        "block_size_tokens": block_size,
        "max_num_batched_tokens": rng.choice((32, 64, 128)),
        "max_num_seqs": rng.choice((8, 16, 32)),
        "max_queued_jobs": rng.choice((64, 256)),
        "policy": rng.choice(("kv_centric", "kv_centric", "prefix_aware", "least_loaded", "round_robin", "random")),
        "admission": rng.choice(("off", "off", "early", "predictive")),
        "max_worker_queue_s": rng.choice((0.1, 1.0)),
        "max_queued_requests": rng.choice((0, 64, 1024)),
        "max_attempts": rng.choice((12, 16)),
        "heartbeat_s": rng.choice((0.3, 0.4)),
        "detection_s": 1.0,
        "lease_s": rng.choice((1.2, 2.0, 3.0)),
        "kv_claim_timeout_s": rng.choice((1.0, 2.0)),
        "transfer_reorder_window_s": rng.choice((0.3, 0.5)),
        "pull_wait_s": rng.choice((2.0, 3.0)),
        "session_grace_s": rng.choice((1.0, 2.0)),
        "scheduler_wait_s": 2.0,
        "transfer_deadline_min_s": 0.5,
        "transfer_deadline_max_s": 3.0,
        "drain_s": 5.0,
        "step_limit_s": 60.0,  # a pause is no stuck step
    }
    model = SimModel(
        num_blocks=rng.choice((480, 800, 1280)) // block_size,
        link=LinkModel(stuck=rng.choice((0.0, 0.003, 0.01)), stuck_s=STUCK_S, bytes_per_s=rng.choice((4e9, 4e8, 4e7))),
        delays=Delays(mean_s=rng.choice((0.000_2, 0.000_5, 0.002)), late=rng.choice((0.0, 0.02, 0.1))),
        clocks=ClockModel(max_base_s=100_000.0, max_drift=0.01),
        has_fixed_addresses=rng.random() < 0.5,
    )
    slo = Slo(ttft_s=rng.choice((None, 1.0, 3.0)), tpot_s=rng.choice((None, 0.1)))
    model = replace(
        model,
        step=SimStepCost(base_s=rng.choice((0.004, 0.004, 0.02))),
        link=replace(model.link, reused=rng.choice((0.0, 0.01))),
    )
    model = replace(model, link=replace(model.link, reused_reloads=rng.choice((0.0, 0.1))))
    windows = rng.choice(((0,), (0,), (0,), (9,), (24, 0), (6, 40)))
    draft = SimStepCost(base_s=0.0004, per_token_s=0.00001) if rng.random() < 0.3 else None
    model = replace(model, windows=windows, draft=draft, num_blocks=model.num_blocks * len(windows))
    values |= _draw_tiers(rng, sim_layout(block_size, windows), len(windows))
    model = replace(model, two_sided=rng.random() < 0.25)
    if model.two_sided:
        model = replace(model, link=replace(model.link, failed=rng.choice((0.0, 0.003))))
    if values["policy"] in _BASELINES and rng.random() < 0.5:
        values["policy"] = RANDOM_PULLS
    return StormSettings(
        config=ClusterConfig(**values), model=model, slo=slo if values["admission"] != "off" else NO_SLO
    )


def _draw_tiers(rng: Random, layout: KvLayout, num_tables: int) -> dict[str, Any]:
    """Draw the slower tiers of all workers: none, one or both. They are so small that content is evicted."""
    token_bytes = num_tables * layout.block_bytes // layout.block_size_tokens
    host_tokens, disk_tokens = rng.choice((240, 480)), rng.choice((480, 960))
    has_host, has_disk = rng.random() < 0.5, rng.random() < 0.5
    values: dict[str, Any] = {"kv_eviction": rng.choice(("value", "lru"))}
    if has_host:
        values["host_kv_memory"] = host_tokens * token_bytes
    if has_disk:
        values |= {"disk_kv": Path("simulated"), "disk_kv_size": disk_tokens * token_bytes}
    return values
