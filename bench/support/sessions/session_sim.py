"""Plays plans of sessions on a simulated cluster whose true costs deviate from the known ones."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from baton.core.client_api import Caller, ChoiceDelta
from baton.core.step_cost import StepCostModel
from baton.engine.state.step import StepPlan
from baton.gateway.input.client_call import Endpoint
from baton.runtime.config.settings import ClusterConfig
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel, sim_layout
from baton.sim.sim_executor import SimStepCost
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.plan.prompt_tokens import tokens_of

BLOCK_SIZE_TOKENS = 16
BLOCK_BYTES = sim_layout(BLOCK_SIZE_TOKENS).block_bytes
DEVIATION = 0.3
RELOAD_GAIN, DISK_GAIN = 8.0, 2.0
"""Time to compute a block over that to reload it, as assumed: from host memory about as for an 8B model over
PCIe 4.0, from a disk at a quarter of that speed."""
START_S = 1.0
"""The workers have joined by then."""

Eviction = Literal["value", "lru"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviatingCost(SimStepCost):
    """A device whose steps cost less and whose tokens cost more than its model says, each by `DEVIATION`.

    In addition, each step deviates at random by as much.
    """

    base_s: float = 0.004
    per_token_s: float = 0.0002

    @property
    def model(self) -> StepCostModel:
        known = SimStepCost(base_s=self.base_s / (1 - DEVIATION), per_token_s=self.per_token_s / (1 + DEVIATION))
        return known.model

    def step_s(self, plan: StepPlan) -> float:
        noise = Random(plan.step_id).uniform(1 - DEVIATION, 1 + DEVIATION)
        return (self.base_s + self.per_token_s * plan.num_tokens) * noise


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTiers:
    """The tiers of the simulated cluster, in blocks of each worker.

    workers: hybrid workers. pairs: prefill workers, and as many decode workers.
    policy: as in `--policy`.
    reload_gain, disk_gain: how many times faster a block is reloaded from host memory, and from a disk, than
        it is computed.
    copy_deviation: share by which the time of a copy, a read or a write differs from that, at random and at
        most.
    """

    workers: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int = 0
    pairs: int = 0
    retain_blocks: int | None = None
    policy: str = "kv_centric"
    reload_gain: float = RELOAD_GAIN
    disk_gain: float = DISK_GAIN
    copy_deviation: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all tiers of all workers."""
        blocks = self.device_blocks + self.host_blocks + self.disk_blocks
        return (self.workers + 2 * self.pairs) * blocks * BLOCK_SIZE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The TTFT of a request, and how much of its prompt was reused."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


class _Client:
    """Keeps the tokens of an answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        self.tokens += choice.token_ids


class SessionCluster:
    """A running simulated cluster."""

    def __init__(self, tiers: SimTiers, eviction: Eviction, seed: int) -> None:
        """Use it inside a virtual-time loop, after `start`."""
        settings: dict[str, Any] = {
            "prefill": tiers.pairs,
            "decode": tiers.pairs,
            "hybrid": tiers.workers,
            "log_dir": None,
            "policy": tiers.policy,
            "block_size_tokens": BLOCK_SIZE_TOKENS,
            "host_kv_memory": tiers.host_blocks * BLOCK_BYTES,
            "disk_kv": Path("simulated") if tiers.disk_blocks else None,
            "disk_kv_size": tiers.disk_blocks * BLOCK_BYTES or None,
            "kv_eviction": eviction,
            "kv_retain_memory": None if tiers.retain_blocks is None else tiers.retain_blocks * BLOCK_BYTES,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
        }
        config = ClusterConfig(**settings)
        cost = DeviatingCost()
        block_s = BLOCK_SIZE_TOKENS * cost.per_token_s
        model = SimModel(
            num_blocks=tiers.device_blocks,
            max_model_len=1024,
            step=cost,
            copy_bytes_per_s=tiers.reload_gain * BLOCK_BYTES / block_s,
            disk_bytes_per_s=tiers.disk_gain * BLOCK_BYTES / block_s,
            copy_deviation=tiers.copy_deviation,
        )
        self.cluster = SimCluster(config, model, seed)

    async def start(self) -> None:
        """Start all processes, and wait until the workers have joined."""
        await self.cluster.start()
        await asyncio.sleep(START_S)

    async def send(
        self, prompt: tuple[int, ...], num_output_tokens: int, **fields: object
    ) -> tuple[Played, tuple[int, ...]]:
        """Send a request with these further fields. Returns what it got, and its answer."""
        loop, client = asyncio.get_running_loop(), _Client()
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "timeline": True,
            **fields,
        }
        gateway = self.cluster.gateway
        call = await gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=loop.time())
        outcome = await gateway.run(call, client)
        timeline = outcome.timeline[0]
        played = Played(
            ttft_s=timeline.ttft_s or 0.0,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=sum(timeline.cached_tokens_by_tier.values()),
        )
        return played, tuple(client.tokens)


def play(plan: Plan, tiers: SimTiers, eviction: Eviction, *, seed: int = 0) -> list[Played]:
    """Play a plan and return what each request got, by index. Each later turn follows the answer before."""

    async def main() -> list[Played]:
        running = SessionCluster(tiers, eviction, seed)
        await running.start()
        results = await _play(running, plan)
        await running.cluster.aclose()
        return [results[index] for index in range(len(plan.requests))]

    return virtual_time.run(main())


async def _play(running: SessionCluster, plan: Plan) -> Mapping[int, Played]:
    sessions: dict[str, list[PlannedRequest]] = {}
    for request in plan.requests:
        sessions.setdefault(request.session or f"r{request.index}", []).append(request)
    results: dict[int, Played] = {}
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def client(name: str, requests: list[PlannedRequest]) -> None:
        answers: dict[int, tuple[int, ...]] = {}
        await asyncio.sleep(max(0.0, began_s + (requests[0].at_s or 0.0) - loop.time()))
        for request in requests:
            if request.after is not None:
                await asyncio.sleep(request.think_s)
            prompt = tokens_of(plan, request, answers)
            results[request.index], answers[request.index] = await running.send(
                prompt, request.output_tokens, session=name
            )

    await asyncio.gather(*(client(name, requests) for name, requests in sessions.items()))
    return results


def flood(tiers: SimTiers, eviction: Eviction, *, retain_s: float | None, num_prompts: int, seed: int = 0) -> "Flood":
    """Let a session pause while one-off prompts come that fill the tiers several times."""

    async def main() -> Flood:
        running, rng = SessionCluster(tiers, eviction, seed), Random(seed)
        await running.start()

        def tokens(number: int) -> tuple[int, ...]:
            return tuple(rng.randrange(VOCABULARY_BEGIN, VOCABULARY_END) for _ in range(number))

        prompt = tokens(PREFIX_TOKENS)
        hints = {} if retain_s is None else {"retain_s": retain_s}
        _, answer = await running.send(prompt, 8, session="kept", **hints)
        most_retained = 0
        for _ in range(num_prompts):
            await running.send(tokens(ONE_OFF_TOKENS), 2, **hints)
            for worker in running.cluster.workers.values():
                orders = (worker.kv.retention.device, worker.kv.retention.host)
                most_retained = max([most_retained, *(order.num_retained for order in orders if order is not None)])
        following, _ = await running.send((*prompt, *answer, *tokens(16)), 2, session="kept")
        await running.cluster.aclose()
        return Flood(following=following, most_retained_blocks=most_retained)

    return virtual_time.run(main())


PREFIX_TOKENS, ONE_OFF_TOKENS = 320, 400
VOCABULARY_BEGIN, VOCABULARY_END = 1, 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """The turn after a flood, and the most blocks that one tier has retained."""

    following: Played
    most_retained_blocks: int

    @property
    def hit_ratio(self) -> float:
        """Share of the session's earlier prompt that the turn found in the cache."""
        return min(1.0, self.following.num_cached_tokens / (PREFIX_TOKENS // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS))


def with_blocks(tiers: SimTiers, blocks: int) -> SimTiers:
    """Return tiers with as many blocks on the device as in the host tier, `blocks` over all workers."""
    each = max(1, blocks // (2 * tiers.workers))
    return replace(tiers, device_blocks=each, host_blocks=each)
