"""Export and import of prefixes: what arrives, what is refused by name, and that nothing is left behind."""

import asyncio
import random
import struct
from dataclasses import replace
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from baton.core.errors import Code, Reason, Refused, StreamBroken
from baton.core.kv.block_hash import token_ids
from baton.core.messages.prefix_messages import (
    MAX_PART_BYTES,
    MAX_PREFIX_BLOCKS,
    WINDOW_PARTS,
    FilePart,
    ImportPrefix,
    NextPart,
)
from baton.worker.prefix_files import file_parts
from baton.worker.prefix_files.prefix_format import FIXED_BYTES, RECORD_BYTES
from tests import builders
from tests.unit.worker.prefix_rig import LAYOUT, SALT, PrefixCluster, PrefixWorker

TOKENS = token_ids(range(43))
NUM_BLOCKS = 10
HEADER_BYTES = FIXED_BYTES + NUM_BLOCKS * 16 + 8


async def exported(worker: PrefixWorker | None = None) -> bytes:
    """Return the file of 10 blocks."""
    worker = worker or PrefixWorker("source")
    worker.compute(TOKENS)
    return (await PrefixCluster(worker).export(TOKENS))[1]


async def refused(content: bytes, target: PrefixWorker | None = None, **options: Any) -> str:
    """Import a file that is refused. Returns the reason, after a check that nothing was imported."""
    target = target or PrefixWorker("target")
    before = target.pool.counts()
    with pytest.raises(Refused) as error:
        await PrefixCluster(target).load(content, **options)
    assert target.pool.counts() == before
    target.check_idle()
    return str(error.value)


async def test_import_finds_the_exported_prefix_with_equal_bytes() -> None:
    source, target = PrefixWorker("source"), PrefixWorker("target")
    source.compute(TOKENS)
    cluster = PrefixCluster(source, target)
    found, content = await cluster.export(TOKENS)
    assert (found.worker_id, found.num_tokens, found.num_prompt_tokens) == ("source", 40, 43)
    assert found.num_bytes == len(content) == HEADER_BYTES + NUM_BLOCKS * (RECORD_BYTES + LAYOUT.block_bytes)
    imported = await cluster.load(content, "target")
    assert (imported.worker_id, imported.num_tokens, imported.num_cached_before) == ("target", 40, 0)
    assert target.num_changes == 1
    target.check_holds(TOKENS, NUM_BLOCKS)
    source.check_holds(TOKENS, NUM_BLOCKS)
    assert set(target.pool.announced_hashes()) == set(target.hashes(TOKENS))
    assert target.pool.forget_tenant(target.root()) == NUM_BLOCKS

    with pytest.raises(Refused, match="checksum of KV block 10"):  # what is cached is verified, too
        await cluster.load(content[:-1] + b"!", "source")
    again = await cluster.load(content, "source")
    assert (again.num_tokens, again.num_cached_before) == (40, 40)
    source.check_holds(TOKENS, NUM_BLOCKS)


async def test_worker_with_the_longest_prefix_exports() -> None:
    workers = [PrefixWorker(name) for name in "abc"]
    for worker, num_tokens in zip(workers, (8, 24, 12), strict=True):
        worker.compute(TOKENS[:num_tokens])
    found, _ = await PrefixCluster(*workers).export(TOKENS)
    assert (found.worker_id, found.num_tokens) == ("b", 24)
    for worker in workers:
        worker.check_idle()


async def test_blocks_of_slower_tiers_are_exported() -> None:
    """The device has the first two blocks, and too few free ones for the others at a time."""
    source, target = PrefixWorker("source", num_blocks=NUM_BLOCKS), PrefixWorker("target")
    source.copies._blocks.num_rows = 3  # type: ignore[union-attr]
    source.compute(TOKENS)
    await source.demote(source.hashes(TOKENS))
    source.compute(TOKENS[:8])
    used = source.pool.allocate(5)
    assert used is not None
    cluster = PrefixCluster(source, target)
    found, content = await cluster.export(TOKENS)
    assert found.num_tokens == 40
    await cluster.load(content, "target")
    target.check_holds(TOKENS, NUM_BLOCKS)
    source.pool.unref(used)
    source.check_idle()


async def test_windowed_layouts_export_what_a_continuation_sees() -> None:
    layout = builders.windowed_layout([0, 8, 8])
    source, target = PrefixWorker("source", layout=layout), PrefixWorker("target", layout=layout)
    source.compute(TOKENS)
    cluster = PrefixCluster(source, target)
    _, content = await cluster.export(TOKENS)
    assert (await cluster.load(content, "target")).num_tokens == 40
    target.check_holds(TOKENS, NUM_BLOCKS)
    assert target.pool.counts().cached < source.pool.counts().cached  # blocks outside the windows are not exported
    small = PrefixWorker("small", num_blocks=8, layout=layout)
    assert "free KV blocks" in await refused(content, small)


@pytest.mark.parametrize("num_blocks", [1, 4, 9])
async def test_leading_blocks_are_imported_if_not_all_fit(num_blocks: int) -> None:
    target = PrefixWorker("target", num_blocks=num_blocks)
    imported = await PrefixCluster(target).load(await exported())
    assert (imported.num_tokens, imported.num_file_tokens) == (4 * num_blocks, 40)
    target.check_holds(TOKENS, num_blocks)


async def test_import_without_a_free_block_is_refused() -> None:
    target = PrefixWorker("target", num_blocks=2)
    used = target.pool.allocate(2)
    assert "fewer than 1 free KV blocks" in await refused_while_used(await exported(), target)
    target.pool.unref(used or [])
    target.check_idle()


async def refused_while_used(content: bytes, target: PrefixWorker) -> str:
    with pytest.raises(Refused) as error:
        await PrefixCluster(target).load(content)
    assert (error.value.failure.code, error.value.failure.reason) == (Code.RESOURCE_EXHAUSTED, Reason.NO_FREE_BLOCKS)
    return str(error.value)


async def test_each_flipped_bit_is_detected() -> None:
    content, rng = await exported(), random.Random(1)
    positions = [*range(HEADER_BYTES), *(rng.randrange(HEADER_BYTES, len(content)) for _ in range(200))]
    target = PrefixWorker("target")
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        await refused(bytes(damaged), target)


async def test_each_cut_off_is_detected() -> None:
    content, rng = await exported(), random.Random(2)
    target = PrefixWorker("target")
    for length in [
        0,
        1,
        FIXED_BYTES,
        HEADER_BYTES,
        len(content) - 1,
        *(rng.randrange(len(content)) for _ in range(40)),
    ]:
        assert "it ends in" in await refused(content[:length], target)
    assert "bytes follow its last block" in await refused(content + b"x", target)


async def test_exchanged_blocks_are_detected() -> None:
    content, size = await exported(), RECORD_BYTES + LAYOUT.block_bytes
    blocks = [content[HEADER_BYTES + i * size : HEADER_BYTES + (i + 1) * size] for i in range(NUM_BLOCKS)]
    blocks[2], blocks[5] = blocks[5], blocks[2]
    assert "checksum of KV block 3 of 10" in await refused(content[:HEADER_BYTES] + b"".join(blocks))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_fingerprint": "model-b"}, "KV of another model"),
        ({"block_size_tokens": 8}, "--block-size-tokens 4"),
        ({"groups": builders.windowed_layout([0]).groups}, "another KV layout"),
        ({"layout_version": 1}, "another KV layout"),
    ],
)
async def test_files_of_other_models_and_layouts_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    target = PrefixWorker("target", layout=replace(LAYOUT, **changes))
    assert problem in await refused(await exported(), target)


async def test_files_of_other_tenants_and_formats_are_refused_by_name() -> None:
    content = await exported()
    assert "another tenant" in await refused(content, salt=b"another")
    assert "not a file of `baton cache export`" in await refused(b"PK" + content[2:])
    later = content[:8] + struct.pack("<I", 2) + content[12:]
    assert "format version 2; this worker reads version 1" in await refused(later)


@pytest.mark.parametrize("num_blocks", [0, MAX_PREFIX_BLOCKS + 1, 2**32 - 1])
async def test_hostile_sizes_are_refused_before_memory_is_taken(num_blocks: int) -> None:
    content = await exported()
    fixed = content[:16] + struct.pack("<I", num_blocks) + content[20:FIXED_BYTES]
    fixed += struct.pack("<Q", xxh3_64_intdigest(fixed))
    assert f"names {num_blocks} blocks" in await refused(fixed + content[FIXED_BYTES:])
    assert f"at most {MAX_PART_BYTES}" in await refused(bytes(MAX_PART_BYTES + 1), part_bytes=2 * MAX_PART_BYTES)


async def test_prompts_without_cached_blocks_are_refused() -> None:
    cluster = PrefixCluster(PrefixWorker("source"))
    with pytest.raises(Refused, match="no worker has a block of this prompt cached"):
        await cluster.export(TOKENS)
    with pytest.raises(Refused, match="the prompt has 3 tokens"):
        await cluster.export(TOKENS[:3])
    source = PrefixWorker("source")
    source.compute(TOKENS)
    with pytest.raises(Refused, match="no worker has a block"):
        await PrefixCluster(source).export(TOKENS, b"another")


@pytest.mark.parametrize("what", ["export", "import"])
async def test_nothing_is_left_after_a_cancel_at_any_point(what: str) -> None:
    """The gateway's call is cancelled after any number of turns of the event loop."""
    content = await exported()
    ended = num_turns = 0
    while not ended:
        worker = PrefixWorker("w", num_blocks=12)
        worker.copies._blocks.num_rows = 2  # type: ignore[union-attr]
        if what == "export":
            worker.compute(TOKENS)
            await worker.demote(worker.hashes(TOKENS)[:6])
            worker.compute(TOKENS[:12])  # the first three are on the device, too
        cluster = PrefixCluster(worker)
        call: asyncio.Task[Any] = asyncio.create_task(
            cluster.export(TOKENS) if what == "export" else cluster.load(content)
        )
        for _ in range(num_turns):
            await asyncio.sleep(0)
        call.cancel()
        (result,) = await asyncio.gather(call, return_exceptions=True)
        ended = not isinstance(result, asyncio.CancelledError)
        async with asyncio.timeout(5):
            while worker.copies._serving:  # noqa: ASYNC110 - each turn is a step of the worker
                await asyncio.sleep(0)
        worker.check_idle()
        if what == "import":
            worker.check_holds(TOKENS, NUM_BLOCKS if ended else worker.pool.lookup_prefix(worker.hashes(TOKENS))[0])
        num_turns += 1
    assert num_turns > 20


async def test_blocks_that_are_withdrawn_during_an_export_are_never_in_a_file() -> None:
    """Their content becomes wrong at any point of the export, which then fails, or has read them before."""
    results: list[bool] = []
    while len(results) < 40:
        source, target = PrefixWorker("source"), PrefixWorker("target")
        source.copies._blocks.num_rows = 2  # type: ignore[union-attr]
        source.compute(TOKENS)
        call = asyncio.create_task(PrefixCluster(source).export(TOKENS))
        for _ in range(len(results)):
            await asyncio.sleep(0)
        source.memory[:] = 238
        source.pool.forget_tenant(source.root())
        try:
            await PrefixCluster(target).load((await call)[1])
            target.check_holds(TOKENS, NUM_BLOCKS)
            results.append(True)
        except Refused:
            results.append(False)
        source.check_idle()
    assert {*results} == {True, False}


async def test_a_client_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    content, target = await exported(), PrefixWorker("target")
    monkeypatch.setattr(file_parts, "STALL_S", 0.2)

    stream = await PrefixCluster(target).network.open_prefix_copy(target.ref.address)
    stream.send(ImportPrefix(tenant_root=target.root(SALT)))
    for _ in range(WINDOW_PARTS):
        assert await stream.receive() == NextPart()
    stream.send(FilePart(content[: len(content) // 2]))
    assert await stream.receive() == NextPart()
    with pytest.raises(StreamBroken, match="nothing was read or sent for"):
        await asyncio.wait_for(stream.receive(), 10)
    target.check_idle()


async def test_one_copy_at_a_time() -> None:
    target, content = PrefixWorker("target"), await exported()
    cluster, began, go_on = PrefixCluster(target), asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        began.set()
        await go_on.wait()
        yield content

    first = asyncio.create_task(cluster.relay.import_file("", SALT, slow()))
    await began.wait()
    with pytest.raises(Refused) as error:
        await cluster.load(content)
    assert error.value.failure.reason is Reason.QUEUE_FULL
    go_on.set()
    assert (await first).num_tokens == 40
    target.check_holds(TOKENS, NUM_BLOCKS)


async def test_shutdown_ends_running_copies() -> None:
    target, go_on = PrefixWorker("target"), asyncio.Event()

    async def waits() -> Any:
        await go_on.wait()
        yield b"half a file"

    call = asyncio.create_task(PrefixCluster(target).relay.import_file("", SALT, waits()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert target.copies._serving
    await target.copies.aclose()
    go_on.set()
    with pytest.raises(Refused, match="was lost"):
        await call
    target.check_idle()
