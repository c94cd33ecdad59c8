"""A session whose KV is on the disk of its decode worker only, after a restart of all workers."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.core.cluster.placement import Placement
from baton.core.cluster.worker_report import WorkerRole
from baton.scheduler.policies import pulled_prefixes
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel, sim_layout
from baton.sim.sim_executor import SimStepCost
from baton.worker.tiers import warm_start
from tests.sim.one_request import Answer, ask
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim

BLOCK, PROMPT_TOKENS, ANSWER_TOKENS = 8, 160, 40
SLOTS = 64
COPY_S, START_S = 5.0, 5.0
"""Time for the copies to the disks, and for the start of all workers."""


@dataclass(frozen=True, kw_only=True)
class NextTurn:
    """The first turn of a session after the restart. It asks for one token, so no decode worker takes it.

    loaded_blocks: of all disks since the start
    """

    placement: Placement
    answer: Answer
    loaded_blocks: int

    @property
    def computed_tokens(self) -> int:
        return sum(leg.num_computed_tokens for leg in self.answer.known_timeline.legs)


async def restart(cluster: SimCluster) -> None:
    """Kill all workers and start them again. Prefill workers lose their disks."""
    roles = {name: worker.role for name, worker in cluster.workers.items()}
    for name in roles:
        await cluster.kill(name)
        if roles[name] is WorkerRole.PREFILL:
            del cluster.disks[name]
    for name, role in roles.items():
        cluster.start_worker(name, role)
    await asyncio.sleep(START_S)


async def session() -> NextTurn:
    tiers = {"disk_kv": Path("simulated"), "disk_kv_size": SLOTS * sim_layout(BLOCK).block_bytes}
    model = SimModel(num_blocks=128, step=SimStepCost(per_token_s=0.001), max_model_len=512)
    cluster = SimCluster(replace(config("kv_centric"), **tiers), model, seed=5)
    await cluster.start()
    await asyncio.sleep(START_S)
    prompt = [1 + index % 200 for index in range(PROMPT_TOKENS)]
    first = await ask(cluster, 1, prompt=prompt, max_tokens=ANSWER_TOKENS)
    await asyncio.sleep(COPY_S)
    await restart(cluster)
    second = await ask(cluster, 2, prompt=[*prompt, *first.token_ids, *range(1, 9)], max_tokens=1)
    (record,) = await cluster.schedulers["scheduler"].explain(bytes.fromhex(second.known_timeline.request_id))
    assert record.placement is not None
    loaded = sum(totals.loaded_blocks for _, totals in cluster.tier_totals)
    await asyncio.sleep(COPY_S)
    for worker in cluster.workers.values():
        worker.check_clean()
    await cluster.aclose()
    return NextTurn(placement=record.placement, answer=second, loaded_blocks=loaded)


@pytest.fixture(autouse=True)
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the content of disks there until requests ask for it."""
    monkeypatch.setattr(warm_start, "LEFT_FREE_SHARE", 1.0)


def test_a_session_goes_on_from_the_disk_of_its_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = virtual_time.run(session())
    source, num_blocks = pulled.placement.prefix_source, (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK - 1
    assert source is not None
    assert source.worker.worker_id.startswith("decode")
    assert source.num_blocks == source.num_disk_blocks == pulled.loaded_blocks == num_blocks
    monkeypatch.setattr(pulled_prefixes, "_most_blocks", lambda inputs, i: inputs.prompt.pullable_blocks.get(i, 0))
    computed = virtual_time.run(session())
    assert computed.placement.prefix_source is None
    assert computed.computed_tokens - pulled.computed_tokens == num_blocks * BLOCK
    assert pulled.answer.token_ids == computed.answer.token_ids
    assert pulled.answer.known_timeline.ttft_s < 0.2 * computed.answer.known_timeline.ttft_s
