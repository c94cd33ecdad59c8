"""`BlockFile`: KV blocks in the slots of a file, each with a header that says what it must be.

A payload is only used if its checksum is that of its header. A write that was interrupted at any point leaves
a slot that is empty, unfinished, or whose checksum is wrong.
"""

import errno
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.engine.tiers.kv_tier import BlockToStore
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.transfer.backends.host_memory import Bytes
from baton.worker.disk.disk_format import (
    HEADER_BYTES,
    PAGE_BYTES,
    DiskDefect,
    FileShape,
    SlotHeader,
    SlotState,
    decode_headers,
    encode_header,
    latest_headers,
    payload_checksum,
)
from baton.worker.disk.os_file import NoAnswer, RawFile, ShortRead
from baton.worker.disk.payload_io import PayloadIo, PlainPayloads

log = get_logger(__name__)

_REGION_SLOTS = 4 * 2**20 // HEADER_BYTES
"""Number of headers that are read at a time."""
MAX_BAD_PAGES = 16
"""Most pages of headers that may be unreadable. A disk with more has failed."""
_ERASED_AT_ONCE = 64
"""Slots that are overwritten before the disk is waited for."""


class BlockFile:
    """The slots of one file. Its methods block; several threads may call them for different slots.

    held: headers of the valid slots at start, the oldest first
    defects: what was found since the start, by kind
    """

    def __init__(
        self,
        file: RawFile,
        shape: FileShape,
        file_id: int,
        staging: Bytes,
        payloads: Callable[[RawFile, Bytes], PayloadIo] = PlainPayloads,
    ) -> None:
        """Take ownership of `file` and read its headers. Raises OSError if they cannot be read.

        A few pages that cannot be read are overwritten. Their slots then have no valid content.

        staging: [num_rows, block_bytes] uint8, between which and the slots payloads are copied
        """
        self.shape = shape
        self.num_slots = shape.num_slots
        self.staging = staging
        self.defects: Counter[DiskDefect] = Counter()
        self._num_bad_pages = 0
        self._file, self._file_id = file, file_id
        self._payloads = payloads(file, staging)
        self._lock = threading.Lock()  # headers and `_last_sequence`
        self._sequences = array("Q", bytes(8 * self.num_slots))
        self._checksums = array("Q", bytes(8 * self.num_slots))
        headers: list[SlotHeader] = []
        for header in self._headers():
            if isinstance(header, DiskDefect):
                self.defects[header] += 1
            else:
                headers.append(header)
        self.held, found = latest_headers(headers)
        self.defects += found
        self._last_sequence = max((header.sequence for header in headers), default=0)
        for header in self.held:
            self._sequences[header.slot] = header.sequence
            self._checksums[header.slot] = header.payload_checksum

    def sequence(self, slot: int) -> int:
        """Return the number of the last write of a slot."""
        return self._sequences[slot]

    def write(self, blocks: Mapping[int, BlockToStore], rows: Sequence[int]) -> None:
        """Write rows of the staging buffer into slots, in the same order, and make them valid.

        Raises OSError. The slots then have no valid content.
        """
        headers = [self._new_header(slot, block) for slot, block in blocks.items()]
        try:
            for header in headers:
                self._write_header(header)
            self._file.sync()  # before the payloads, so that an erasure finds them even after a power loss
            self._payloads.write(rows, [self.shape.payload_offset(slot) for slot in blocks])
            hit("disk.payload_written", num_blocks=len(rows))
            self._file.sync()
            hit("disk.payload_synced", num_blocks=len(rows))
            for header, row in zip(headers, rows, strict=True):
                checksum = payload_checksum(self.staging[row], header.block_hash)
                self._write_header(header._replace(state=SlotState.VALID, payload_checksum=checksum))
                self._checksums[header.slot] = checksum
        except OSError as error:
            self.defects[defect_of_write(error)] += 1
            for header in headers:
                with suppress(OSError):
                    self._write_header(header._replace(state=SlotState.DISCARDED))
            raise

    def probe(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Write rows into slots without content, and wait for the disk, to measure it. Raises OSError."""
        with self._counted(defect_of_write):
            self._payloads.write(rows, [self.shape.payload_offset(slot) for slot in slots])
            self._file.sync()

    def read(self, hashes: Mapping[int, BlockHash], rows: Sequence[int]) -> list[DiskDefect | None]:
        """Read the payloads of slots with these hashes into rows of the staging buffer.

        Returns for each what is wrong with it, or None. The caller counts the defects: the slot may have been
        given to other content meanwhile. Raises NoAnswer.
        """
        slots = list(hashes)
        try:
            self._payloads.read([self.shape.payload_offset(slot) for slot in slots], rows)
        except NoAnswer:
            raise
        except OSError as error:
            if len(slots) == 1:
                return [DiskDefect.TRUNCATED if isinstance(error, ShortRead) else DiskDefect.READ_ERROR]
            return [
                found for slot, row in zip(slots, rows, strict=True) for found in self.read({slot: hashes[slot]}, [row])
            ]
        return [
            None
            if payload_checksum(self.staging[row], hashes[slot]) == self._checksums[slot]
            else DiskDefect.DAMAGED_PAYLOAD
            for slot, row in zip(slots, rows, strict=True)
        ]

    def drop(self, sequences: Mapping[int, int]) -> None:
        """Mark slots as discarded, so that no later process uses their content.

        sequences: by slot, what `sequence` was. A slot that was written since then is left alone. Errors are
        counted: the content may then be found at the next start.
        """
        for slot, sequence in sequences.items():
            with self._not_marked(slot, SlotState.DISCARDED.name):
                header = self._header_of(slot)
                if header.sequence in (sequence, 0):
                    self._write_header(header._replace(state=SlotState.DISCARDED, sequence=sequence))

    def announce(self, sequences: Mapping[int, int]) -> None:
        """Mark the content of slots as announced, so that a later process announces it. Otherwise as
        `drop`."""
        for slot, sequence in sequences.items():
            with self._not_marked(slot, "ANNOUNCED"):
                header = self._header_of(slot)
                if header.sequence == sequence and header.state is SlotState.VALID:
                    self._write_header(header._replace(is_announced=True))

    def erase(self, tenant_root: BlockHash) -> int:
        """Overwrite all slots with content of a tenant, and wait for the disk.

        Slots without valid content are overwritten, too: their payload may be what another tenant has left.
        Returns how many were. Raises OSError; slots that were not overwritten then keep their headers. No
        slot may be written meanwhile.
        """
        num_erased = 0
        with self._counted(defect_of_write):
            self._payloads.check()
        for first in range(0, self.num_slots, _REGION_SLOTS):
            headers = range(first, min(first + _REGION_SLOTS, self.num_slots))
            with self._counted(lambda _: DiskDefect.READ_ERROR):
                region = self._region(headers)
            slots = [
                found[0]
                for found in decode_headers(region, self.shape, self._file_id, first)
                if not self._is_of_other(found, tenant_root)
            ]
            with self._counted(defect_of_write):
                for begin in range(0, len(slots), _ERASED_AT_ONCE):
                    self._erase_slots(slots[begin : begin + _ERASED_AT_ONCE])
            num_erased += len(slots)
        with self._counted(defect_of_write):
            self._file.sync()
        return num_erased

    def close(self) -> None:
        """Sync and release the file."""
        with suppress(OSError):
            self._file.sync()
        self._payloads.close()
        self._file.close()

    # -- internal --------------------------------------------------------------------------------------------------

    @contextmanager
    def _counted(self, defect_of: Callable[[OSError], DiskDefect]) -> Iterator[None]:
        """Count an error of the operating system, and raise it."""
        try:
            yield
        except OSError as error:
            self.defects[defect_of(error)] += 1
            raise

    @contextmanager
    def _not_marked(self, slot: int, mark: str) -> Iterator[None]:
        """Count and log an error of the operating system."""
        try:
            yield
        except OSError as error:
            self.defects[defect_of_write(error)] += 1
            log.warning("disk_kv_not_marked", slot=slot, mark=mark, problem=str(error))

    @staticmethod
    def _is_of_other(found: SlotHeader | tuple[int, DiskDefect], tenant_root: BlockHash) -> bool:
        """Return True if a slot has valid content of another tenant, which is known."""
        return (
            isinstance(found, SlotHeader)
            and found.state is SlotState.VALID
            and found.tenant_root not in (tenant_root, NO_HASH)
        )

    def _erase_slots(self, slots: Sequence[int]) -> None:
        zeros = bytes(self.shape.slot_bytes)
        for slot in slots:
            self._file.write(zeros, self.shape.payload_offset(slot))
        self._file.sync()  # before the headers, which say whose the payloads are
        for slot in slots:
            self._file.write(bytes(HEADER_BYTES), self.shape.header_offset(slot))

    def _region(self, slots: range) -> bytes:
        """Read the headers of some slots. Raises OSError."""
        region = bytearray(HEADER_BYTES * len(slots))
        self._file.read_into(region, self.shape.header_offset(slots.start))
        return bytes(region)

    def _headers(self) -> Iterator[SlotHeader | DiskDefect]:
        """Yield the headers of all slots that are not empty, or what is wrong with them."""
        for first in range(0, self.num_slots, _REGION_SLOTS):
            yield from self._headers_of(range(first, min(first + _REGION_SLOTS, self.num_slots)))

    def _headers_of(self, slots: range) -> Iterator[SlotHeader | DiskDefect]:
        """Yield the headers of some slots. If they cannot be read at once, they are read in pages.

        A page that cannot be read is overwritten: most disks replace a bad sector when all of it is written.
        Its slots are discarded rather than empty, because an erasure must overwrite their payloads.
        """
        try:
            region = self._region(slots)
        except OSError:
            per_page = PAGE_BYTES // HEADER_BYTES
            if len(slots) <= per_page:
                self._num_bad_pages += 1
                if self._num_bad_pages > MAX_BAD_PAGES:
                    raise
                discarded = (SlotHeader(slot, SlotState.DISCARDED, 0, NO_HASH, NO_HASH) for slot in slots)
                page = b"".join(encode_header(each, self.shape, self._file_id) for each in discarded)
                self._file.write(page.ljust(PAGE_BYTES, b"\0"), self.shape.header_offset(slots.start))
                yield DiskDefect.READ_ERROR
                return
            for first in range(slots.start, slots.stop, per_page):
                yield from self._headers_of(range(first, min(first + per_page, slots.stop)))
            return
        for found in decode_headers(region, self.shape, self._file_id, slots.start):
            yield found if isinstance(found, SlotHeader) else found[1]

    def _header_of(self, slot: int) -> SlotHeader:
        """Return the header of a slot as it is in the file; one with sequence 0 if it is not valid."""
        content = bytearray(HEADER_BYTES)
        self._file.read_into(content, self.shape.header_offset(slot))
        for found in decode_headers(bytes(content), self.shape, self._file_id, slot):
            if isinstance(found, SlotHeader):
                return found
        return SlotHeader(slot, SlotState.DISCARDED, 0, NO_HASH, NO_HASH)

    def _new_header(self, slot: int, block: BlockToStore) -> SlotHeader:
        with self._lock:
            self._last_sequence += 1
            self._sequences[slot] = self._last_sequence
            return SlotHeader(
                slot=slot,
                state=SlotState.FILLING,
                sequence=self._last_sequence,
                block_hash=block.block_hash,
                tenant_root=block.tenant_root,
                is_announced=block.is_announced,
                is_reused=block.is_reused,
            )

    def _write_header(self, header: SlotHeader) -> None:
        with self._lock:
            if self._sequences[header.slot] == header.sequence:
                content = encode_header(header, self.shape, self._file_id)
                self._file.write(content, self.shape.header_offset(header.slot))


def defect_of_write(error: OSError) -> DiskDefect:
    """Return the defect of a failed write. A limit of the user or of the process counts as no space."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return DiskDefect.NO_SPACE if is_full else DiskDefect.WRITE_ERROR
