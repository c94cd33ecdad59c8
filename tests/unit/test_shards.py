"""Shards of the tests are disjoint, cover all files and weigh about the same."""

from pathlib import Path

import pytest

from tests.file_scheduling import SPLIT_FILES
from tests.shards import Shard, mixed, weight_of

WEIGHTS = {f"tests/unit/test_{number}.py": float(number % 7 + 1) for number in range(50)} | {"tests/big.py": 40.0}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shards_cover_every_file_once(count: int) -> None:
    shards = [Shard(index, count).files(WEIGHTS) for index in range(1, count + 1)]
    assert sorted(file for files in shards for file in files) == sorted(WEIGHTS)
    loads = [sum(WEIGHTS[file] for file in files) for files in shards]
    assert max(loads) - min(loads) <= max(WEIGHTS.values())


def test_more_shards_than_files_leave_some_empty() -> None:
    assert [len(Shard(index, 3).files({"a": 1.0, "b": 1.0})) for index in (1, 2, 3)] == [1, 1, 0]


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "a/b", "1/2/3"])
def test_malformed_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write i/n"):
        Shard.parse(text)


def test_tests_with_processes_weigh_more() -> None:
    assert Shard.parse("2/3") == Shard(2, 3)
    assert weight_of("/x/tests/integration/cli/test_a.py", 3) > weight_of("/x/tests/unit/test_a.py", 3)


def test_files_that_wait_lie_evenly_among_the_others() -> None:
    waiting, others = [f"/integration/{name}" for name in "ab"], [f"/unit/{name}" for name in "cdefgh"]
    assert [file[-1] for file in mixed([*waiting, *others])] == list("acdebfgh")
    assert mixed(others) == others
    assert mixed([]) == []


def test_files_that_are_split_exist() -> None:
    assert all((Path(__file__).parents[2] / file).is_file() for file in SPLIT_FILES)


def test_only_files_that_share_nothing_are_split() -> None:
    for file in SPLIT_FILES:
        assert 'scope="' not in (Path(__file__).parents[2] / file).read_text(), "each process would have its own"
