"""The caches of compiled kernels that a worker shares with its child processes and with later starts."""

import os
from pathlib import Path

import pytest

from baton.runtime.child.child_process import run_child
from baton.worker.device import compile_caches
from baton.worker.device.compile_caches import IDLE_S, share_compile_caches

ENOUGH_S = 120.0


def test_a_child_compiles_into_the_caches_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child asks inductor itself. Without the variables it would answer with a directory below /tmp."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
    for variable in compile_caches.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with monkeypatch.context() as worker:
        environ = dict(os.environ)
        share_compile_caches(environ, tmp_path / "compiled")
        for variable in compile_caches.VARIABLES:
            worker.setenv(variable, environ[variable])
        end = run_child("tests.child_checks:compile_caches", {}, ENOUGH_S)
    (found,) = end.answers
    assert found == {
        "inductor": str(tmp_path / "compiled" / "inductor"),
        "triton": str(tmp_path / "compiled" / "triton"),
    }


def test_variables_that_are_set_stay(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/own"}
    share_compile_caches(environ, tmp_path)
    assert environ == {"TRITON_CACHE_DIR": "/own", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    environ: dict[str, str] = {}
    share_compile_caches(environ, tmp_path)
    assert not environ
    assert "only this user" in caplog.text


def test_a_cache_without_a_directory_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ: dict[str, str] = {}
    share_compile_caches(environ, tmp_path / "file" / "below")
    assert not environ


@pytest.mark.parametrize(
    ("max_bytes", "age_s", "is_kept"), [(1000, 2 * IDLE_S, True), (10, 2 * IDLE_S, False), (10, 1.0, True)]
)
def test_a_large_cache_is_emptied_unless_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, age_s: float, is_kept: bool
) -> None:
    monkeypatch.setattr(compile_caches, "MAX_COMPILED_BYTES", max_bytes)
    file = tmp_path / "inductor" / "ab" / "kernel.py"
    file.parent.mkdir(parents=True)
    file.write_text("x" * 50)
    when_s = file.stat().st_mtime - age_s
    os.utime(file, (when_s, when_s))
    share_compile_caches({}, tmp_path)
    assert file.exists() == is_kept
    assert (tmp_path / "inductor").is_dir()
