"""Tests files in the user's cache: who is trusted, how they appear, and which are removed."""

import fcntl
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from baton.runtime import user_cache


def made(path: Path, num_bytes: int, age_s: int = 0) -> Path:
    path.write_bytes(b"x" * num_bytes)
    os.utime(path, (10_000 - age_s, 10_000 - age_s))
    return path


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache.cache_directory("weights") == tmp_path / "baton" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_cache.cache_directory("weights") == Path.home() / ".cache" / "baton" / "weights"


def test_files_that_others_may_write_are_not_used(tmp_path: Path) -> None:
    path = made(tmp_path / "file", 1)
    path.chmod(0o644)
    assert user_cache.use(path)
    path.chmod(0o664)
    assert not user_cache.use(path)
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    assert not user_cache.use(tmp_path / "link")
    assert not user_cache.use(tmp_path / "none")
    assert not user_cache.use(tmp_path)


@pytest.mark.parametrize(("owner", "expected"), [(os.geteuid(), True), (0, True), (os.geteuid() + 1, False)])
def test_files_of_other_users_are_not_used(owner: int, expected: bool, tmp_path: Path) -> None:
    facts = list(made(tmp_path / "file", 1).stat())
    facts[stat.ST_UID], facts[stat.ST_MODE] = owner, stat.S_IFREG | 0o600
    assert user_cache.is_trusted(os.stat_result(facts)) is expected


def test_a_file_appears_whole_and_belongs_to_its_owner(tmp_path: Path) -> None:
    new, final = made(tmp_path / "new", 5), made(tmp_path / "final", 2)
    new.chmod(0o666)
    user_cache.publish(new, final)
    assert not new.exists()
    assert (final.stat().st_size, stat.S_IMODE(final.stat().st_mode)) == (5, 0o644)


def test_a_lock_is_held_by_one_process_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with user_cache.locked(path):
            with pytest.raises(BlockingIOError), user_cache.locked(path, waits=False):
                pass
            assert path.exists()
        assert not path.exists()


@pytest.mark.parametrize("has_next", [False, True])
def test_a_lock_whose_file_was_removed_meanwhile_is_not_held(
    has_next: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last holder removes it while this process waits. The next one may have created another."""
    path, lock, waited = tmp_path / "lock", fcntl.flock, list[int]()

    def wait(file: IO[str], operation: int) -> None:
        if not waited:
            path.unlink()
            if has_next:
                path.touch()
        waited.append(operation)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", wait)
    with user_cache.locked(path):
        assert len(waited) == 2
        with pytest.raises(BlockingIOError), user_cache.locked(path, waits=False):
            pass
    assert not path.exists()


def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    files = [made(tmp_path / name, 10, age) for name, age in (("a", 5), ("b", 1), ("c", 3), ("d", 9))]
    removed = user_cache.remove_oldest(files, keep=files[3], max_bytes=30)
    assert removed == [files[0]], "the one that is kept counts, however old"
    assert user_cache.remove_oldest(files, keep=files[3], max_number=2) == [files[2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]


def test_using_a_file_makes_it_the_newest(tmp_path: Path) -> None:
    files = [made(tmp_path / name, 10, age) for name, age in (("a", 5), ("b", 1))]
    user_cache.use(files[0])
    assert user_cache.remove_oldest(files, keep=tmp_path / "none", max_number=1) == [files[1]]


def test_a_file_larger_than_the_limit_is_kept_alone(tmp_path: Path) -> None:
    files = [made(tmp_path / name, 10) for name in ("a", "b")]
    assert user_cache.remove_oldest(files, keep=files[0], max_bytes=5) == [files[1]]
    assert files[0].exists()
