"""`baton up` as a user runs it: the first answer, restarts after deaths, and the cleanup."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import httpx
import psutil
import pytest

from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.process.process import with_parent_death_signal
from tests.free_port import free_port
from tests.integration.fleet.leftovers import GONE_S, Leftovers, shared_memory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
FLAGS = ["--http-port", "0", "--grpc-port", "0", "--kv-memory", "64MiB", "--max-model-len", "4096"]
ONE_WORKER = ["--prefill", "0", "--decode", "0", "--hybrid", "1", "--transfer", "local"]
EMULATED = ["--device", "emulated", "--emulated-costs", "step=5ms,prefill_token=100us"]
"""For tests of processes: their workers are ready four seconds of processor time earlier."""
START_S = 120.0
END_S = 90.0
HUB_GIVES_UP_S = 10.0
"""Time after which a download without an answer ends by itself."""
BODY = {"model": "demo", "prompt": "import os", "max_tokens": 4, "temperature": 0, "timeline": True}


class Up:
    """A running `baton up`, or a command that runs it, and its output."""

    def __init__(self, *argv: str, cwd: Path = ROOT, **environ: str) -> None:
        self.cwd = cwd
        self.shared_memory_before = shared_memory()
        self._process = subprocess.Popen(
            with_parent_death_signal(argv),  # ends even if pytest is killed
            cwd=cwd,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its own process group, so that a signal arrives as Ctrl-C does from a terminal
        )
        self.pid = self._process.pid
        self.url = ""
        self.printed = ""
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def until(self, pattern: str, limit_s: float = START_S) -> re.Match[str]:
        """Wait for a line that matches and has not been read yet. Return the match."""
        end_s = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
            except Empty:
                raise AssertionError(f"no {pattern!r} in: {self.printed}") from None
            assert line, f"it ended without {pattern!r}: {self.printed}"
            if found := re.search(pattern, line):
                return found

    def until_ready(self) -> Leftovers:
        self.url = self.until(r"^ready (http://\S+)")[1]
        return self.leftovers()

    def leftovers(self) -> Leftovers:
        return Leftovers(self.pid, self.shared_memory_before)

    def answer(self) -> Any:
        """Return the response of a completion request, which is repeated until it succeeds."""
        end_s = time.monotonic() + START_S
        last = ""
        while time.monotonic() < end_s:
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=60)
            except httpx.TransportError as error:  # the gateway is being restarted
                last = repr(error)
            else:
                if answer.status_code == httpx.codes.OK:
                    return answer.json()
                last = answer.text
            time.sleep(0.1)
        raise AssertionError(f"no answer: {last}; {self.printed}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def exit_code(self, limit_s: float = END_S) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        code = self._process.wait(limit_s)
        self._reading.join(30.0)
        return code

    def close(self) -> None:
        """Kill the process if it still runs. The reaper then cleans up."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reading.join(5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.printed += line
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def up(log_dir: Path, *flags: str, **environ: str) -> Iterator[Up]:
    """Run `baton up` as its script does (`-P`), in a directory with modules that must not be imported."""
    cwd = log_dir / "cwd"
    cwd.mkdir(parents=True)
    for name in ("click", "psutil", "redis", "structlog"):
        (cwd / f"{name}.py").write_text("open('imported', 'w').close()\nraise ImportError")
    # Reserved ports, which a gateway that is restarted finds free.
    ports = [word for flag in ("--http-port", "--grpc-port") for word in (flag, str(free_port("127.0.0.1")))]
    command = (sys.executable, "-P", "-m", "baton.cli", "up", *FLAGS, *ports, "--log-dir", str(log_dir))
    running = Up(*command, *flags, cwd=cwd, **environ)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Leftovers]]:
    """A cluster with one prefill and one decode worker, shared by several tests. The last one ends it."""
    with up(tmp_path_factory.mktemp("logs"), "--transfer", "local", *EMULATED) as running:
        yield running, running.until_ready()


def test_make_run_describes_its_first_answer_and_leaves_nothing(tmp_path: Path) -> None:
    flags = " ".join([*FLAGS, "--log-dir", str(tmp_path / "logs")])
    running = Up(shutil.which("make") or "make", "--no-print-directory", "run", "RUN_ONCE=1", f"ARGS={flags}")
    try:
        running.until("^ray ")  # not later: it may end at any time after its last line
        left = running.leftovers()
        code = running.exit_code(limit_s=START_S)
    finally:
        running.close()
    output = running.printed
    assert code == 0, output
    # Placement follows measured times, so on a busy machine the decode worker may compute the prompt itself.
    prefilled, pulled = r"w[01] \(pid \d+\) prefilled \d+ tokens; ", r"(pulled \d+ KiB over \S+ and )?"
    assert re.search(rf"{prefilled}w1 \(pid \d+\) {pulled}decoded \d+ tokens", output), output
    assert re.search(r"TTFT \d+\.\d ms   TPOT \d+\.\d ms", output), output
    for phase in ("redis", "ray", "scheduler", "gateway", "worker w0", "worker w1", "link", "first token"):
        assert re.search(rf"^{phase} .* \d+\.\d s$", output, re.MULTILINE), f"{phase} in {output}"
    left.assert_gone()


def test_ready_is_printed_after_the_warm_up_request(serving: tuple[Up, Leftovers]) -> None:
    """Must run first on the shared cluster: the only request so far is the warm-up."""
    running, _ = serving
    counted = re.findall(
        r"^baton_requests_total\{(.*)\} (\S+)$", httpx.get(f"{running.url}/metrics", timeout=60).text, re.MULTILINE
    )
    answered = [float(value) for labels, value in counted if "completions" in labels and 'code="200"' in labels]
    assert answered == [1.0], counted


def test_current_directory_is_not_imported_from(serving: tuple[Up, Leftovers]) -> None:
    """Neither by services nor by Ray's workers: it may be /tmp, with modules of another user."""
    assert not (serving[0].cwd / "imported").exists()


def test_dead_worker_is_restarted(serving: tuple[Up, Leftovers]) -> None:
    running, _ = serving
    first = running.answer()
    victim = first["baton"]["decode"]["pid"]
    os.kill(victim, signal.SIGKILL)
    running.until(r"worker w1 died: killed by SIGKILL; restarting it")
    running.until(r"worker w1 was restarted, pid \d+")
    again = running.answer()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["baton"]["decode"]["pid"] != victim


@pytest.mark.parametrize(
    ("name", "word"),
    [("scheduler", "baton.cli scheduler"), ("gateway", "baton.cli gateway"), ("redis", "unixsocket:|-server")],
)
def test_dead_service_is_restarted_and_the_next_request_works(
    serving: tuple[Up, Leftovers], name: str, word: str
) -> None:
    running, _ = serving
    before = running.answer()
    victim = next(
        child for child in psutil.Process(running.pid).children() if re.search(word, " ".join(child.cmdline()))
    )
    victim.kill()
    back = running.until(rf"^{name} died \(.+\) and was restarted, pid (\d+)")
    assert int(back[1]) != victim.pid
    assert psutil.pid_exists(int(back[1]))
    after = running.answer()
    assert after["choices"] == before["choices"]
    assert after["baton"]["decode"]["pid"] == before["baton"]["decode"]["pid"], "the workers were not restarted"


def test_ctrl_c_removes_everything(serving: tuple[Up, Leftovers]) -> None:
    """Ends the shared cluster, after the restarts of the tests above."""
    running, _ = serving
    running.answer()
    left = running.leftovers()
    running.press_ctrl_c()
    assert running.exit_code() == 0, running.printed
    left.assert_gone()
    last = running.printed.splitlines()[-1]
    assert last.startswith("stopped gateway, scheduler, redis, 2 workers, Ray; nothing is left running"), last
    assert "(raylet)" not in running.printed, "Ray's own messages belong in the log"


def test_sigkill_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    with up(tmp_path, *ONE_WORKER, *EMULATED) as running:
        running.until("^ray ")
        left = running.leftovers()
        running.signal(signal.SIGKILL)
        left.assert_gone(GONE_S)


@pytest.mark.long
def test_two_clusters_on_one_machine_are_independent_and_leave_nothing(tmp_path: Path) -> None:
    one_worker = [*ONE_WORKER, *EMULATED]
    with up(tmp_path / "a", *one_worker) as first, up(tmp_path / "b", *one_worker) as second:
        of_first, of_second = first.until_ready(), second.until_ready()
        assert of_first.run_id != of_second.run_id
        assert of_first.directory != of_second.directory
        for running, left in ((first, of_first), (second, of_second)):
            assert running.answer()["baton"]["decode"]["pid"] in {process.pid for process in left.processes}
        first.signal(signal.SIGKILL)
        of_first.assert_gone(GONE_S)
        assert second.answer()["baton"]["decode"]["pid"] in {process.pid for process in of_second.processes}
        assert all(process.is_running() for process in of_second.processes)
        second.signal(signal.SIGTERM)
        assert second.exit_code() == 0, second.printed
        assert "died" not in second.printed
        of_second.assert_gone()


def test_start_that_fails_after_ray_is_up_reports_the_error_and_leaves_nothing(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_DIR, tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"not weights")
    with up(tmp_path, *ONE_WORKER, "--model", str(model)) as running:
        running.until("^ray ")
        left = running.leftovers()
        assert running.exit_code(START_S) == 1
        assert re.search(r"^baton: worker w0 did not start: .*model", running.printed, re.MULTILINE), running.printed
        left.assert_gone()


def test_ctrl_c_ends_a_hanging_download(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(START_S)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        with up(
            tmp_path, "--model", "owner/name", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "hub"), HF_HUB_OFFLINE="0"
        ) as running:
            asked, _ = hub.accept()  # and never responds
            left = running.leftovers()
            began_s = time.monotonic()
            running.press_ctrl_c()
            assert running.exit_code() == 0, running.printed
            assert time.monotonic() - began_s < HUB_GIVES_UP_S
            left.assert_gone()
            asked.close()


def test_used_port_is_an_error_that_names_port_and_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with up(tmp_path, "--http-port", str(port)) as running:
            assert running.exit_code(60) == 1
    assert str(port) in running.printed
    assert "--http-port" in running.printed
