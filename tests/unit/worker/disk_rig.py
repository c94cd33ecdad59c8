"""A file of eight small KV blocks. A block's content follows from its hash, so wrong content shows."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from baton.core.kv.block_hash import BlockHash
from baton.engine.tiers.kv_tier import BlockToStore
from baton.worker.disk.block_file import BlockFile
from baton.worker.disk.disk_format import HEADER_BYTES, FileShape
from baton.worker.disk.open_block_file import lock_block_file
from baton.worker.disk.os_file import OsFile

NUM_SLOTS, BLOCK_BYTES = 8, 600
SHAPE = FileShape(num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES, layout=b"layout-fingerpri", model=b"model-fingerprin")
TENANTS = (b"tenant-a" * 2, b"tenant-b" * 2)


def hash_of(number: int) -> BlockHash:
    return number.to_bytes(8, "little") * 2


def content_of(block_hash: BlockHash) -> bytes:
    return Random(block_hash).randbytes(BLOCK_BYTES)


def block(number: int) -> BlockToStore:
    return BlockToStore(block_id=0, block_hash=hash_of(number), tenant_root=TENANTS[number % 2])


class Killed(BaseException):
    """The process ended here."""


class CutFile(OsFile):
    """Writes `limit` bytes, then ends the process or fails with `error`; `calls` records what was called."""

    def __init__(self, fd: int, limit: int = 2**40, error: OSError | None = None) -> None:
        super().__init__(fd)
        self.limit, self.error = limit, error
        self.calls: list[tuple[str, int]] = []

    def write(self, data: Any, offset: int) -> None:
        self.calls.append(("write", offset))
        content = bytes(data)
        super().write(content[: self.limit], offset)
        self.limit -= len(content)
        if self.limit < 0:
            raise Killed if self.error is None else self.error

    def sync(self) -> None:
        self.calls.append(("sync", 0))
        super().sync()


class Opened:
    """A file that was opened, with the defects of its start."""

    def __init__(self, directory: Path, shape: FileShape = SHAPE, make: type[OsFile] = OsFile) -> None:
        locked = lock_block_file(directory, shape)
        self.raw: Any = make(locked.fd)
        self.path = locked.path
        self.staging = np.zeros((NUM_SLOTS, shape.block_bytes), dtype=np.uint8)
        self.file = BlockFile(self.raw, shape, locked.file_id, self.staging)
        self.file.defects += locked.defects

    def write(self, numbers: dict[int, int]) -> None:
        """Write block `number` into each slot."""
        for row, number in enumerate(numbers.values()):
            self.staging[row] = np.frombuffer(content_of(hash_of(number)), dtype=np.uint8)
        blocks = {slot: block(number) for slot, number in numbers.items()}
        self.file.write(blocks, range(len(blocks)))

    def load_all(self) -> dict[int, BlockHash]:
        """Read all held blocks, check each that is not refused, and return their hashes by slot."""
        loaded: dict[int, BlockHash] = {}
        for header in self.file.held:
            (defect,) = self.file.read({header.slot: header.block_hash}, [0])
            if defect is not None:
                self.file.defects[defect] += 1
            else:
                assert bytes(self.staging[0]) == content_of(header.block_hash), "content under a wrong hash"
                loaded[header.slot] = header.block_hash
        return loaded

    def close(self) -> None:
        self.file.close()


def image_of(path: Path) -> bytes:
    return path.read_bytes()


def header_at(image: bytes | bytearray, slot: int) -> bytes:
    begin = SHAPE.header_offset(slot)
    return bytes(image[begin : begin + HEADER_BYTES])


def payload_at(image: bytes | bytearray, slot: int) -> bytes:
    begin = SHAPE.payload_offset(slot)
    return bytes(image[begin : begin + BLOCK_BYTES])


def intact(image: bytes | bytearray, pristine: bytes) -> set[int]:
    """Return the slots whose header and payload are as in `pristine`."""
    return {
        slot
        for slot in range(NUM_SLOTS)
        if header_at(image, slot) == header_at(pristine, slot) and payload_at(image, slot) == payload_at(pristine, slot)
    }
