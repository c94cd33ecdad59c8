"""Files that change under a running process."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
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


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    events: list[Any] = [record.msg for record in caplog.records]
    return [event["event"] for event in events]


def test_a_version_changes_with_content_mode_and_file(file: Path, tmp_path: Path) -> None:
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


def test_what_has_changed_is_read_again_and_nothing_else(file: Path) -> None:
    followed = WatchedFiles(lambda: number(file), file, event="not_read")
    assert (followed.reload_if_changed(), followed.value) == (None, 1)
    file.write_text("22")
    assert (followed.reload_if_changed(), followed.value) == (22, 22)
    assert followed.reload_if_changed() is None


def test_what_cannot_be_read_changes_nothing_and_is_said_once_a_version(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    followed = WatchedFiles(lambda: number(file), file, event="not_read")
    for broken in ("half", "other half"):
        file.write_text(broken)
        assert [followed.reload_if_changed() for _ in range(3)] == [None] * 3
    file.unlink()
    assert [followed.reload_if_changed() for _ in range(3)] == [None] * 3
    assert followed.value == 1
    assert said(caplog) == ["not_read"] * 3
    file.write_text("333")
    assert followed.reload_if_changed() == 333


def test_what_could_not_be_read_is_tried_again_without_another_change(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not every reason shows in a version: the disk may have been away."""
    problems = [None, ConfigError("away"), ConfigError("away"), None]

    def read() -> int:
        if (problem := problems.pop(0)) is not None:
            raise problem
        return number(file)

    followed = WatchedFiles(read, file, event="not_read")
    file.write_text("22")
    assert [followed.reload_if_changed() for _ in range(4)] == [None, None, 22, None]
    assert said(caplog) == ["not_read"]


def test_what_changes_while_it_is_read_is_read_again(file: Path) -> None:
    def read() -> int:
        value = number(file)
        if value == 1:
            file.write_text("22")
        return value

    followed = WatchedFiles(read, file, event="not_read")
    assert (followed.value, followed.reload_if_changed()) == (1, 22)


def test_at_first_it_is_an_error(file: Path) -> None:
    file.write_text("half")
    with pytest.raises(ConfigError, match="half"):
        WatchedFiles(lambda: number(file), file, event="not_read")
