"""Files of KV blocks that were corrupted: no wrong content is ever read, and each defect is counted.

`make test-long` runs 10,000 corruptions.
"""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.worker.disk.disk_format import HEADER_BYTES, PAGE_BYTES, DiskDefect
from tests.scale import sized
from tests.unit.worker.disk_rig import (
    NUM_SLOTS,
    SHAPE,
    TENANTS,
    CutFile,
    Killed,
    Opened,
    content_of,
    hash_of,
    header_at,
    image_of,
    intact,
    payload_at,
)

SECTOR = 512


def put(image: bytearray, offset: int, content: bytes) -> None:
    image[offset : offset + len(content)] = content


def flip_bits(rng: Random, image: bytearray, older: bytes) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        image[rng.randrange(len(image))] ^= 1 << rng.randrange(8)


def truncate(rng: Random, image: bytearray, older: bytes) -> None:
    del image[rng.choice((rng.randrange(PAGE_BYTES), rng.randrange(len(image)))) :]


def swap_slots(rng: Random, image: bytearray, older: bytes) -> None:
    """Exchange the payloads of two slots, their headers, or both."""
    first, second = rng.sample(range(NUM_SLOTS), 2)
    kind = rng.choice(("payloads", "headers", "both"))
    before = bytes(image)
    for to, source in ((first, second), (second, first)):
        if kind != "headers":
            put(image, SHAPE.payload_offset(to), payload_at(before, source))
        if kind != "payloads":
            put(image, SHAPE.header_offset(to), header_at(before, source))


def age_headers(rng: Random, image: bytearray, older: bytes) -> None:
    """Put back headers from before the slots were written again."""
    for slot in rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)):
        put(image, SHAPE.header_offset(slot), header_at(older, slot))


def lose_sectors(rng: Random, image: bytearray, older: bytes) -> None:
    """Keep old sectors at random, as a power loss does that a disk survives with writes in any order."""
    for begin in range(PAGE_BYTES, len(image), SECTOR):
        if rng.random() < 0.3:
            put(image, begin, older[begin : begin + SECTOR])


def blank(rng: Random, image: bytearray, older: bytes) -> None:
    """Overwrite a range with zeros or random bytes."""
    begin, size = rng.randrange(len(image)), rng.choice((1, 16, 100, PAGE_BYTES))
    size = min(size, len(image) - begin)
    put(image, begin, bytes(size) if rng.random() < 0.5 else rng.randbytes(size))


CORRUPTIONS = (flip_bits, truncate, swap_slots, age_headers, lose_sectors, blank)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A file, and what it was before half of its slots were written again."""
    opened = Opened(tmp_path_factory.mktemp("disk"))
    opened.write({slot: slot + 1 for slot in range(NUM_SLOTS)})
    older = image_of(opened.path)
    for slot in range(0, NUM_SLOTS, 2):
        opened.write({slot: slot + 101})
    opened.close()
    return image_of(opened.path), older


@pytest.mark.fault("F-59")
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda each: each.__name__)
def test_no_corruption_is_used_and_each_is_counted(
    corrupt: Callable[[Random, bytearray, bytes], None], images: tuple[bytes, bytes], tmp_path: Path
) -> None:
    pristine, older = images
    path = tmp_path / "kv-0.baton"
    num_detected = 0
    for seed in range(sized(50, 1_600)):
        rng, image = Random(f"{corrupt.__name__}-{seed}"), bytearray(pristine)
        corrupt(rng, image, older)
        path.write_bytes(image)
        opened = Opened(tmp_path)
        loaded = opened.load_all()
        defects = opened.file.defects
        opened.close()
        image.extend(bytes(len(pristine) - len(image)))
        if image[:PAGE_BYTES] != pristine[:PAGE_BYTES]:
            assert not loaded
            assert defects[DiskDefect.DAMAGED_FILE] + defects[DiskDefect.TRUNCATED] == 1
            num_detected += 1
            continue
        good = intact(image, pristine) | {s for s in intact(image, older) if header_at(image, s) != bytes(HEADER_BYTES)}
        replaced = intact(image, older) - intact(image, pristine)
        assert loaded.keys() <= good
        assert good - replaced <= loaded.keys()
        erased = sum(header_at(image, slot) == bytes(HEADER_BYTES) for slot in range(NUM_SLOTS))
        assert len(loaded) + defects.total() - defects[DiskDefect.TRUNCATED] + erased >= NUM_SLOTS
        num_detected += len(loaded) < NUM_SLOTS
    assert num_detected > 0


def test_a_write_that_ends_at_any_byte_leaves_whole_blocks_only(tmp_path: Path) -> None:
    """As kill -9 in mid-write: what was written before the end is in the file, and no more."""
    first = Opened(tmp_path)
    first.write({slot: slot + 1 for slot in range(NUM_SLOTS)})
    first.close()
    pristine = image_of(first.path)
    num_partial = 0
    for seed in range(sized(30, 1_000)):
        rng = Random(f"kill-{seed}")
        first.path.write_bytes(pristine)
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, 4))
        opened = Opened(tmp_path, make=CutFile)
        opened.raw.limit = rng.randrange(len(slots) * (2 * HEADER_BYTES + SHAPE.block_bytes))
        with pytest.raises(Killed):
            opened.write({slot: slot + 101 for slot in slots})
        os.close(opened.raw.fd)
        again = Opened(tmp_path)
        loaded = again.load_all()
        assert all(loaded.get(slot) == hash_of(slot + 1) for slot in range(NUM_SLOTS) if slot not in slots)
        num_partial += any(slot in loaded for slot in slots)
        num_lost = sum(slot not in loaded for slot in slots)
        assert again.file.defects.total() == num_lost, again.file.defects
        again.close()
    assert num_partial > 0


class UnsyncedFile(CutFile):
    """Knows what was on the disk at the last sync."""

    def __init__(self, fd: int, **changes: Any) -> None:
        super().__init__(fd, **changes)
        self.synced = self.image()

    def image(self) -> bytes:
        return os.pread(self.fd, SHAPE.file_bytes, 0)

    def sync(self) -> None:
        super().sync()
        self.synced = self.image()

    def lose_power(self, rng: Random) -> None:
        """Keep any of the sectors that were written since the last sync, and close the file."""
        written = self.image()
        for begin in range(0, len(written), SECTOR):
            if rng.random() < 0.5:
                os.pwrite(self.fd, self.synced[begin : begin + SECTOR], begin)
        os.close(self.fd)


@pytest.mark.fault("F-59")
@pytest.mark.parametrize("before", ["empty", "of another tenant", "discarded"])
def test_after_a_power_loss_an_erasure_finds_all_payloads_of_a_tenant(before: str, tmp_path: Path) -> None:
    num_left = 0
    for seed in range(sized(40, 1_000)):
        rng, directory = Random(f"power-{before}-{seed}"), tmp_path / str(seed)
        opened = Opened(directory, make=UnsyncedFile)
        if before != "empty":
            opened.write({slot: 2 * slot + 1 for slot in range(NUM_SLOTS)})
        if before == "discarded":
            opened.file.drop({slot: opened.file.sequence(slot) for slot in range(NUM_SLOTS)})
        opened.raw.sync()
        numbers = {slot: 2 * slot + 100 for slot in rng.sample(range(NUM_SLOTS), rng.randint(1, 4))}
        opened.raw.limit = rng.randrange(2 * len(numbers) * (2 * HEADER_BYTES + SHAPE.block_bytes))
        with suppress(Killed):
            opened.write(numbers)
        opened.raw.lose_power(rng)
        parts = [content_of(hash_of(number))[begin:][:16] for number in numbers.values() for begin in (0, SECTOR)]
        num_left += any(part in image_of(opened.path) for part in parts)
        again = Opened(directory)
        again.file.erase(TENANTS[0])
        assert not any(part in image_of(again.path) for part in parts)
        assert len(again.load_all()) >= (NUM_SLOTS - len(numbers)) * (before == "of another tenant")
        again.close()
    assert num_left > 0


def test_a_payload_is_synced_before_its_header_makes_it_valid(tmp_path: Path) -> None:
    opened = Opened(tmp_path, make=CutFile)
    opened.write({2: 1, 5: 2})
    headers, payloads = ([offset(slot) for slot in (2, 5)] for offset in (SHAPE.header_offset, SHAPE.payload_offset))
    expected = [*headers, "sync", *payloads, "sync", *headers]
    assert [offset if kind == "write" else kind for kind, offset in opened.raw.calls] == expected


@pytest.mark.parametrize(
    ("code", "defect"), [(errno.ENOSPC, DiskDefect.NO_SPACE), (errno.EIO, DiskDefect.WRITE_ERROR)], ids=str
)
def test_a_disk_that_is_full_or_fails_keeps_nothing_of_the_write(code: int, defect: DiskDefect, tmp_path: Path) -> None:
    first = Opened(tmp_path)
    first.write({0: 1})
    first.close()
    size = 2 * (2 * HEADER_BYTES + SHAPE.block_bytes)
    for limit in range(0, size, 7):
        opened = Opened(tmp_path, make=CutFile)
        opened.raw.limit, opened.raw.error = limit, OSError(code, os.strerror(code))
        with pytest.raises(OSError, match=os.strerror(code)):
            opened.write({1: 2, 2: 3})
        assert opened.file.defects[defect] == 1
        opened.close()
        again = Opened(tmp_path)
        loaded = again.load_all()
        assert loaded.pop(0) == hash_of(1)
        assert len(loaded) <= 1  # the header of the first block was written before the error
        again.file.drop({slot: again.file.sequence(slot) for slot in loaded})
        again.close()


WRITER = """
    import sys
    from pathlib import Path
    from tests.unit.worker.disk_rig import NUM_SLOTS, Opened
    opened = Opened(Path(sys.argv[1]))
    print("ready", flush=True)
    for number in range(10**9):
        opened.write({slot: number * NUM_SLOTS + slot + 1 for slot in range(NUM_SLOTS)})
"""


@pytest.mark.slow
@pytest.mark.fault("F-59")
def test_kill_9_of_a_writer_leaves_whole_blocks_only(tmp_path: Path) -> None:
    rng = Random(5)
    for _ in range(sized(3, 60)):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.01 + 0.1 * rng.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        opened = Opened(tmp_path)
        loaded = opened.load_all()
        assert len(loaded) + opened.file.defects.total() >= NUM_SLOTS
        assert len(list(tmp_path.iterdir())) == 1  # its lock ended with it
        opened.close()
