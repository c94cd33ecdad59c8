"""`baton up` as a user runs it: the first answer, what it leaves behind, and what it does when something of it dies."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from baton.fleet.run_dir import marked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
FLAGS = ["--http-port", "0", "--grpc-port", "0", "--kv-memory", "128MiB", "--max-model-len", "4096"]
COMMAND = [sys.executable, "-m", "baton.cli", "up", *FLAGS]
START_S = 120.0
GONE_S = 10.0


@contextmanager
def up(tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "--log-dir", str(tmp_path / "logs"), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """The output up to and with the line that matches."""
    assert process.stdout is not None
    seen = ""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        line = process.stdout.readline()
        seen += line
        if re.search(pattern, line):
            return seen
        assert line, f"it ended: {seen}"
    raise AssertionError(f"no {pattern!r} in: {seen}")


def run_id_of(process: subprocess.Popen[str]) -> str:
    """The mark of its children, as the reaper beside it was told."""
    for child in psutil.Process(process.pid).children():
        command = child.cmdline()
        if "baton.fleet.reaper" in command:
            return command[-2]
    raise AssertionError("no reaper beside baton up")


def assert_all_gone(run_id: str) -> None:
    end_s = time.monotonic() + GONE_S
    while marked(run_id):
        assert time.monotonic() < end_s, f"left behind: {[p.cmdline() for p in marked(run_id)]}"
        time.sleep(0.1)


def test_make_run_proves_the_way_of_its_first_answer_and_leaves_nothing(tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    flags = " ".join([*FLAGS, "--log-dir", str(tmp_path / "logs")])
    done = subprocess.run(
        ["make", "--no-print-directory", "run", "RUN_ONCE=1", f"ARGS={flags}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S + 60,
        check=False,
    )
    output = done.stdout
    assert done.returncode == 0, output
    assert re.search(r"w0 \(pid \d+\) prefilled \d+ tokens, \d+ KiB pulled by w1 \(pid \d+\) by \S+, which decoded \d+", output), output
    assert re.search(r"TTFT \d+\.\d ms   TPOT \d+\.\d ms", output), output
    for phase in ("redis", "ray", "scheduler", "gateway", "worker w0", "worker w1", "link"):
        assert re.search(rf"^{phase} .* \d+\.\d s$", output, re.MULTILINE), f"{phase} in {output}"
    if Path("/dev/shm").is_dir():
        assert set(os.listdir("/dev/shm")) <= shared_memory


def test_a_dead_worker_comes_back_and_a_killed_cluster_is_gone(tmp_path: Path) -> None:
    with up(tmp_path, "--transfer", "local") as process:
        url = re.search(r"ready (http://\S+)", read_until(process, r"^ready "))[1]  # type: ignore[index]
        run_id = run_id_of(process)
        body = {"model": "demo", "prompt": "import os", "max_tokens": 4, "temperature": 0, "timeline": True}
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        victim = first["baton"]["decode"]["pid"]
        os.kill(victim, signal.SIGKILL)
        read_until(process, r"worker w1 is back, pid \d+")
        again = _until_answered(url, body)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["baton"]["decode"]["pid"] != victim
        process.kill()
        process.wait()
        assert_all_gone(run_id)


def test_a_taken_port_is_an_error_that_names_port_and_flag(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--http-port", str(port), "--log-dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--http-port" in done.stderr


def _until_answered(url: str, body: dict[str, object]) -> dict[str, object]:
    end_s = time.monotonic() + 60
    while True:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        if answer.status_code == httpx.codes.OK:
            return answer.json()  # type: ignore[no-any-return]
        assert time.monotonic() < end_s, answer.text
        time.sleep(0.2)
