"""Pulls from end to end: what lands is what was announced, and nothing leaks whatever goes wrong."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from baton.core.errors import Failure, Reason, Refused
from baton.core.peer import FirstToken, HashRange
from baton.sim import virtual_time
from tests import builders
from tests.unit.transfer import rig as rigs
from tests.unit.transfer.rig import OWNER, READER, Rig, rig

ENDLESS_S = 300.0


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test under virtual time: its waits take none, and one that would never end fails."""

    async def bounded(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(ENDLESS_S):
            await test(*args, **kwargs)

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        virtual_time.run(bounded(*args, **kwargs))

    return run


async def refusal_of(waiting: Awaitable[object]) -> Failure:
    with pytest.raises(Refused) as refused:
        await waiting
    return refused.value.failure


async def failure_of(waiting: Awaitable[object]) -> Reason:
    return (await refusal_of(waiting)).reason


async def pull_all(r: Rig, text: str = "a", num_tokens: int = 18, request: int = 0) -> None:
    job, _blocks = r.prefill(text, num_tokens, request)
    pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
    await pull.first_ready()
    landing = r.land(pull, -(-num_tokens // 4))
    result = await pull.done()
    assert result.num_blocks == len(landing)
    assert [r.reader.contents[landing[i]] for i in range(len(landing))] == [f"{text}:{i}" for i in range(len(landing))]
    r.let_go(landing)


@virtual
async def test_a_prompt_lands_whole_and_everything_is_given_back() -> None:
    async with rig() as r:
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0, expected=r.hashes("a", 4))
        await pull.first_ready()
        landing = r.land(pull, 5)
        result = await pull.done()
        assert result.first_tokens == (FirstToken(sample_index=0, token_id=42),)
        assert (result.num_blocks, result.num_computed_tokens) == (5, 18)
        assert result.kv_transfer_s > 0.0
        assert result.transfer_bytes == 5 * builders.layout().block_bytes
        assert [r.reader.contents[landing[i]] for i in range(5)] == [f"a:{i}" for i in range(5)]
        assert r.reader.pool.lookup(r.hashes("a", 4)) == [landing[i] for i in range(4)]
        r.let_go(landing)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()
        assert r.observed.ended == [None]


@virtual
async def test_blocks_are_read_while_the_owner_still_computes() -> None:
    async with rig() as r:
        job, hashes = builders.job_id(), r.hashes("a", 4)
        r.service.born(job, READER)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        block_ids = r.owner.compute("a", hashes, 5)
        r.service.allocated(job, block_ids, hashes)
        r.service.announce(job, 8)
        await pull.first_ready()
        landing = r.land(pull, 5)
        await asyncio.sleep(0.1)
        assert [r.reader.contents[landing[i]] for i in range(5)] == ["a:0", "a:1", "", "", ""]
        r.service.announce(job, 18, final=True)
        await pull.done()
        assert r.reader.contents[landing[4]] == "a:4"
        assert r.reader.pool.lookup(hashes) == [landing[i] for i in range(4)]


@virtual
async def test_blocks_that_are_here_are_not_read_again() -> None:
    async with rig() as r:
        job, blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=3)
        await pull.first_ready()
        r.land(pull, 5, have_blocks=3)
        assert (await pull.done()).num_blocks == 2
        assert [source for source, _own in r.fabric.reads] == [(blocks[3],), (blocks[4],)]


@virtual
async def test_a_cached_block_that_was_evicted_meanwhile_is_asked_for_again() -> None:
    async with rig() as r:
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=3)
        await pull.first_ready()
        landing = r.land(pull, 5, have_blocks=1)
        assert (await pull.done()).num_blocks == 4
        assert [r.reader.contents[landing[i]] for i in range(1, 5)] == ["a:1", "a:2", "a:3", "a:4"]


@virtual
async def test_at_most_two_percent_of_the_pool_is_in_flight() -> None:
    async with rig() as r:
        await asyncio.gather(*(pull_all(r, text, 18, i) for i, text in enumerate("abcd")))
        assert r.fabric.most_running_blocks == 1  # 2 % of 64
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_a_prefix_is_pulled_by_its_hashes() -> None:
    async with rig() as r:
        hashes = r.hashes("a", 4)
        r.owner.pool.unref(r.owner.compute("a", hashes, 4))
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=1)
        await pull.first_ready()
        landing = r.land(pull, 4, have_blocks=1)
        assert (await pull.done()).num_blocks == 3
        r.let_go(landing)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_a_prefix_that_is_only_partly_there_lands_as_far_as_it_goes() -> None:
    async with rig() as r:
        hashes = r.hashes("a", 6)
        r.owner.pool.unref(r.owner.compute("a", hashes[:3], 3))
        pull = r.kv_reader.pull(OWNER, HashRange(hashes=hashes), have_blocks=0)
        landing = r.land(pull, 6)
        assert (await pull.done()).num_blocks == 3
        r.let_go(landing)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
async def test_a_follow_may_overtake_its_job() -> None:
    async with rig() as r:
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        await asyncio.sleep(rigs.EARLY_S / 2)
        r.prefill("a", 18)
        await pull.first_ready()
        r.land(pull, 5)
        assert (await pull.done()).num_blocks == 5


@virtual
async def test_a_job_that_the_owner_never_hears_of_fails_the_pull() -> None:
    async with rig() as r:
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        assert await failure_of(pull.first_ready()) is Reason.LEASE_LOST
        assert asyncio.get_running_loop().time() < 1.0


@virtual
async def test_a_long_wait_for_the_owner_keeps_the_lease() -> None:
    async with rig() as r:
        r.service.born(builders.job_id(), READER)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        await asyncio.sleep(10 * rigs.LEASE_S)
        r.prefill("a", 18)
        await pull.first_ready()
        await asyncio.sleep(10 * rigs.LEASE_S)  # waiting for our own memory
        r.land(pull, 5)
        assert (await pull.done()).num_blocks == 5


@virtual
@pytest.mark.parametrize("at", range(0, 60, 3))
async def test_a_broken_stream_costs_nothing_but_time(at: int) -> None:
    async with rig() as r:
        job, hashes = builders.job_id(), r.hashes("a", 4)
        r.service.born(job, READER)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        asyncio.get_running_loop().call_later(at * 0.002, r.cut)
        block_ids = r.owner.compute("a", hashes, 5)
        await asyncio.sleep(0.02)
        r.service.allocated(job, block_ids, hashes)
        r.service.announce(job, 8)
        await pull.first_ready()
        landing = r.land(pull, 5)
        await asyncio.sleep(0.03)
        r.service.announce(job, 18, final=True, first_tokens=[FirstToken(sample_index=0, token_id=1)])
        r.owner.pool.unref(block_ids)
        result = await pull.done()
        assert result.first_tokens
        assert [r.reader.contents[landing[i]] for i in range(5)] == [f"a:{i}" for i in range(5)]
        r.let_go(landing)
        await asyncio.sleep(rigs.LEASE_S + 0.1)  # a farewell that was lost with its stream leaves the lease to end by itself
        r.check_nothing_leaks()
        assert r.end.num_streams == 2


@virtual
async def test_an_owner_that_dies_fails_the_pull_within_a_lease() -> None:
    async with rig() as r:
        r.service.born(builders.job_id(), READER)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        await asyncio.sleep(0.1)
        r.network.remove(OWNER.address)
        assert await failure_of(pull.first_ready()) in (Reason.LEASE_LOST, Reason.WORKER_LOST)
        assert asyncio.get_running_loop().time() < 0.1 + rigs.LEASE_S + rigs.RENEW_S


@virtual
async def test_nobody_there_fails_the_pull() -> None:
    async with rig() as r:
        nobody = builders.worker_ref("gone", epoch=3)
        pull = r.kv_reader.pull(nobody, builders.job_id(), have_blocks=0)
        with pytest.raises(Refused) as refused:
            await pull.first_ready()
        assert refused.value.failure.retriable
        assert refused.value.failure.blamed == nobody


@virtual
@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        ({"layout": builders.layout(model_fingerprint="b")}, Reason.LAYOUT_MISMATCH, "model_fingerprint"),
        ({"layout": builders.layout(block_size_tokens=8)}, Reason.LAYOUT_MISMATCH, "block_size_tokens"),
    ],
)
async def test_a_pair_that_does_not_fit_is_refused_by_name(change: dict[str, Any], reason: Reason, word: str) -> None:
    async with rig() as r:
        other = rigs.PeerEnd(rigs.owner_service(r.owner, **change))
        r.network.add_worker(OWNER.address, other)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        with pytest.raises(Refused, match=word) as refused:
            await pull.first_ready()
        assert refused.value.failure.reason is reason


@virtual
async def test_another_life_of_the_owner_is_not_read_from() -> None:
    async with rig() as r:
        before = replace(OWNER, worker_epoch=6)
        pull = r.kv_reader.pull(before, builders.job_id(), have_blocks=0)
        assert await failure_of(pull.first_ready()) is Reason.WRONG_EPOCH
        await pull_all(r)


# What must never become visible.


@virtual
async def test_a_stuck_read_quarantines_its_blocks_until_it_is_terminal() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.stuck.clear()
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        landing = r.land(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.let_go(landing)
        assert r.reader.pool.counts().quarantined == 1 == r.kv_reader.quarantined_blocks
        assert r.observed.given_up == [1]
        (link,) = r.kv_reader.links()
        assert link.broken
        with pytest.raises(Refused) as refused:
            r.kv_reader.pull(OWNER, builders.job_id(1), have_blocks=0)
        assert refused.value.failure.blamed == OWNER
        r.reader.reuse_everything_free("mine")
        await asyncio.sleep(10)
        assert r.reader.pool.counts().quarantined == 1
        r.fabric.stuck.set()  # the late write comes now
        await asyncio.sleep(0.1)
        assert seen_elsewhere(r, "a:") == set()
        await asyncio.sleep(rigs.LEASE_S)
        r.check_nothing_leaks()
        await asyncio.sleep(5)
        assert not r.kv_reader.links()[0].broken
        await pull_all(r, "b", request=2)


def seen_elsewhere(r: Rig, text: str) -> set[str]:
    return rigs.seen(r.reader.visible(), text)


@virtual
async def test_everybody_whom_a_given_up_read_stops_hears_that_it_was_late_and_whose_it_was() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.stuck.clear()
        reading, waiting = [r.kv_reader.pull(OWNER, r.prefill(text, 18, i)[0], have_blocks=0) for i, text in enumerate("ab")]
        landing = []
        for pull in (reading, waiting):
            await pull.first_ready()
            landing.append(r.land(pull, 5))
        failures = [await refusal_of(pull.done()) for pull in (reading, waiting)]
        with pytest.raises(Refused) as too_late:
            r.kv_reader.pull(OWNER, builders.job_id(2), have_blocks=0)
        for failure in (*failures, too_late.value.failure):
            assert (failure.reason, failure.blamed, failure.retriable) == (Reason.TRANSFER_TIMEOUT, OWNER, True)
        assert r.observed.ended == [Reason.TRANSFER_TIMEOUT] * 2
        for blocks in landing:
            r.let_go(blocks)
        r.fabric.stuck.set()


@virtual
async def test_a_first_read_that_is_given_up_is_late_for_who_waits_for_it() -> None:
    async with rig() as r:
        r.fabric.stuck.clear()
        pull = r.kv_reader.pull(OWNER, r.prefill("a", 18)[0], have_blocks=0)
        await pull.first_ready()
        landing = r.land(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.let_go(landing)
        r.fabric.stuck.set()


@virtual
async def test_a_broken_pair_is_probed_and_no_probe_is_endless() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        probes = r.fabric.probes
        job, _blocks = r.prefill("a", 18)
        r.fabric.stuck.clear()
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        landing = r.land(pull, 5)
        await failure_of(pull.done())
        await asyncio.sleep(60)
        assert 2 <= r.fabric.probes - probes <= 4
        r.fabric.stuck.set()
        await asyncio.sleep(1)
        assert [link.broken for link in r.kv_reader.links()] == [False]
        assert r.observed.broken[-2:] == [True, False]
        r.let_go(landing)


@virtual
async def test_entries_that_cannot_be_read_in_time_land_nothing() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.stuck_lives.clear()
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        landing = r.land(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_TIMEOUT
        r.let_go(landing)
        assert r.reader.pool.lookup(r.hashes("a", 4)) == []
        await asyncio.sleep(1)
        assert r.reader.pool.counts().quarantined == 0  # the blocks themselves were read whole
        assert not r.kv_reader.links()[0].broken  # a probe came through
        r.fabric.stuck_lives.set()
        await pull_all(r, "b", request=2)


@virtual
async def test_a_read_that_fails_lands_nothing() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        r.fabric.failing = True
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        landing = r.land(pull, 5)
        assert await failure_of(pull.done()) is Reason.TRANSFER_FAILED
        r.let_go(landing)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()


@virtual
@pytest.mark.parametrize("when", ["before memory", "while reading", "between slices"])
async def test_a_cancelled_pull_gives_everything_back(when: str) -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        if when == "before memory":
            pull.cancel()
        landing = r.land(pull, 5)
        if when != "before memory":
            await asyncio.sleep(rigs.READ_S * (0.5 if when == "while reading" else 1.05))
            pull.cancel()
        assert await failure_of(pull.done()) is Reason.CANCELLED
        r.let_go(landing)
        await asyncio.sleep(0.1)
        r.check_nothing_leaks()
        assert not r.kv_reader.links()[0].broken


@virtual
async def test_the_requests_deadline_ends_the_pull() -> None:
    async with rig() as r:
        r.service.born(builders.job_id(), READER)
        pull = r.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0, deadline_s=0.7)
        assert await failure_of(pull.first_ready()) is Reason.DEADLINE
        assert asyncio.get_running_loop().time() == pytest.approx(0.7)


@virtual
@pytest.mark.parametrize(
    ("what", "flip"),
    [
        ("life", lambda e: replace(e, life=e.life ^ 1)),
        ("hash", lambda e: replace(e, block_hash=bytes([e.block_hash[0] ^ 1]) + e.block_hash[1:])),
        ("epoch", lambda e: replace(e, worker_epoch=e.worker_epoch ^ 1)),
    ],
)
async def test_a_flipped_bit_is_discarded_asked_again_once_and_then_refused(what: str, flip: Any) -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        for times, outcome in ((1, None), (2, Reason.PROOF_FAILED)):
            r.observed.disproved.clear()
            job, _blocks = r.prefill("a", 18, request=times)
            flips = iter([flip] * times)
            r.fabric.flip = lambda entry, flips=flips: next(flips, lambda e: e)(entry)
            pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
            await pull.first_ready()
            landing = r.land(pull, 5)
            if outcome is None:
                assert (await pull.done()).num_blocks == 5
            else:
                assert await failure_of(pull.done()) is outcome
            assert r.observed.disproved == [what] * times
            r.let_go(landing)
            await asyncio.sleep(0.1)
            r.check_nothing_leaks()


@virtual
async def test_hashes_that_are_not_the_prompts_are_refused() -> None:
    async with rig() as r:
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0, expected=r.hashes("b", 4))
        assert await failure_of(pull.first_ready()) is Reason.PROOF_FAILED


@virtual
async def test_a_lease_that_ends_during_the_read_discards_what_arrived() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        job, _blocks = r.prefill("a", 18)
        pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
        await pull.first_ready()
        r.network.remove(OWNER.address)  # renewals stay unanswered from here on
        await asyncio.sleep(rigs.LEASE_S * 0.95 - 0.1 * rigs.READ_S)
        landing = r.land(pull, 5)
        assert await failure_of(pull.done()) is Reason.LEASE_LOST
        r.let_go(landing)
        assert seen_elsewhere(r, "a:") == set()
        await asyncio.sleep(rigs.LEASE_S)
        r.check_nothing_leaks()


@virtual
async def test_a_two_sided_owner_is_told_of_every_read() -> None:
    async with rig(two_sided=True) as r:
        await pull_all(r)
        told = [blocks for _read, reader, blocks in r.owner.backend.expected if reader == READER.worker_id]
        assert told[0] == (0,)  # the probe
        assert told[-5:] == [source for source, _own in r.fabric.reads]


@virtual
async def test_too_much_quarantine_means_drain() -> None:
    async with rig() as r:
        r.fabric.stuck.clear()
        assert not r.kv_reader.must_drain
        taken = r.reader.pool.allocate_landing(7)
        assert taken is not None
        r.kv_reader._quarantine.num_blocks = 7
        assert r.kv_reader.must_drain
        r.reader.pool.drop_landing(taken)
        r.reader.pool.unref(taken)
