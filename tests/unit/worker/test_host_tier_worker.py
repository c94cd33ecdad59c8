"""Workers with a host tier: prompts whose KV was evicted from the device are reloaded, and peers pull them.

`SimExecutor` compares every slot that a sample attends to with the request's own history, so a wrong block
fails the test.
"""

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import Reason
from baton.core.kv.block_hash import chain
from baton.core.kv.kv_events import Tier
from baton.core.messages.jobs import Cancel, DecodeJob, PrefixSource
from baton.core.request import Sampling
from baton.sim.sim_tier import COPY_BYTES_PER_S, SimCopyRunner
from baton.worker.jobs.leg import chain_root
from baton.worker.tiers.running_calls import MAX_STOP_S
from baton.worker.worker_metrics import WorkerMetrics
from tests import builders
from tests.unit.worker.harness import BLOCK, Cluster, Node, cluster, expected_tokens, pair
from tests.unit.worker.job_builders import decode_job
from tests.unit.worker.scripted_gateway import Gateway
from tests.unit.worker.virtual_loop import virtual

NUM_TOKENS = 82
NUM_BLOCKS = 20
"""Full blocks before the last token of a prompt."""
P_BLOCKS = 40
MIB = 2**20


class Host:
    """A worker with a device of 40 blocks and a host tier, and a gateway's session to it."""

    def __init__(self, simulated: Cluster, node: Node, gateway: Gateway) -> None:
        self.cluster, self.node, self.gateway = simulated, node, gateway
        self.tier, self.reloads = next(iter(node.worker.kv.tiers), None), node.worker.kv.reloads
        self._num_sent = 0

    def send(self, prompt: int, **changes: object) -> DecodeJob:
        self._num_sent += 1
        tokens = decode_job(NUM_TOKENS, request=b"prompt-%d" % prompt).token_ids
        fields = {"request": b"request-%d" % self._num_sent, "token_ids": tokens, "num_prompt_tokens": NUM_TOKENS}
        job = decode_job(NUM_TOKENS, **(fields | {"sampling": Sampling(max_tokens=3, ignore_eos=True)} | changes))
        self.gateway.send(job)
        return job

    def hashes_of(self, prompt: int) -> list[bytes]:
        """Return the hashes of the blocks of a prompt that may come from a cache."""
        job = decode_job(NUM_TOKENS, request=b"prompt-%d" % prompt)
        root = chain_root(self.node.worker.layout.model_fingerprint, job.cache_salt, BLOCK)
        return list(chain(root, job.token_ids, BLOCK))[:NUM_BLOCKS]

    def beginning(self, prompt: int, num_blocks: int) -> dict[str, object]:
        """Return the changes of `send` to a prompt of which this many blocks may come from a cache."""
        tokens = decode_job(NUM_TOKENS, request=b"prompt-%d" % prompt).token_ids[: num_blocks * BLOCK + 1]
        return {"token_ids": tokens, "num_prompt_tokens": len(tokens)}

    async def answer(self, prompt: int, **changes: object) -> dict[str, int]:
        """Send a prompt and check the answer. Returns the cached tokens by tier."""
        job = self.send(prompt, **changes)
        deltas = await self.gateway.ended(job.job)
        assert self.gateway.tokens(job.job) == expected_tokens(job)
        usage = deltas[0].usage
        assert usage is not None
        return dict(usage.num_cached_tokens)


async def start(simulated: Cluster, name: str = "p", **changes: object) -> Host:
    settings = {"num_blocks": P_BLOCKS, "max_num_batched_tokens": 64, "host_kv_memory": 4 * MIB} | changes
    node = simulated.start(name, **settings)
    host = Host(simulated, node, simulated.gateway(node, f"g-{name}"))
    await host.gateway.connect()
    return host


@virtual
async def test_an_evicted_prompt_is_reloaded() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        assert await host.answer(0) == {}
        await asyncio.sleep(1)
        for prompt in (1, 2):
            await host.answer(prompt)
        await asyncio.sleep(1)
        cached = await host.answer(0)
        assert sum(cached.values()) == NUM_BLOCKS * BLOCK
        assert cached[Tier.HOST.value] > 0
        assert host.reloads.totals.reloaded_tokens == cached[Tier.HOST.value]
        await simulated.until_clean()


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8, 13])
@virtual
async def test_copies_end_although_the_host_tier_is_full(num_slots: int) -> None:
    """Copies of idle blocks must not displace each other for ever."""
    async with cluster() as simulated:
        host = await start(
            simulated, host_kv_memory=num_slots * builders.windowed_layout((0, 0), block_size_tokens=BLOCK).block_bytes
        )
        for prompt in (0, 1, 2, 1, 0, 3):
            await host.answer(prompt)
        await asyncio.sleep(1)
        num_stored = host.tier.totals.stored_blocks
        assert num_stored >= num_slots
        await asyncio.sleep(10)
        assert host.tier.totals.stored_blocks == num_stored
        await simulated.until_clean()


@pytest.mark.parametrize("kv_windows", [(9, 9), (0, 9), (2, 0, 13)], ids=str)
@virtual
async def test_windowed_tables_are_reloaded(kv_windows: tuple[int, ...]) -> None:
    async with cluster() as simulated:
        host = await start(simulated, kv_windows=kv_windows, num_blocks=80)
        await host.answer(0)
        await asyncio.sleep(1)
        for prompt in range(1, 6):
            await host.answer(prompt)
        await asyncio.sleep(1)
        assert sum((await host.answer(0)).values()) == NUM_BLOCKS * BLOCK
        assert host.reloads.totals.reloads > 0
        await simulated.until_clean()


@virtual
async def test_without_a_tier_the_prompt_is_computed() -> None:
    async with cluster() as simulated:
        host = await start(simulated, host_kv_memory=0)
        for prompt in (0, 1, 2):
            await host.answer(prompt)
            await asyncio.sleep(1)
        assert sum((await host.answer(0)).values()) < NUM_BLOCKS * BLOCK


@virtual
async def test_jobs_with_one_evicted_prompt_reload_it_once() -> None:
    async with cluster() as simulated:
        host = await start(simulated, num_blocks=60)
        for prompt in (0, 1, 2, 3):
            await host.answer(prompt)
            await asyncio.sleep(1)
        before = host.tier.totals.loaded_blocks
        jobs = [host.send(0) for _ in range(4)]
        for job in jobs:
            await host.gateway.ended(job.job)
            assert host.gateway.tokens(job.job) == expected_tokens(job)
        assert 0 < host.tier.totals.loaded_blocks - before <= NUM_BLOCKS
        await simulated.until_clean()


@virtual
async def test_a_job_that_is_cancelled_during_its_reload_leaves_nothing() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        for prompt in (0, 1, 2):
            await host.answer(prompt)
            await asyncio.sleep(1)
        for after_s in (0.0, 0.000_01, 0.000_1, 0.001):
            job = host.send(0)
            await asyncio.sleep(after_s)
            host.gateway.send(Cancel(job=job.job, reason=Reason.CANCELLED))
            await host.gateway.failed(job.job)
        await simulated.until_clean()
        assert sum((await host.answer(0)).values()) == NUM_BLOCKS * BLOCK


@virtual
async def test_a_job_does_not_wait_for_a_reload_longer_than_computing_takes() -> None:
    async with cluster() as simulated:
        host = await start(simulated, num_blocks=80)
        for prompt in range(5):
            await host.answer(prompt)
            await asyncio.sleep(1)
        runner, go_on = host.tier._runner, asyncio.Event()

        class Slow:
            async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
                await go_on.wait()
                return await runner.run(copy, num_bytes)

        host.tier._runner = Slow()
        began_s = asyncio.get_running_loop().time()
        assert Tier.HOST.value not in await host.answer(0)
        assert asyncio.get_running_loop().time() - began_s < 2.0
        assert host.reloads.totals.late == 1
        assert host.reloads.num_loading_blocks[Tier.HOST] > 0
        go_on.set()
        await simulated.until_clean()
        assert host.reloads.num_loading_blocks[Tier.HOST] == 0


@virtual
async def test_a_prediction_contains_the_reloads_under_way() -> None:
    async with cluster() as simulated:
        host = await start(simulated, num_blocks=120, kv_eviction="lru")
        hashes = {prompt: host.hashes_of(prompt) for prompt in range(8)}
        for prompt in hashes:
            await host.answer(prompt)
            await asyncio.sleep(1)
        first, second = (host.reloads.plan(hashes[prompt]) for prompt in (0, 1))
        assert first is not None
        assert second is not None
        host.reloads.start(hashes[0])
        later = host.reloads.plan(hashes[1])
        assert later is not None
        assert later.predicted_s == pytest.approx(first.predicted_s + second.predicted_s)
        (tier,) = host.node.worker.report(1, ()).tiers
        assert tier.loading_bytes == len(first.missing) * host.tier.block_bytes
        await simulated.until_clean()


@virtual
async def test_a_prediction_contains_what_loads_take_beyond_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    run, delay_s = SimCopyRunner.run, 0.004

    async def late(self: SimCopyRunner, copy: Callable[[], None], num_bytes: int) -> float:
        await asyncio.sleep(delay_s)  # as for a thread that is not scheduled yet: no part of the time of the copy
        return await run(self, copy, num_bytes)

    async with cluster() as simulated:
        host = await start(simulated, num_blocks=120, kv_eviction="lru")
        hashes = {prompt: host.hashes_of(prompt) for prompt in range(8)}
        for prompt in hashes:
            await host.answer(prompt)
            await asyncio.sleep(1)
        monkeypatch.setattr(SimCopyRunner, "run", late)
        first, second = (host.reloads.plan(hashes[prompt]) for prompt in (0, 1))
        await host.reloads.reload(hashes[0])
        later = host.reloads.plan(hashes[1])
        assert None not in (first, second, later)
        assert later.predicted_s == pytest.approx(second.predicted_s + delay_s)
        (tier,) = host.node.worker.report(1, ()).tiers
        assert tier.load_overhead_s == pytest.approx(delay_s, rel=0.1)
        await simulated.until_clean()


@virtual
async def test_content_that_is_used_again_on_the_device_is_evicted_last_from_the_tier() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        await host.answer(0)
        await asyncio.sleep(1)
        slots = host.tier.slots
        known = [slots.slot_of(each) for each in host.hashes_of(0)]
        assert not all(slots._content[slot].is_reused for slot in known)
        await host.answer(0)
        await asyncio.sleep(1)
        assert all(slots._content[slot].is_reused for slot in known)


@virtual
async def test_a_failed_copy_fails_no_request() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        for prompt in (0, 1, 2):
            await host.answer(prompt)
            await asyncio.sleep(1)
        copies = host.tier._copies

        def fail(*_: object) -> None:
            raise RuntimeError("the device failed")

        copies.to_device = fail
        assert (await host.answer(0)).get(Tier.HOST.value, 0) == 0
        assert host.tier.totals.failed_copies == 1
        await simulated.until_clean()


@pytest.mark.parametrize("two_sided", [False, True])
@virtual
async def test_a_peer_pulls_what_only_the_tier_has(two_sided: bool) -> None:
    async with cluster(two_sided=two_sided) as simulated:
        host, peer = await start(simulated), await start(simulated, "q", num_blocks=128)
        for prompt in (0, 1, 2):
            await host.answer(prompt)
            await asyncio.sleep(1)
        source = PrefixSource(worker=host.node.ref, num_blocks=NUM_BLOCKS)
        assert await peer.answer(0, prefix_source=source) == {Tier.DEVICE.value: NUM_BLOCKS * BLOCK}
        assert any("tier" in owner for _, owner in simulated.fabric.pairs)
        await simulated.until_clean()


@virtual
async def test_a_decode_worker_does_not_pull_what_it_has_reloaded() -> None:
    settings = {"num_blocks": P_BLOCKS, "p_blocks": 200, "host_kv_memory": 4 * MIB}
    async with pair(**settings) as workers:
        tokens = [decode_job(NUM_TOKENS, request=b"prompt-%d" % n).token_ids for n in range(4)]
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        for number, prompt in enumerate((0, 1, 2, 0)):
            _, decode = workers.send(
                num_tokens=NUM_TOKENS, request=b"r%d" % number, token_ids=tokens[prompt], sampling=sampling
            )
            deltas = await workers.to_d.ended(decode.job)
            assert workers.to_d.tokens(decode.job) == expected_tokens(decode)
            await asyncio.sleep(1)
        assert workers.d.worker.kv.reloads is not None
        assert workers.d.worker.kv.reloads.totals.reloads == 1
        timeline = deltas[-1].timeline
        assert timeline is not None
        assert timeline.num_cached_tokens > 0
        await workers.until_clean()


@virtual
async def test_report_and_metrics_show_the_tier() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        for prompt in (0, 1, 2, 0):
            await host.answer(prompt)
            await asyncio.sleep(1)
        counts, totals = host.tier.counts(), host.tier.totals
        (reported,) = simulated.scheduler.reports["p"][-1].tiers
        assert (reported.tier, reported.total, reported.held) == ("host", counts.total, counts.held)
        assert reported.load_bytes_per_s == pytest.approx(COPY_BYTES_PER_S)
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        for _ in range(2):
            metrics.refresh(host.node.worker)
        value = registry.get_sample_value
        assert value("baton_kv_blocks", {"tier": "host", "state": "cached"}) == counts.held > 0
        assert value("baton_tier_blocks_total", {"tier": "host", "direction": "store"}) == totals.stored_blocks > 0
        assert value("baton_tier_blocks_total", {"tier": "host", "direction": "load"}) == totals.loaded_blocks > 0
        assert value("baton_reloads_total", {"outcome": "complete"}) == 1
        assert value("baton_reloaded_tokens_total") == host.reloads.totals.reloaded_tokens
        predicted_s, actual_s = value("baton_predicted_reload_seconds_total"), value("baton_reload_seconds_total")
        assert predicted_s == pytest.approx(actual_s, rel=0.1)
        assert value("baton_reload_predicted_over_actual_ratio_count") == 1
        assert value("baton_reload_predicted_over_actual_ratio_sum") == pytest.approx(1.0, rel=0.1)


@virtual
async def test_schedulers_learn_what_the_tier_holds() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        for prompt in (0, 1, 2):
            await host.answer(prompt)
            await asyncio.sleep(1)
        snapshot = await simulated.feed.snapshot(host.node.ref)
        assert snapshot is not None
        events = (await simulated.feed.read({host.node.ref: snapshot.event_seq}, max_events=1000, wait_s=0)).get(
            host.node.ref, ()
        )
        known = {tier: set(hashes) for tier, hashes in snapshot.hashes.items()}
        for event in events:
            known.setdefault(event.tier, set())
            known[event.tier] = (
                known[event.tier] | set(event.hashes)
                if event.kind.value == "stored"
                else known[event.tier] - set(event.hashes)
            )
        assert known[Tier.HOST] == set(host.tier.announced_hashes()) != set()
        assert known[Tier.DEVICE] == set(host.node.pool.announced_hashes())


@virtual
async def test_the_end_of_a_shorter_prompt_is_announced_by_the_tier_that_has_it() -> None:
    async with cluster() as simulated:
        host = await start(simulated, kv_announce_every=8)
        await host.answer(0)
        await asyncio.sleep(1)
        end = host.hashes_of(0)[9]
        assert host.tier.holds(end)
        assert end not in host.tier.announced_hashes()
        await host.answer(0, **host.beginning(0, 10))
        assert end in host.tier.announced_hashes()
        await simulated.until_clean()


@virtual
async def test_a_copy_that_never_ends_does_not_keep_the_worker_from_stopping() -> None:
    async with cluster() as simulated:
        host = await start(simulated)
        await host.answer(0)

        class Stuck:
            async def run(self, copy: object, num_bytes: int) -> float:
                await asyncio.Event().wait()
                return 0.0

        host.tier._runner = Stuck()
        await host.answer(1)
        await asyncio.sleep(1)
        assert host.tier.counts().busy > 0
        began_s = asyncio.get_running_loop().time()
        await simulated.kill("p")
        assert asyncio.get_running_loop().time() - began_s < 2 * MAX_STOP_S


@pytest.mark.parametrize(("host_kv_memory", "least", "most"), [(0, 0.3, 1.0), (4 * MIB, 0.0, 0.0)])
@virtual
async def test_report_says_how_much_evicted_kv_is_computed_again(
    host_kv_memory: int, least: float, most: float
) -> None:
    """Three prompts in turn need more blocks than the device has. What the host tier has is not lost."""
    async with cluster() as simulated:
        host = await start(simulated, host_kv_memory=host_kv_memory)
        assert host.node.worker.report(1, ()).evicted_reuse == 0.0
        for prompt in (0, 1, 2) * 4:
            await host.answer(prompt)
            await asyncio.sleep(1)
        assert least <= host.node.worker.report(2, ()).evicted_reuse <= most
        await simulated.until_clean()
