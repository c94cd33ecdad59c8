"""The preloaded library steps the wall clock of a process, delays its reads, and marks its connections."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nemesis.world import HostTools, host_unavailable_reason

REASON = host_unavailable_reason()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "processes can be disturbed")

READ_CLOCKS = "import json, time; print(json.dumps([time.time(), time.monotonic()]))"
READ_FILE = """
import os, sys, time
descriptor, content = os.open(sys.argv[1], os.O_RDONLY), bytearray(3)
began_s = time.monotonic()
assert os.preadv(descriptor, [content], 2) == 3
print(bytes(content).decode(), time.monotonic() - began_s)
"""
CONNECT = """
import socket, sys
connection = socket.socket(int(sys.argv[1]))
connection.connect((sys.argv[2], int(sys.argv[3])))
"""


class Tools(HostTools):
    """Without file systems for logs."""

    def _mount_logs(self, names: Any) -> bool:
        return False


@pytest.fixture
def tools(tmp_path: Path) -> HostTools:
    return Tools(tmp_path, ["p0"])


def run(code: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_wall_clock_is_stepped_and_its_readings_are_counted(tools: HostTools, step_s: float) -> None:
    tools.step_clock("p0", step_s)
    assert tools.num_stepped_reads("p0") == 0
    before = time.time(), time.monotonic()
    wall_s, monotonic_s = json.loads(run(READ_CLOCKS, **tools.environs["p0"]))
    assert before[0] <= wall_s - step_s <= time.time()
    assert before[1] <= monotonic_s <= time.monotonic()
    assert tools.num_stepped_reads("p0") > 0


def test_right_clock_is_not_counted(tools: HostTools) -> None:
    tools.step_clock("p0", 0.0)
    run(READ_CLOCKS, **tools.environs["p0"])
    assert tools.num_stepped_reads("p0") == 0


def test_process_without_the_library_is_seen_by_its_missing_readings(tools: HostTools) -> None:
    tools.step_clock("p0", 3600.0)
    run(READ_CLOCKS, CLOCK_STEP_FILE=tools.environs["p0"]["CLOCK_STEP_FILE"])
    assert tools.num_stepped_reads("p0") == 0


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")], ids=["IPv4", "IPv6"]
)
def test_connection_comes_from_the_address_of_its_process(
    tools: HostTools, family: socket.AddressFamily, host: str
) -> None:
    """grpc uses IPv6 sockets also for IPv4 addresses, where the machine has IPv6."""
    try:
        socket.socket(family).close()
    except OSError:
        pytest.skip("this machine has no such sockets")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run(CONNECT, str(int(family)), host, str(port), SOURCE_ADDRESS="127.9.8.7", **tools.environs["p0"])
        assert server.accept()[1][0] == "127.9.8.7"


def test_reads_of_a_file_are_delayed(tools: HostTools, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("0123456")
    tools.delay_reads("p0", 0.1)
    content, took_s = run(READ_FILE, str(path), **tools.environs["p0"]).split()
    assert content == "234"
    assert float(took_s) >= 0.1
