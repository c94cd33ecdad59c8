"""Tests that the kernels are compiled once, for this machine, or refused with the reason."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.model.kernels.cpu import kernel_build
from baton.model.kernels.cpu.kernel_build import (
    HERE,
    MAX_CACHED_LIBRARIES,
    NATIVE,
    OPTIONS,
    SOURCES,
    KernelsUnavailable,
    build,
    find_compiler,
)

NOTING_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit 0
echo x >> "$CALLS"
sleep 0.3
while [ "$1" != -o ]; do shift; done
touch "$2"
"""
HANGING_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit 0
sleep 600 &
echo $! > "$PIDS/$!"
wait
"""


def foreign_processors() -> list[str]:
    """Return processors with AVX-512 in floats, and with its pairs of bfloat16, except what this one has.

    The library of this processor is compiled by other tests.
    """
    if platform.machine() != "x86_64":
        return [NATIVE]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    has_bf16_dot = "avx512_bf16" in flags
    skylake = [] if "avx512f" in flags and not has_bf16_dot else ["-march=skylake-avx512"]
    return skylake + ([] if has_bf16_dot else ["-march=cooperlake"])


@pytest.mark.parametrize("processor", foreign_processors())
def test_sources_compile_for_other_processors(processor: str) -> None:
    options = [processor if option == NATIVE else option for option in OPTIONS]
    for source in SOURCES:
        compiled = subprocess.run([find_compiler(), *options, "-fsyntax-only", str(HERE / source)], check=False)
        assert compiled.returncode == 0, source


def test_missing_compiler_raises_kernels_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build(tmp_path / "cache")


def test_failing_compiler_and_unwritable_cache_raise_kernels_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    broken.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(KernelsUnavailable, match="no such header"):
        build(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))
    (tmp_path / "file").touch()
    with pytest.raises(KernelsUnavailable, match="cannot be written"):
        build(tmp_path / "file" / "cache")


def test_concurrent_processes_compile_once_and_old_libraries_are_deleted(tmp_path: Path) -> None:
    """The compiler is a script that records each call and creates an empty file."""
    script = tmp_path / "bin" / "c++"
    script.parent.mkdir()
    script.write_text(NOTING_COMPILER)
    script.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    for number in range(MAX_CACHED_LIBRARIES + 2):
        (cache / f"kernels-{number}.so").touch()
    (cache / "building-killed").mkdir()
    (cache / "building-killed" / "kernels.so").touch()
    code = (
        f"from pathlib import Path; from baton.model.kernels.cpu.kernel_build import build; build(Path({str(cache)!r}))"
    )
    env = {**os.environ, "PATH": f"{script.parent}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    for process in [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(3)]:
        assert process.wait(60) == 0
    assert (tmp_path / "calls").read_text() == "x\n" * (len(SOURCES) + 1), "each source once, then linking"
    assert len(list(cache.glob("kernels-*.so"))) == MAX_CACHED_LIBRARIES
    assert not list(cache.glob("building-*")), "what a process left that was killed"


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, pids = tmp_path / "bin" / "c++", tmp_path / "pids"
    script.parent.mkdir()
    pids.mkdir()
    script.write_text(HANGING_COMPILER)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setattr(kernel_build, "COMPILE_S", 2.0)  # enough to start it on a busy machine
    with pytest.raises(KernelsUnavailable, match="did not finish"):
        build(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("building-*"))
    assert any(pids.iterdir()), "the compiler was not started"
    for _ in range(100):
        if not any(has_process(int(file.name)) for file in pids.iterdir()):
            return
        time.sleep(0.05)
    raise AssertionError("children of the compiler still run")


def has_process(pid: int) -> bool:
    """True if a process runs, and has not only not been waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
