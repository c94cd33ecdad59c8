"""WatchedFiles: files that are reloaded when they change."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.runtime.process import watched_files
from baton.runtime.process.watched_files import WatchedFiles, version_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("1")
    return file


def number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def logged_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    events: list[Any] = [record.msg for record in caplog.records if record.name == watched_files.__name__]
    return [event["event"] for event in events]


def test_version_changes_with_content_mode_and_inode(file: Path, tmp_path: Path) -> None:
    seen = [version_of(file)]
    file.write_text("22")
    seen.append(version_of(file))
    time.sleep(0.02)  # a file system's clock may tick every few milliseconds only
    file.chmod(0o400)
    seen.append(version_of(file))
    other = tmp_path / "other"
    other.write_text("22")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    seen.append(version_of(file))
    assert len(set(seen)) == len(seen)
    assert version_of(file) == seen[-1]
    assert version_of(file, tmp_path / "missing") is None


def test_reload_reads_only_a_changed_file(file: Path) -> None:
    watched = WatchedFiles(lambda: number(file), file, event="not_read")
    assert (watched.reload_if_changed(), watched.value) == (None, 1)
    file.write_text("22")
    assert (watched.reload_if_changed(), watched.value) == (22, 22)
    assert watched.reload_if_changed() is None


def test_unreadable_file_keeps_the_value_and_is_logged_once_per_version(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = WatchedFiles(lambda: number(file), file, event="not_read")
    for broken in ("half", "other half"):
        file.write_text(broken)
        assert [watched.reload_if_changed() for _ in range(3)] == [None] * 3
    file.unlink()
    assert [watched.reload_if_changed() for _ in range(3)] == [None] * 3
    assert watched.value == 1
    assert logged_events(caplog) == ["not_read"] * 3
    file.write_text("333")
    assert watched.reload_if_changed() == 333


def test_failed_read_is_retried_without_another_change(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some causes do not change the version of the file, such as an unavailable disk."""
    problems = [None, ConfigError("unavailable"), ConfigError("unavailable"), None]

    def read() -> int:
        if (problem := problems.pop(0)) is not None:
            raise problem
        return number(file)

    watched = WatchedFiles(read, file, event="not_read")
    file.write_text("22")
    assert [watched.reload_if_changed() for _ in range(4)] == [None, None, 22, None]
    assert logged_events(caplog) == ["not_read"]


def test_file_that_changes_during_a_read_is_read_again(file: Path) -> None:
    def read() -> int:
        value = number(file)
        if value == 1:
            file.write_text("22")
        return value

    watched = WatchedFiles(read, file, event="not_read")
    assert (watched.value, watched.reload_if_changed()) == (1, 22)


def test_failure_of_the_first_read_raises(file: Path) -> None:
    file.write_text("half")
    with pytest.raises(ConfigError, match="half"):
        WatchedFiles(lambda: number(file), file, event="not_read")
