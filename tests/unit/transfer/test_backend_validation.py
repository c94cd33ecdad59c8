"""A backend that reads what is not the owner's is not used, however fast it is."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import Reason, Refused
from baton.core.ids import ReadId
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState
from baton.transfer.integrity.validate_read import foreign_entries
from baton.transfer.reader.backend_choice import CHOICE_MIN_S, MAX_REASON_CHARS, MeasuredBackend, choice_text
from baton.transfer.reader.validation_record import (
    MAX_INVALID_PULLS,
    RETRY_MAX_S,
    RETRY_MIN_S,
    ValidationRecord,
)
from tests import builders
from tests.unit.transfer.choice_rig import Choice, choice_rig, slow_down
from tests.unit.transfer.pulls import failure_of, pull_all, virtual
from tests.unit.transfer.transfer_rig import OWNER, Rig, rig

SeenEntry = Callable[[int, GenerationEntry], GenerationEntry]


def of_another_worker(block_id: int, entry: GenerationEntry) -> GenerationEntry:
    return replace(entry, worker_epoch=entry.worker_epoch ^ 1)


def of_another_block(block_id: int, entry: GenerationEntry) -> GenerationEntry:
    return replace(entry, generation=entry.generation + 1)


def unchanged(block_id: int, entry: GenerationEntry) -> GenerationEntry:
    return entry


async def invalid_pull(r: Rig, request: int) -> None:
    """Pull blocks that fail validation."""
    job, _blocks = r.prefill("x", 18, request)
    pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
    await pull.first_ready()
    receiving = r.mark_received(pull, 5)
    assert await failure_of(pull.done()) is Reason.VALIDATION_FAILED
    r.release(receiving)


async def chosen_one(c: Choice, seen_entry: SeenEntry) -> None:
    """Let the first of the backends be chosen. From then on, entries over it are seen as by `seen_entry`."""
    slow_down(c, two=5.0, three=3.0)
    assert await c.rig.kv_reader.warmed(OWNER)
    assert c.transport == "one"
    c.fabrics["one"].seen_entry = seen_entry


@virtual
async def test_the_fastest_backend_is_not_chosen_if_it_reads_another_workers_memory() -> None:
    async with choice_rig() as c:
        slow_down(c, two=5.0, three=3.0)
        c.fabrics["one"].seen_entry = of_another_worker
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == "three"
        assert c.reason.startswith("one validation_failed: epoch of a trial read, two ")
        assert c.rig.observed.measured[-1]["one"] == 0.0
        await pull_all(c.rig)


@virtual
async def test_if_all_backends_are_invalid_the_link_is_broken_until_one_is_valid() -> None:
    async with choice_rig() as c:
        for fabric in c.fabrics.values():
            fabric.seen_entry = of_another_worker
        assert not await c.rig.kv_reader.warmed(OWNER)
        with pytest.raises(Refused, match="validation_failed: epoch of a trial read"):
            c.rig.kv_reader.pull(OWNER, builders.job_id(), have_blocks=0)
        probes = sum(fabric.probes for fabric in c.fabrics.values())
        await asyncio.sleep(RETRY_MIN_S - 1)
        assert sum(fabric.probes for fabric in c.fabrics.values()) == probes
        c.fabrics["two"].seen_entry = unchanged
        await asyncio.sleep(4 * RETRY_MIN_S)
        assert c.transport == "two"
        await pull_all(c.rig)


@virtual
async def test_invalid_pulls_in_a_row_choose_another_backend_at_once() -> None:
    async with choice_rig() as c:
        await chosen_one(c, of_another_block)
        for request in range(MAX_INVALID_PULLS):
            await invalid_pull(c.rig, request)
        assert c.rig.kv_reader.links()[0].broken
        await asyncio.sleep(1.0)
        assert (c.rig.kv_reader.links()[0].broken, c.transport) == (False, "three")
        assert c.reason.startswith("one validation_failed: generation of 3 pulls in a row, two ")
        await pull_all(c.rig, request=MAX_INVALID_PULLS)


@virtual
async def test_an_invalid_backend_is_measured_again_when_the_next_one_breaks() -> None:
    async with choice_rig() as c:
        await chosen_one(c, of_another_block)
        for request in range(MAX_INVALID_PULLS):
            await invalid_pull(c.rig, request)
        await asyncio.sleep(RETRY_MIN_S)
        assert c.transport == "three"
        c.fabrics["one"].seen_entry = unchanged
        c.fabrics["three"].failing = True
        c.rig.kv_reader.probe(OWNER)
        await asyncio.sleep(2 * CHOICE_MIN_S)
        assert c.transport == "one"
        assert c.reason.startswith("one 0")
        await pull_all(c.rig, request=MAX_INVALID_PULLS)


@virtual
async def test_a_backend_that_loses_the_entries_of_trial_reads_is_not_used() -> None:
    async with choice_rig() as c:
        slow_down(c, one=5.0, three=3.0)
        reader = c.backends["two"][1]
        start = reader.start_read_generations

        def lose(read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
            start(read_id, source, payload)
            reader._reads.end(read_id, ReadState.LOST)

        reader.start_read_generations = lose  # type: ignore[method-assign]
        assert await c.rig.kv_reader.warmed(OWNER)
        assert c.transport == "three"


@virtual
async def test_pulls_are_never_invalid_in_a_row_if_blocks_between_them_are_valid() -> None:
    async with choice_rig() as c:
        await chosen_one(c, unchanged)
        for request in range(3 * MAX_INVALID_PULLS):
            if request % MAX_INVALID_PULLS == 0:
                c.fabrics["one"].seen_entry = unchanged
                await pull_all(c.rig, "a", request=request)
                c.fabrics["one"].seen_entry = of_another_block
            else:
                await invalid_pull(c.rig, request)
        assert (c.rig.kv_reader.links()[0].broken, c.transport) == (False, "one")


@virtual
async def test_the_only_backend_is_used_again_after_a_pause_and_a_valid_trial_read() -> None:
    async with rig() as r:
        assert await r.kv_reader.warmed(OWNER)
        r.fabric.seen_entry = of_another_worker
        for request in range(MAX_INVALID_PULLS):
            await invalid_pull(r, request)
        (link,) = r.kv_reader.links()
        assert (link.broken, link.problem) == (True, "validation_failed: epoch of 3 pulls in a row")
        probes = r.fabric.probes
        await asyncio.sleep(RETRY_MIN_S - 1)
        assert r.fabric.probes == probes
        r.fabric.generation_reads_may_end.clear()
        await asyncio.sleep(1.5)
        assert r.fabric.probes > probes
        assert r.kv_reader.links()[0].broken  # a probe has succeeded, but its entries are not known
        r.fabric.generation_reads_may_end.set()
        await asyncio.sleep(0.5)
        assert r.kv_reader.links()[0].problem == "validation_failed: epoch of a trial read"
        r.fabric.seen_entry = unchanged
        await asyncio.sleep(2 * RETRY_MIN_S)
        assert not r.kv_reader.links()[0].broken
        await pull_all(r, request=MAX_INVALID_PULLS)


def test_the_pause_of_an_invalid_link_doubles_until_blocks_are_valid() -> None:
    record, now_s, pauses_s = ValidationRecord(), 0.0, []
    assert record.may_try(now_s)
    for _ in range(9):
        record.entries_invalid("epoch", now_s)
        pause_s = RETRY_MIN_S
        while not record.may_try(now_s + pause_s):
            pause_s *= 2 if pause_s < RETRY_MAX_S / 2 else RETRY_MAX_S / pause_s
        pauses_s.append(pause_s)
        now_s += pause_s
        record.entries_valid()
    assert pauses_s == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    record.blocks_valid()
    record.entries_invalid("epoch", now_s)
    assert record.may_try(now_s + RETRY_MIN_S)


@pytest.mark.parametrize(
    ("epochs", "num_blocks", "expected"),
    [([7, 7], 2, None), ([7], 2, "shape"), ([], 1, "shape"), ([7, 8], 2, "epoch")],
)
def test_entries_of_a_trial_read_must_be_the_owners(epochs: list[int], num_blocks: int, expected: str | None) -> None:
    entries = [GenerationEntry(generation=1, block_hash=bytes(16), worker_epoch=epoch) for epoch in epochs]
    assert foreign_entries(entries, num_blocks, 7) == expected


def test_the_text_of_a_choice_has_speeds_and_short_reasons() -> None:
    measured = [
        MeasuredBackend(transfer="nixl", bytes_per_s=8.25e9, problem=""),
        MeasuredBackend(transfer="local", bytes_per_s=0.0, problem="transfer_failed"),
    ]
    text = choice_text(measured, {"collective": "not\ninstalled"})
    assert text == "nixl 8.25 GB/s, local transfer_failed, collective left out (not installed)"
    assert len(choice_text((), {"local": "x" * 1000})) == len("local left out ()") + MAX_REASON_CHARS
    assert choice_text((), {}) == ""
