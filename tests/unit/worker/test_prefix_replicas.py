"""Tests of the budget for replicas, which are evicted first until a second request uses them."""

import asyncio
from typing import Any

import pytest

from baton.core.kv.block_hash import BlockHash, chain
from baton.core.request import NO_HINTS, Sampling, SessionHints, SessionKey
from baton.sim.sim_transfer_backend import LinkModel
from baton.transfer.reader.pull import Pull
from baton.worker.jobs import prefix_puller
from baton.worker.jobs.leg import chain_root
from baton.worker.jobs.prefix_puller import MAX_PULLED_SHARE, PrefixPuller
from tests.unit.worker.harness import BLOCK, Node
from tests.unit.worker.prefix_trio import BLOCK_BYTES, NUM_BLOCKS, PROMPT, Trio, trio
from tests.unit.worker.virtual_loop import virtual

OTHER = b"prompt-1"
HYBRID = ("hybrid", "hybrid")
SESSION = SessionHints(session="s")
P_BLOCKS = 80
"""Budget for exactly one whole prefix."""
assert int(MAX_PULLED_SHARE * P_BLOCKS) == NUM_BLOCKS


def copies(node: Node) -> tuple[int, int]:
    node.pool.check()
    return node.pool.num_replicas, node.pool.num_idle_replicas


def has_moved(node: Node) -> bool:
    """Return True if the session goes on at another worker."""
    owner = node.worker.kv.retention.owners.find(SessionKey("default", "s"))
    assert owner is not None
    return owner.has_moved


def hashes(workers: Trio, prompt: bytes) -> list[BlockHash]:
    job, _ = workers.jobs(prompt=prompt)
    return list(chain(chain_root(workers.p.layout.model_fingerprint, b"", BLOCK), job.token_ids, BLOCK))


@virtual
async def test_pulled_prefix_is_announced_although_no_prompt_follows() -> None:
    async with trio(kv_announce_every=8) as workers:
        await workers.hold()
        puller = PrefixPuller(engine=workers.p.worker.engine, reader=workers.p.worker.reader, costs=lambda: None)
        known = hashes(workers, PROMPT)
        await puller.pull(workers.source(), known, tenant_root=b"t" * 16)
        assert set(workers.p.pool.announced_hashes()) == {known[7], known[15], known[NUM_BLOCKS - 1]}
        assert workers.p.worker.report(1, ()).announce_every == 8
        assert {workers.p.pool.tenant_of(each) for each in known[:NUM_BLOCKS]} == {b"t" * 16}


def num_cached(workers: Trio, prompt: bytes) -> int:
    """Return how many blocks of this prompt's prefix the prefill worker holds."""
    return workers.p.pool.count_cached(hashes(workers, prompt))


async def pulled(workers: Trio, number: int, prompt: bytes = PROMPT, **changes: Any) -> int:
    """Run a request and return how many blocks the prefill worker did not compute.

    Nothing of it stays in use.
    """
    num_tokens = await workers.answered(*workers.send(number, prompt=prompt, **changes))
    await workers.pair.until_clean()
    return num_tokens // BLOCK


@virtual
async def test_second_use_turns_replicas_into_ordinary_cache() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        assert await pulled(workers, 0) == NUM_BLOCKS
        assert copies(workers.p) == (NUM_BLOCKS, NUM_BLOCKS)
        assert await pulled(workers, 1, prefix_source=None) == NUM_BLOCKS
        assert copies(workers.p) == (0, 0)


@virtual
async def test_samples_of_one_request_count_as_one_use() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        jobs = workers.send(sample_indices=(0, 1), sampling=Sampling(max_tokens=4, ignore_eos=True))
        await workers.to_d.ended(jobs[1].job, samples=(0, 1))
        await workers.pair.until_clean()
        assert copies(workers.p) == (NUM_BLOCKS, NUM_BLOCKS)


@virtual
async def test_blocks_pulled_for_a_decode_leg_are_no_replicas() -> None:
    async with trio() as workers:
        assert await pulled(workers, 0, prefix_source=None) == 0
        assert copies(workers.d) == (0, 0)


@virtual
async def test_kv_of_a_session_moves_to_the_hybrid_worker_where_it_goes_on() -> None:
    """What is pulled is no replica there. What the source keeps of it is evicted before older content."""
    async with trio(roles=HYBRID) as workers:
        await workers.hold(prompt=OTHER)
        await workers.hold(hints=SESSION)
        assert await workers.answered_locally(workers.send_local(hints=SESSION)) == NUM_BLOCKS * BLOCK
        await workers.pair.until_clean()
        assert copies(workers.d) == (0, 0)
        assert has_moved(workers.holder)
        pool = workers.holder.pool
        taken = pool.allocate(pool.counts().free + NUM_BLOCKS) or []
        assert pool.count_cached(hashes(workers, PROMPT)) == 0
        assert pool.count_cached(hashes(workers, OTHER)) >= NUM_BLOCKS
        pool.unref(taken)


@virtual
async def test_session_that_exceeds_the_budget_of_moves_is_pulled_as_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_puller, "MAX_MOVING_SHARE", 0.1)
    async with trio(roles=HYBRID) as workers:
        await workers.hold(hints=SESSION)
        assert await workers.answered_locally(workers.send_local(hints=SESSION)) == NUM_BLOCKS * BLOCK
        await workers.pair.until_clean()
        assert copies(workers.d) == (NUM_BLOCKS, NUM_BLOCKS)
        assert not has_moved(workers.holder)


@virtual
async def test_another_branch_of_a_session_moves_nothing() -> None:
    """A request of the session that shares less than its longest chain is decoded elsewhere."""
    async with trio(roles=HYBRID) as workers:
        await workers.hold(hints=SESSION)
        source = workers.source(5)
        await workers.answered_locally(workers.send_local(hints=SESSION, prefix_source=source))
        await workers.pair.until_clean()
        assert not has_moved(workers.holder)


@pytest.mark.parametrize("roles", [HYBRID, ("prefill", "decode"), ("hybrid", "decode")], ids=" and ".join)
@virtual
async def test_session_goes_on_where_it_is_decoded(roles: tuple[str, str]) -> None:
    async with trio(roles=roles) as workers:
        await workers.answered(*workers.send(hints=SESSION, prefix_source=None))
        await workers.pair.until_clean()
        assert has_moved(workers.p) == (roles[0] == "hybrid")
        assert not has_moved(workers.d)


@pytest.mark.parametrize(
    ("is_local", "hints", "settings"),
    [
        (True, NO_HINTS, {"roles": HYBRID}),
        (False, SESSION, {"roles": HYBRID}),
        (True, SESSION, {}),
        (True, SESSION, {"roles": HYBRID, "kv_eviction": "lru"}),
    ],
    ids=["without a session", "decoded elsewhere", "by a decode worker", "lru"],
)
@virtual
async def test_other_prefixes_stay_with_the_worker_that_holds_them(
    is_local: bool, hints: SessionHints, settings: dict[str, Any]
) -> None:
    async with trio(**settings) as workers:
        await workers.hold(hints=SESSION)
        if is_local:
            await workers.answered_locally(workers.send_local(hints=hints))
        else:
            await workers.answered(*workers.send(hints=hints))
        await workers.pair.until_clean()
        assert copies(workers.d if is_local else workers.p) == (NUM_BLOCKS, NUM_BLOCKS)
        assert not has_moved(workers.holder)


@virtual
async def test_unused_replicas_are_evicted_for_new_ones() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        await workers.hold(prompt=OTHER)
        await pulled(workers, 0)
        assert await pulled(workers, 1, OTHER) == NUM_BLOCKS
        assert copies(workers.p) == (NUM_BLOCKS, NUM_BLOCKS)
        assert (num_cached(workers, PROMPT), num_cached(workers, OTHER)) == (0, NUM_BLOCKS)
        assert workers.p.pool.counts().free > 0, "it was the budget that they had to leave for"


@virtual
async def test_only_surplus_unused_replicas_are_evicted() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        await workers.hold(prompt=OTHER)
        await pulled(workers, 0, prefix_source=workers.source(15))
        assert await pulled(workers, 1, OTHER, prefix_source=workers.source(8)) == 8
        assert copies(workers.p) == (NUM_BLOCKS, NUM_BLOCKS)
        assert num_cached(workers, PROMPT) == 12


@virtual
async def test_source_without_blocks_causes_no_eviction() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        await pulled(workers, 0)
        assert await pulled(workers, 1, OTHER) == 0
        assert copies(workers.p) == (NUM_BLOCKS, NUM_BLOCKS)


@virtual
async def test_used_replicas_do_not_count_against_the_budget() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        await workers.hold(prompt=OTHER)
        await pulled(workers, 0)
        await pulled(workers, 1)
        assert await pulled(workers, 2, OTHER) == NUM_BLOCKS
        assert (num_cached(workers, PROMPT), num_cached(workers, OTHER)) == (NUM_BLOCKS, NUM_BLOCKS)


@pytest.mark.parametrize("is_slow", [True, False], ids=["under way", "in use"])
@virtual
async def test_running_pulls_and_used_replicas_reduce_the_budget(is_slow: bool) -> None:
    async with trio(p_blocks=P_BLOCKS, link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.001) if is_slow else None) as workers:
        await workers.hold()
        await workers.hold(prompt=OTHER)
        workers.p.executor.gate.clear()
        first = workers.send(0, prefix_source=workers.source(12))
        if not is_slow:
            await workers.pair.settle()
            assert copies(workers.p) == (12, 0)
        second = workers.send(1, prompt=OTHER)
        await workers.pair.settle()
        assert workers.p.pool.num_replicas == NUM_BLOCKS
        workers.p.executor.gate.set()
        assert await workers.answered(*first) == 12 * BLOCK
        assert await workers.answered(*second) == 8 * BLOCK


@virtual
async def test_blocks_being_read_count_once() -> None:
    async with trio(p_blocks=P_BLOCKS, link=LinkModel(bytes_per_s=BLOCK_BYTES / 0.005)) as workers:
        await workers.hold()
        await workers.hold(prompt=OTHER)
        first = workers.send(0, prefix_source=workers.source(12))
        await asyncio.sleep(0.03)
        assert workers.p.pool.counts().receiving > 0
        second = workers.send(1, prompt=OTHER)
        assert await workers.answered(*first) == 12 * BLOCK
        assert await workers.answered(*second) == 8 * BLOCK


@virtual
async def test_replicas_used_meanwhile_stay_and_nothing_is_pulled() -> None:
    async with trio(p_blocks=P_BLOCKS) as workers:
        await workers.hold()
        await workers.hold(prompt=OTHER)
        await pulled(workers, 0)
        held: list[int] = []
        reader = workers.p.worker.reader
        ask = reader.pull

        def pull(*arguments: Any, **more: Any) -> Pull:
            held.extend(workers.p.pool.match(hashes(workers, PROMPT), NUM_BLOCKS))
            return ask(*arguments, **more)

        reader.pull = pull  # type: ignore[method-assign]
        assert await workers.answered(*workers.send(1, prompt=OTHER)) == 0
        assert copies(workers.p) == (NUM_BLOCKS, 0)
        workers.p.pool.unref(held)
