"""`BlockFile` and the file that a worker finds: content, other shapes, locks, modes, tenants."""

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.core.kv.kv_layout import KvLayout
from baton.worker.disk import open_block_file
from baton.worker.disk.disk_format import (
    HEADER_BYTES,
    PAGE_BYTES,
    DiskDefect,
    SlotState,
    encode_header,
    file_shape,
)
from baton.worker.disk.os_file import OsFile
from tests import builders
from tests.unit.worker.disk_rig import (
    NUM_SLOTS,
    SHAPE,
    TENANTS,
    Opened,
    block,
    content_of,
    hash_of,
    image_of,
    payload_at,
)

HEADERS_OF_PAGE = PAGE_BYTES // HEADER_BYTES


def written(directory: Path, numbers: dict[int, int]) -> Path:
    opened = Opened(directory)
    opened.write(numbers)
    opened.close()
    return opened.path


def test_content_is_there_after_a_restart_in_the_order_of_writes(tmp_path: Path) -> None:
    written(tmp_path, {5: 1, 0: 2})
    written(tmp_path, {3: 3})
    opened = Opened(tmp_path)
    assert [(header.slot, header.block_hash) for header in opened.file.held] == [
        (5, hash_of(1)),
        (0, hash_of(2)),
        (3, hash_of(3)),
    ]
    assert len(opened.load_all()) == 3
    assert not opened.file.defects


def test_flags_and_tenant_of_a_block_are_kept(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.file.write({1: replace(block(7), is_announced=False, is_reused=True)}, [0])
    opened.close()
    (header,) = Opened(tmp_path).file.held
    assert (header.is_announced, header.is_reused, header.tenant_root) == (False, True, TENANTS[1])


def test_content_that_is_announced_later_is_announced_after_a_restart(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    for slot in range(4):
        opened.file.write({slot: replace(block(slot), is_announced=False)}, [0])
    sequences = {slot: opened.file.sequence(slot) for slot in range(3)}
    opened.file.write({1: replace(block(8), is_announced=False)}, [0])
    opened.file.drop({2: opened.file.sequence(2)})
    opened.file.announce(sequences)
    opened.close()
    again = Opened(tmp_path)
    assert {header.slot: header.is_announced for header in again.file.held} == {0: True, 3: False, 1: False}
    assert [again.file.read({header.slot: header.block_hash}, [1]) for header in again.file.held] == [[None]] * 3


def test_headers_that_cannot_be_read_cost_only_their_page(tmp_path: Path) -> None:
    shape = replace(SHAPE, num_slots=3 * HEADERS_OF_PAGE)

    bad = shape.header_offset(HEADERS_OF_PAGE)

    class BadSector(OsFile):
        """Has a page that cannot be read until it is written as a whole."""

        is_bad = True

        def read_into(self, buffer: Any, offset: int) -> None:
            if self.is_bad and offset <= bad < offset + len(buffer):
                raise OSError(errno.EIO, "Input/output error")
            super().read_into(buffer, offset)

        def write(self, data: Any, offset: int) -> None:
            if self.is_bad and bad <= offset < bad + PAGE_BYTES:
                if len(data) < PAGE_BYTES:
                    raise OSError(errno.EIO, "Input/output error")
                self.is_bad = False
            super().write(data, offset)

    opened = Opened(tmp_path, shape)
    opened.write({0: 1, HEADERS_OF_PAGE + 1: 2, HEADERS_OF_PAGE + 2: 6, 2 * HEADERS_OF_PAGE: 3})
    opened.close()
    again = Opened(tmp_path, shape, BadSector)
    assert [header.slot for header in again.file.held] == [0, 2 * HEADERS_OF_PAGE]
    assert again.file.defects == {DiskDefect.READ_ERROR: 1}
    again.write({HEADERS_OF_PAGE + 1: 4})
    assert len(again.load_all()) == 2
    assert content_of(hash_of(6)) in image_of(again.path)
    again.close()
    repaired = Opened(tmp_path, shape)
    assert not repaired.file.defects
    assert repaired.file.erase(TENANTS[0]) == HEADERS_OF_PAGE, "the slots of the page, and no others"
    assert repaired.file.erase(TENANTS[0]) == 0
    assert not any(content_of(hash_of(number)) in image_of(again.path) for number in (2, 4, 6))
    repaired.close()
    assert Opened(tmp_path, shape).load_all() == {0: hash_of(1), 2 * HEADERS_OF_PAGE: hash_of(3)}


def test_the_later_of_two_headers_with_one_hash_counts(tmp_path: Path) -> None:
    written(tmp_path, {1: 9})
    written(tmp_path, {4: 9})
    opened = Opened(tmp_path)
    assert opened.load_all() == {4: hash_of(9)}
    assert opened.file.defects == {DiskDefect.DUPLICATE: 1}


def test_two_workers_never_share_a_file(tmp_path: Path) -> None:
    first, second = Opened(tmp_path), Opened(tmp_path)
    assert first.path != second.path
    second.write({0: 2})
    second.close()
    again = Opened(tmp_path)
    assert again.path == second.path
    assert again.load_all() == {0: hash_of(2)}


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, model=b"another-model---"),
        replace(SHAPE, layout=b"another-layout--"),
        replace(SHAPE, num_slots=NUM_SLOTS - 1),
        replace(SHAPE, block_bytes=SHAPE.block_bytes + 1),
    ],
    ids=["model", "layout", "size", "block"],
)
def test_a_foreign_file_is_emptied(shape: object, tmp_path: Path) -> None:
    written(tmp_path, {slot: slot + 1 for slot in range(NUM_SLOTS)})
    opened = Opened(tmp_path, shape)  # type: ignore[arg-type]
    assert opened.file.defects == {DiskDefect.FOREIGN_FILE: 1}
    assert not opened.file.held
    opened.close()
    assert content_of(hash_of(1)) not in image_of(opened.path)


def test_a_worker_prefers_a_file_of_its_own_shape(tmp_path: Path) -> None:
    foreign = Opened(tmp_path, replace(SHAPE, model=b"another-model---"))
    own = Opened(tmp_path)
    own.write({0: 1})
    foreign.close()
    own.close()
    again = Opened(tmp_path)
    assert again.load_all() == {0: hash_of(1)}
    assert not again.file.defects


def test_a_header_of_another_model_in_the_same_file_is_counted(tmp_path: Path) -> None:
    path = written(tmp_path, {0: 1, 1: 2})
    opened = Opened(tmp_path)
    (_, header) = opened.file.held
    other = encode_header(header, replace(SHAPE, model=b"another-model---"), opened.file._file_id)
    opened.close()
    with path.open("r+b") as file:
        file.seek(SHAPE.header_offset(1))
        file.write(other)
    again = Opened(tmp_path)
    assert again.load_all() == {0: hash_of(1)}
    assert again.file.defects == {DiskDefect.FOREIGN_HEADER: 1}


def test_headers_of_an_emptied_file_are_not_valid_in_the_next(tmp_path: Path) -> None:
    path = written(tmp_path, {0: 1})
    image = image_of(path)
    path.write_bytes(bytes(100))
    Opened(tmp_path).close()
    with path.open("r+b") as file:
        file.seek(SHAPE.header_offset(0))
        file.write(image[SHAPE.header_offset(0) :])
    again = Opened(tmp_path)
    assert not again.load_all()
    assert again.file.defects == {DiskDefect.DAMAGED_HEADER: 1}


def test_files_are_private(tmp_path: Path) -> None:
    path = written(tmp_path / "new" / "kv", {0: 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    Opened(path.parent).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_shorter_than_its_slots_is_repaired(tmp_path: Path) -> None:
    path = written(tmp_path, {0: 1, 7: 2})
    os.truncate(path, SHAPE.payload_offset(7) + 10)
    opened = Opened(tmp_path)
    assert opened.load_all() == {0: hash_of(1)}
    assert opened.file.defects == {DiskDefect.TRUNCATED: 1, DiskDefect.DAMAGED_PAYLOAD: 1}
    opened.write({7: 3})
    opened.close()
    assert Opened(tmp_path).load_all() == {0: hash_of(1), 7: hash_of(3)}


def test_a_file_that_is_truncated_while_it_is_used_is_noticed(tmp_path: Path) -> None:
    written(tmp_path, {0: 1, 7: 2})
    opened = Opened(tmp_path)
    os.truncate(opened.path, SHAPE.payload_offset(7))
    hashes = {header.slot: header.block_hash for header in opened.file.held}
    assert opened.file.read(hashes, [0, 1]) == [None, DiskDefect.TRUNCATED]


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "kv-0.baton").symlink_to(tmp_path / "target")
    with pytest.raises((ConfigError, OSError)):
        Opened(tmp_path)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--disk-kv .*file.* cannot be used"):
        Opened(tmp_path / "file")


def full_disk(fd: int, num_bytes: int) -> None:
    """Fail as `posix_fallocate` on a disk that has half of the space."""
    os.truncate(fd, num_bytes // 2)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_at_start_gets_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_block_file, "_allocate", full_disk)
    with pytest.raises(OSError, match="No space left"):
        Opened(tmp_path)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


# -- dropped and erased content ------------------------------------------------------------------------------------


def test_dropped_content_does_not_come_back(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.write({0: 1, 1: 2})
    opened.file.drop({0: opened.file.sequence(0)})
    opened.close()
    assert Opened(tmp_path).load_all() == {1: hash_of(2)}


def test_a_late_drop_leaves_newer_content_alone(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.write({0: 1})
    before = opened.file.sequence(0)
    opened.write({0: 2})
    opened.file.drop({0: before})
    opened.close()
    assert Opened(tmp_path).load_all() == {0: hash_of(2)}


def test_erased_content_is_overwritten_whatever_its_state(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.write({0: 1, 1: 2, 2: 3, 3: 4, 4: 5})
    opened.file.drop({2: opened.file.sequence(2)})
    headers = {header.slot: header for header in Opened(tmp_path).file.held}
    assert not headers
    unfinished = opened.file._new_header(5, block(7))
    opened.raw.write(content_of(hash_of(7)), SHAPE.payload_offset(5))
    opened.file._write_header(unfinished)
    opened.raw.write(b"x" * 50, SHAPE.header_offset(4))
    assert opened.file.erase(TENANTS[1]) == 4
    image = image_of(opened.path)
    assert [any(payload_at(image, slot)) for slot in range(6)] == [False, True, False, True, False, False]
    opened.close()
    again = Opened(tmp_path)
    assert again.load_all() == {1: hash_of(2), 3: hash_of(4)}
    assert not again.file.defects


@pytest.mark.parametrize(("method", "defect"), [("read_into", "read_error"), ("write", "write_error")])
def test_an_erasure_that_fails_counts_what_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, defect: str
) -> None:
    opened = Opened(tmp_path)
    opened.write({0: 1, 1: 2})

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(opened.raw, method, fail)
    with pytest.raises(OSError, match="injected"):
        opened.file.erase(TENANTS[1])
    assert opened.file.defects == {DiskDefect(defect): 1}


def test_erasing_overwrites_what_another_tenant_has_not_overwritten_yet(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.write({0: 1})
    opened.file._write_header(opened.file._new_header(0, block(2)))  # a write that has ended before its payload
    assert opened.file.erase(TENANTS[1]) == 1
    assert not any(payload_at(image_of(opened.path), 0))


# -- the format ----------------------------------------------------------------------------------------------------


def test_the_shape_of_a_file_is_that_of_its_layout_and_size() -> None:
    layout = builders.layout()
    shape = file_shape(layout, 10 * 2**20)
    assert shape.file_bytes <= 10 * 2**20 < replace(shape, num_slots=shape.num_slots + 2).file_bytes
    assert file_shape(layout, 10 * 2**20) == shape
    assert file_shape(layout, 100).num_slots == 0
    others: list[KvLayout] = [replace(layout, model_fingerprint="other"), builders.layout(block_size_tokens=8)]
    assert all(file_shape(other, 10 * 2**20) != shape for other in others)


def test_states_fit_into_the_flags() -> None:
    assert all(0 < state.value < 4 for state in SlotState)
