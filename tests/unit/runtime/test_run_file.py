"""Run files: found by the commands of the same user, and removed with their process."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.process.process_identity import is_gone, process_identity
from baton.runtime.process.run_file import RunningCluster, run_directories, running_clusters, write_run_file


def running(started_s: float = 1.0, **changes: Any) -> RunningCluster:
    facts = {
        "pid": os.getpid(),
        "identity": process_identity(os.getpid()),
        "cluster": "default",
        "model": "demo",
        "url": "http://127.0.0.1:8000",
        "gateway": "127.0.0.1:8001",
    }
    return RunningCluster(started_s=started_s, **{**facts, **changes})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_newest_cluster_comes_first_and_a_closed_file_is_gone(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    old, new = running(1.0), running(2.0, gateway="127.0.0.1:9")
    write_run_file(old, folders)
    file = write_run_file(new, folders[1:])
    assert running_clusters(folders) == [new, old]
    file.close()
    file.close()
    assert running_clusters(folders) == [old]


def test_new_directory_and_file_are_private_and_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o755)
    write_run_file(running(), [folder])
    (file,) = folder.iterdir()
    assert (mode(folder), mode(file)) == (0o755, 0o600)


def test_directory_that_others_may_write_to_is_left_as_it_is(tmp_path: Path) -> None:
    """Such as /tmp, which BATON_RUN_DIR may name."""
    tmp_path.chmod(0o1777)
    assert not write_run_file(running(), [tmp_path]).is_written
    assert running_clusters([tmp_path]) == []
    assert mode(tmp_path) == 0o1777


def test_reading_leaves_the_mode_of_a_directory(tmp_path: Path) -> None:
    assert write_run_file(running(), [tmp_path]).is_written
    tmp_path.chmod(0o755)
    assert running_clusters([tmp_path]) == [running()]
    assert mode(tmp_path) == 0o755


def test_directory_of_another_user_and_a_link_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    write_run_file(running(), [link, tmp_path / "no" / "x"])
    assert running_clusters([link]) == []
    assert len(running_clusters([tmp_path / "no" / "x"])) == 1
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert running_clusters([tmp_path / "no" / "x"]) == []


def test_file_of_an_ended_process_is_removed(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(done.pid)
    assert identity
    write_run_file(running(pid=done.pid, identity=identity), [tmp_path])
    assert len(running_clusters([tmp_path])) == 1
    done.communicate()
    assert running_clusters([tmp_path]) == []
    assert list(tmp_path.iterdir()) == []


def test_reused_pid_is_not_taken_for_the_process(tmp_path: Path) -> None:
    """The pid lives, but the start time is another one."""
    earlier = process_identity(os.getpid()).rpartition("/")[0] + "/1"
    write_run_file(running(identity=earlier), [tmp_path])
    assert running_clusters([tmp_path]) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("index", "gone"), [(0, False), (1, True), (2, False)])
def test_process_of_another_machine_or_container_is_left_alone(tmp_path: Path, index: int, gone: bool) -> None:
    """Fields: host, boot id, pid namespace. A process of an earlier boot of this host is gone."""
    parts = process_identity(os.getpid()).split("/")
    parts[index] = "other"
    write_run_file(running(identity="/".join(parts)), [tmp_path])
    assert running_clusters([tmp_path]) == []
    assert is_gone(os.getpid(), "/".join(parts)) is gone
    assert bool(list(tmp_path.iterdir())) is not gone


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x"}', "[" * 100_000, '{"pid": 1}'])
def test_file_that_is_not_understood_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert running_clusters([tmp_path]) == []


def test_file_of_a_later_release_with_more_fields_is_read(tmp_path: Path) -> None:
    write_run_file(running(), [tmp_path])
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "view_url": "http://x"}))
    assert running_clusters([tmp_path]) == [running()]


def test_without_a_usable_directory_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_run_file(running(), [tmp_path / "file"]).close()
    assert running_clusters([tmp_path / "file"]) == []


def test_directories_follow_the_environment() -> None:
    assert run_directories({"BATON_RUN_DIR": "/r", "XDG_RUNTIME_DIR": "/run/user/1"}) == [Path("/r")]
    both = {"XDG_RUNTIME_DIR": "/run/user/1", "XDG_CACHE_HOME": "/c"}
    assert run_directories(both) == [Path("/run/user/1/baton"), Path("/c/baton/run")]
    assert run_directories({}) == [Path("~/.cache/baton/run").expanduser()]
