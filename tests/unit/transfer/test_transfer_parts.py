"""Tests of deadlines, bandwidth, block runs, validation, generation table, host memory and the UCX log."""

import ctypes
import mmap
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LayoutMismatch
from baton.transfer.backend import GenerationEntry
from baton.transfer.backends import host_memory, prefault
from baton.transfer.backends.block_ranges import check_ids, runs
from baton.transfer.backends.host_memory import KvRegion
from baton.transfer.backends.nixl import ucx
from baton.transfer.backends.prefault import PREFAULT_THREAD_NAME
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable, decode_entries
from baton.transfer.integrity.validate_read import AnnouncedBlock, mismatch
from baton.transfer.owner.lease_deadlines import Deadlines
from baton.transfer.reader.bandwidth import Bandwidth


@given(st.lists(st.tuples(st.sampled_from(["set", "drop", "pop"]), st.integers(0, 5), st.integers(0, 50)), max_size=80))
def test_deadlines_agree_with_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, int] = {}
    for step, key, at in steps:
        match step:
            case "set":
                deadlines.set(key, at)
                plain[key] = at
            case "drop":
                deadlines.drop(key)
                plain.pop(key, None)
            case "pop":
                passed = sorted(k for k, t in plain.items() if t <= at)
                assert sorted(deadlines.pop_passed(at)) == passed
                plain = {k: t for k, t in plain.items() if t > at}
        assert deadlines.next_s == min(plain.values(), default=None)
        assert len(deadlines) == len(plain)
        assert all(deadlines.of(k) == t for k, t in plain.items())


def test_renewing_for_ever_does_not_grow_the_heap() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for tick in range(10_000):
        for key in range(3):
            deadlines.set(key, tick + 2.0)
        assert deadlines.pop_passed(tick) == []
    assert len(deadlines._heap) == 3


def test_dropped_deadlines_do_not_grow_the_heap() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10):
        deadlines.set(key, 50.0 + key)
        deadlines.set(key, 100.0 + key)  # moved later
    for key in range(10, 20_000):
        deadlines.set(key, 90.0)
        deadlines.drop(key)
    assert len(deadlines._heap) < 2_000
    assert (deadlines.next_s, deadlines.pop_passed(99.0)) == (100.0, [])
    assert deadlines.pop_passed(104.0) == [0, 1, 2, 3, 4]


def test_bandwidth_is_dominated_by_large_recent_reads() -> None:
    bandwidth = Bandwidth(deadline_min_s=0.5, deadline_max_s=3.0)
    assert bandwidth.deadline_s(10**12) == 3.0  # nothing is known yet
    now_s = 0.0
    for num_bytes, rate in [(2**10, 1e7), (2**16, 1e8), (2**22, 1e9), (2**23, 4e9)]:
        now_s += num_bytes / rate
        bandwidth.ended(num_bytes, now_s - num_bytes / rate, now_s)
    assert 1.5e9 < (bandwidth.bytes_per_s or 0) < 4e9
    for _read in range(50):
        now_s += 2**23 / 1e8
        bandwidth.ended(2**23, now_s - 2**23 / 1e8, now_s)
    assert bandwidth.bytes_per_s == pytest.approx(1e8, rel=0.02)
    assert bandwidth.deadline_s(0) == 0.5
    assert bandwidth.deadline_s(10**7) == pytest.approx(0.5 + 4 * 0.1, rel=0.02)
    assert bandwidth.deadline_s(10**9) == 3.0


def test_overlapping_reads_are_not_counted_twice() -> None:
    bandwidth = Bandwidth(deadline_min_s=0.5, deadline_max_s=3.0)
    for end_s in (1.0, 2.0, 3.0):  # three of 1 MB started at once on a link of 1 MB/s
        bandwidth.ended(10**6, 0.0, end_s)
    assert bandwidth.bytes_per_s == pytest.approx(1e6)


@given(st.integers(0, 10_000))
def test_runs_cover_every_pair_once_in_order(seed: int) -> None:
    rng = Random(seed)
    source, own = [rng.randrange(8) for _ in range(12)], [rng.randrange(8) for _ in range(12)]
    source = sorted(source) if seed % 2 else source
    own = sorted(own) if seed % 3 else own
    pieces = list(runs(source, own))
    pairs = [(run.source + i, run.own + i) for run in pieces for i in range(run.num_blocks)]
    assert pairs == list(zip(source, own, strict=True))
    assert list(runs([], [])) == []


def test_contiguous_blocks_are_one_run() -> None:
    assert [(r.source, r.own, r.num_blocks) for r in runs([3, 4, 5, 9], [7, 8, 9, 10])] == [(3, 7, 3), (9, 10, 1)]
    with pytest.raises(ValueError, match="2 source blocks for 1"):
        list(runs([1, 2], [1]))
    with pytest.raises(ValueError, match="outside"):
        check_ids([0, 8], 8, "own")


BLOCK = AnnouncedBlock(index=0, block_id=3, generation=5, block_hash=b"h" * 16)
ENTRY = GenerationEntry(generation=5, block_hash=b"h" * 16, worker_epoch=9)


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([ENTRY], None),
        ([GenerationEntry(generation=6, block_hash=b"h" * 16, worker_epoch=9)], "generation"),
        ([GenerationEntry(generation=5, block_hash=bytes(16), worker_epoch=9)], "hash"),
        ([GenerationEntry(generation=5, block_hash=b"h" * 16, worker_epoch=8)], "epoch"),
        ([], "shape"),
        ([ENTRY, ENTRY], "shape"),
    ],
)
def test_validation_compares_every_field(entries: list[GenerationEntry], what: str | None) -> None:
    assert mismatch([BLOCK], entries, 9) == what


def test_generation_table_bytes_decode_to_its_entries() -> None:
    buffer = bytearray(4 * ENTRY_BYTES)
    table = MemoryGenerationTable(buffer, worker_epoch=2**64 - 1)
    assert (table.begin_generation(2), table.begin_generation(2)) == (1, 2)
    table.set_hash(2, b"x" * 16)
    assert decode_entries(bytes(buffer))[2] == GenerationEntry(
        generation=2, block_hash=b"x" * 16, worker_epoch=2**64 - 1
    )
    assert decode_entries(bytes(buffer))[0] == GenerationEntry(
        generation=0, block_hash=bytes(16), worker_epoch=2**64 - 1
    )
    assert table.begin_generation(2) == 3
    assert table.block_hash(2) == bytes(16)
    for block_id in (-1, 4):
        with pytest.raises(IndexError):
            table.begin_generation(block_id)
    with pytest.raises(ValueError, match="must be 16"):
        table.set_hash(0, b"short")


def shared_memory_fds() -> Counter[str]:
    """Return how many descriptors of each shared memory are open. Other threads open other files."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return Counter(target for target in targets if target.startswith(("/memfd:", "/dev/shm/")))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists names in /dev/shm and has memfd")
@pytest.mark.parametrize("memfd", [True, False])
def test_attached_shared_memory_is_shared_and_leaves_no_name(memfd: bool) -> None:
    before = shared_memory_fds()
    ours = host_memory.allocate_shared(3, 5000, memfd=memfd)
    name = "" if memfd else ours.handle.rpartition(":")[2]
    assert ours.handle.startswith("memfd:" if memfd else "shm:")
    assert memfd or name in os.listdir("/dev/shm")
    theirs = host_memory.attach_shared(ours.handle, num_blocks=3, block_bytes=5000)
    ours.kv[1] = 7
    ours.generation_table[33] = 9
    assert theirs.kv[1].tolist() == [7] * 5000
    assert theirs.generation_table[33] == 9
    with pytest.raises(LayoutMismatch, match="num_blocks"):
        host_memory.attach_shared(ours.handle, num_blocks=300, block_bytes=5000)
    theirs.close()
    ours.close()
    ours.close()
    with pytest.raises(FileNotFoundError):
        host_memory.attach_shared(ours.handle, num_blocks=3, block_bytes=5000)
    del ours, theirs
    assert name not in os.listdir("/dev/shm")
    assert shared_memory_fds() <= before


@pytest.mark.parametrize("handle", ["", "shm:x", "memfd:h:1:x", "shm:h:1:../x", "memfd:other-host:1:3", "pickle:h:1:2"])
def test_invalid_shared_memory_handle_is_refused(handle: str) -> None:
    with pytest.raises(LayoutMismatch, match="memory_kind"):
        host_memory.attach_shared(handle.replace(":h:", f":{host_memory.host_id()}:"), num_blocks=1, block_bytes=8)


def test_private_memory_is_page_aligned() -> None:
    host = host_memory.allocate_private(3, 5000)
    assert host.region.address % 4096 == 0
    assert host.region.num_bytes == 15_000
    assert (host.generation_table.ctypes.data - host.region.address) % 4096 == 0
    assert not np.any(host.kv)
    assert not np.any(host.generation_table)


def prefaulting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == PREFAULT_THREAD_NAME}


def resident_bytes(region: KvRegion) -> int:
    """Return how many bytes of a region have memory. Other memory of the process does not count."""
    num_pages = region.num_bytes // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(region.address), ctypes.c_size_t(region.num_bytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def wait_for(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_done() and time.monotonic() < until:
        time.sleep(0.01)
    assert is_done()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made real ahead of their use on Linux only")
@pytest.mark.parametrize("allocate", [host_memory.allocate_private, host_memory.allocate_shared])
def test_prefault_allocates_all_pages_and_changes_none(allocate: Callable[[int, int], host_memory.HostMemory]) -> None:
    others = prefaulting()
    host = allocate(16, 2**20)
    host.kv[3] = 7
    assert resident_bytes(host.region) < 16 * 2**20
    host.prefault()
    wait_for(lambda: resident_bytes(host.region) == 16 * 2**20)
    assert host.kv.min(axis=1).tolist() == host.kv.max(axis=1).tolist() == [0, 0, 0, 7, *[0] * 12]
    host.close()
    assert prefaulting() <= others


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made real ahead of their use on Linux only")
def test_prefault_stops_while_the_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    is_busy = True
    used_s = prefault.time.process_time
    monkeypatch.setattr(prefault, "_LONGEST_PAUSE_S", float("inf"))
    monkeypatch.setattr(prefault.time, "process_time", lambda: time.monotonic() if is_busy else used_s())
    host = host_memory.allocate_private(16, 2**20)
    host.prefault()
    wait_for(lambda: resident_bytes(host.region) >= 2 * 2**20)
    time.sleep(0.3)
    assert resident_bytes(host.region) < 4 * 2**20
    is_busy = False
    wait_for(lambda: resident_bytes(host.region) == 16 * 2**20)
    host.close()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made real ahead of their use on Linux only")
def test_a_process_that_always_computes_is_prefaulted_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(prefault.time, "process_time", time.monotonic)
    host = host_memory.allocate_private(4, 2**20)
    host.prefault()
    wait_for(lambda: resident_bytes(host.region) == 4 * 2**20)
    host.close()


LOG = """\
[1795261913.203274] [vm:19930:0]   +----------+--------------------+----------------------------------------+
[1795261913.203274] [vm:19930:0]   | rd intra-node cfg#1                                                    |
[1795261913.203274] [vm:19930:0]   | active message by ucp_am_send* with reply flag(multi) from host memory |
[1795261913.203274] [vm:19930:0]   +----------+--------------------+----------------------------------------+
[1795261913.203274] [vm:19930:0]   |  Range   |    Description     |                 Config                 |
[1795261913.203274] [vm:19930:0]   +----------+--------------------+----------------------------------------+
[1795261913.203274] [vm:19930:0]   | 627..inf | multi-frag copy-in | tcp/lo                                 |
[1795261913.206595] [vm:19930:0]   +--------+-------------+-------------------------------------------+
[1795261913.206595] [vm:19930:0]   | rd inter-node cfg#1                                              |
[1795261913.206595] [vm:19930:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1795261913.206595] [vm:19930:0]   +--------+-------------+-------------------------------------------+
[1795261913.206595] [vm:19930:0]   | Range  | Description |                  Config                   |
[1795261913.206595] [vm:19930:0]   +--------+-------------+-------------------------------------------+
[1795261913.206595] [vm:19930:0]   | 0..63  | software emulation | tcp/eth0                           |
[1795261913.206595] [vm:19930:0]   | 64..inf | zero-copy   | {}                  |
[1795261913.206595] [vm:19930:0]   +--------+-------------+-------------------------------------------+
[1795261913.30] [vm:19930:0]   tcp_ep.c:1 UCX  ERROR connection reset
"""


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("cma/memory", "cma"),
        ("tcp/eth0", "tcp"),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", "rdma"),
        ("posix/memory", "shared-memory"),
    ],
)
def test_transport_is_parsed_from_the_ucx_log(config: str, name: str) -> None:
    fd = os.memfd_create("log")
    log = ucx.UcxLog(fd)
    os.write(fd, LOG.format(config).encode())
    assert log.problems() == ["tcp_ep.c:1 UCX  ERROR connection reset"]
    assert log.read_transports() == [name]
    assert log.read_transports() == log.problems() == []
    os.close(fd)


@pytest.mark.parametrize(("own", "expected"), [({}, "on"), ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}, "auto")])
def test_gpu_memory_is_read_over_cuda_ipc_unless_the_user_decides(
    own: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"UCX_LOG_FILE": "kept", **own})
    ucx.prepare_environment()
    assert os.environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY") == own.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
    ucx.prepare_environment(reads_gpu_memory=True)
    assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == expected
