"""Opening the disk tier of a worker: sizes, a disk that is full, and the settings."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.core.errors import ConfigError
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device.kv_memory import open_disk
from baton.worker.device.kv_memory.open_disk import MIN_STAGING_ROWS, host_copies, open_disk_tier
from baton.worker.disk.disk_format import DiskDefect
from tests import builders
from tests.unit.worker.test_block_file import full_disk

LAYOUT = builders.layout()
MIB = 2**20


def opened(directory: Path, **changes: Any) -> Any:
    config = WorkerConfig(schedulers=("s:1",), **({"disk_kv": directory, "disk_kv_size": MIB} | changes))
    kv = np.zeros((8, LAYOUT.block_bytes), dtype=np.uint8)
    return open_disk_tier(config, builders.worker_ref("w"), LAYOUT, host_copies(kv))


def file_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


async def test_the_tier_has_as_many_slots_as_fit(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    assert 200 < tier.slots.num_slots < MIB / LAYOUT.block_bytes
    assert file_bytes(tmp_path) <= MIB
    assert len(tier._store_rows) >= MIN_STAGING_ROWS // 2
    await tier.aclose()


def test_without_a_directory_there_is_no_tier(tmp_path: Path) -> None:
    assert opened(tmp_path, disk_kv=None, disk_kv_size=None) is None


def test_a_size_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk-kv-size is .*; must hold at least one block"):
        opened(tmp_path, disk_kv_size=4096)


def test_a_file_whose_index_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_disk, "free_host_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"index takes .* GB free memory. Choose a smaller size, or larger blocks"):
        opened(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{"disk_kv": None}, {"disk_kv_size": None}], ids=["size only", "directory only"])
def test_one_setting_without_the_other_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set both or none"):
        opened(tmp_path, **changes)


@pytest.mark.fault("F-60")
async def test_a_worker_starts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.disk.open_block_file._allocate", full_disk)
    tier = opened(tmp_path)
    assert tier.counts().total == 0
    assert tier.defects == {DiskDefect.NO_SPACE: 1}
    await tier.measure(8)
    assert await tier.store([]) == await tier.load([b"x" * 16], [0]) == 0
    await tier.aclose()


@pytest.mark.fault("F-60")
async def test_a_worker_starts_on_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(open_disk, "BlockFile", fail)
    tier = opened(tmp_path)
    assert tier.defects == {DiskDefect.WRITE_ERROR: 1}
    await tier.aclose()
