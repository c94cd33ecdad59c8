"""Number of KV blocks from memory sizes and limits."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.engine.kv_cache.sizing import free_host_bytes, num_kv_blocks
from tests import builders

MIB = 1 << 20
BLOCK = builders.layout().block_bytes  # 4 tokens


def blocks(**changes: int | None) -> int:
    sizes: dict[str, int | None] = {
        "max_model_len": 100,
        "max_num_seqs": 1000,
        "chunk_tokens": 32,
        "free": 1000 * BLOCK,
    }
    return num_kv_blocks(builders.layout(), **(sizes | changes))  # type: ignore[arg-type]


def test_default_is_half_of_free_memory_shared_by_workers() -> None:
    assert blocks() == 500
    assert blocks(num_sharing=2) == 250


def test_no_more_blocks_than_sequences_can_use() -> None:
    assert blocks(max_num_seqs=4) == 4 * 25


def test_configured_size_is_used_unchanged() -> None:
    assert blocks(kv_memory=700 * BLOCK + BLOCK - 1, free=701 * BLOCK, max_num_seqs=1, num_sharing=8) == 700


def test_configured_size_above_free_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory is 700KiB; must be at most \d+ MiB: \d+ MiB are free"):
        blocks(kv_memory=700 * BLOCK, free=600 * BLOCK)


def test_memory_of_the_largest_step_is_not_used_for_kv() -> None:
    assert blocks(step_bytes=100 * BLOCK) == 450
    assert blocks(step_bytes=100 * BLOCK, num_sharing=2) == 200
    assert blocks(kv_memory=900 * BLOCK, step_bytes=100 * BLOCK) == 900
    with pytest.raises(ConfigError, match=r"at most \d+ MiB: \d+ MiB are free, and the largest step needs \d+"):
        blocks(kv_memory=901 * BLOCK, step_bytes=100 * BLOCK)


def test_each_block_of_a_draft_model_is_counted_with_one_of_the_model() -> None:
    assert blocks(draft_block_bytes=BLOCK // 4) == 400
    assert blocks(kv_memory=500 * BLOCK, draft_block_bytes=BLOCK // 4) == 400
    with pytest.raises(ConfigError, match="--kv-memory to at least 32000"):
        blocks(kv_memory=25 * BLOCK, draft_block_bytes=BLOCK // 4)


def test_less_than_one_sequence_of_maximum_length_is_refused() -> None:
    assert blocks(kv_memory=25 * BLOCK) == 25
    with pytest.raises(
        ConfigError,
        match=r"holds the KV of 96 tokens; must hold one sequence of 100.*--kv-memory to at least 25KiB",
    ):
        blocks(kv_memory=25 * BLOCK - 1)
    with pytest.raises(ConfigError, match="share of the free memory"):
        blocks(free=49 * BLOCK)


def test_layers_with_a_window_need_few_blocks() -> None:
    """25 blocks for the layer without a window, and what the largest chunk sees for the other."""
    layout = builders.windowed_layout((9, 0))
    sizes = {"max_model_len": 100, "max_num_seqs": 1, "chunk_tokens": 16, "free": 1000 * layout.block_bytes}
    assert num_kv_blocks(layout, **sizes) == 25 + 7
    assert num_kv_blocks(layout, **(sizes | {"chunk_tokens": 200})) == 25 + 25


def free_in(cgroup: Path, files: Mapping[str, int | str]) -> int:
    """Write cgroup files, whose numbers are in MiB, and return the free memory in MiB."""
    for name, value in files.items():
        (cgroup / name).parent.mkdir(exist_ok=True)
        (cgroup / name).write_text(f"{value * MIB if isinstance(value, int) else value}\n")
    return free_host_bytes(cgroup) // MIB


def test_free_memory_respects_the_cgroup(tmp_path: Path) -> None:
    assert free_in(tmp_path, {}) > 64
    assert free_in(tmp_path, {"memory.max": 100, "memory.current": 40}) == 60
    assert free_in(tmp_path, {"memory.current": 140}) == 0
    assert free_in(tmp_path, {"memory.max": "max"}) > 64


def test_page_cache_counts_as_free_memory(tmp_path: Path) -> None:
    """Shared memory is not free, although it is counted as page cache."""
    stat = f"anon {20 * MIB}\nfile {70 * MIB}\nshmem {10 * MIB}\ninactive_file {45 * MIB}\nactive_file {15 * MIB}"
    assert free_in(tmp_path, {"memory.max": 100, "memory.current": 90, "memory.stat": stat}) == 70


def test_free_memory_respects_a_cgroup_of_version_1(tmp_path: Path) -> None:
    limit, current, stat = (f"memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat"))
    assert free_in(tmp_path, {limit: 100, current: 90}) == 10
    page_cache = f"inactive_file 4096\ntotal_shmem {MIB}\ntotal_inactive_file {25 * MIB}\ntotal_active_file {5 * MIB}"
    assert free_in(tmp_path, {stat: page_cache}) == 40
    assert free_in(tmp_path, {limit: "9223372036854771712"}) > 64  # no limit
