"""Block counts from budgets."""

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.engine.kv_memory import free_host_bytes, num_kv_blocks
from tests import builders

MIB = 1 << 20
BLOCK = builders.layout().block_bytes  # 4 tokens


def blocks(**changes: int | None) -> int:
    sizes: dict[str, int | None] = {"max_model_len": 100, "max_num_seqs": 1000, "free": 1000 * BLOCK}
    return num_kv_blocks(builders.layout(), **(sizes | changes))  # type: ignore[arg-type]


def test_default_is_half_of_what_is_free_split_between_workers() -> None:
    assert blocks() == 500
    assert blocks(num_sharing=2) == 250


def test_no_more_than_can_be_used() -> None:
    assert blocks(max_num_seqs=4) == 4 * 25


def test_a_given_size_is_taken_as_it_is() -> None:
    assert blocks(kv_memory=700 * BLOCK + BLOCK - 1, free=701 * BLOCK, max_num_seqs=1, num_sharing=8) == 700


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory 700KiB is more than there is: \d+ MiB are free"):
        blocks(kv_memory=700 * BLOCK, free=600 * BLOCK)


def test_what_the_largest_step_takes_is_not_given_to_kv() -> None:
    assert blocks(step_bytes=100 * BLOCK) == 450
    assert blocks(step_bytes=100 * BLOCK, num_sharing=2) == 200
    assert blocks(kv_memory=900 * BLOCK, step_bytes=100 * BLOCK) == 900
    with pytest.raises(ConfigError, match=r"more than there is: \d+ MiB are free here, of which the largest step takes \d+"):
        blocks(kv_memory=901 * BLOCK, step_bytes=100 * BLOCK)


def test_less_than_one_sequence_is_refused() -> None:
    assert blocks(kv_memory=25 * BLOCK) == 25
    with pytest.raises(ConfigError, match=r"holds the KV of 96 tokens, less than one sequence of 100.*--kv-memory 25KiB"):
        blocks(kv_memory=25 * BLOCK - 1)
    with pytest.raises(ConfigError, match="share of the free memory"):
        blocks(free=49 * BLOCK)


def test_free_memory_respects_the_cgroup(tmp_path: Path) -> None:
    machine = free_host_bytes(tmp_path)
    assert machine > 64 * MIB
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{40 * MIB}\n")
    assert free_host_bytes(tmp_path) == 60 * MIB
    (tmp_path / "memory.current").write_text(f"{140 * MIB}\n")
    assert free_host_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > 64 * MIB
