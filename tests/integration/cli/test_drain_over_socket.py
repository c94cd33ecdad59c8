"""`baton drain --here`, as a pod's preStop hook runs it: over the worker's socket, without gateway or key."""

import asyncio
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.cluster import process_cluster
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def drain_here(drain_socket: Path, *flags: str) -> tuple[int, str]:
    """Run the command in an environment without gateway settings. Returns exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.cli", "drain", "--here", *flags,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "BATON_DRAIN_SOCKET": str(drain_socket)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_drain_over_the_socket_waits_for_the_running_request_and_the_exit() -> None:
    settings = {
        "device": "emulated",
        "emulated_costs": "step=20ms",
        "transfer": "local",
        **LONG_TIMES,
        "drain_s": 60.0,
    }
    with tempfile.TemporaryDirectory() as directory:  # pytest's paths are too long for a socket
        drain_socket = Path(directory) / "drain.sock"
        async with process_cluster(prefill=1, decode=0, wait=False, **settings) as cluster:
            await cluster.start_worker("d0", drain_socket=str(drain_socket))
            await cluster.wait_ready()
            body = {"model": "demo", "prompt": "def ", "max_tokens": 100, "ignore_eos": True}
            async with httpx.AsyncClient(timeout=60.0) as client:
                request = asyncio.create_task(client.post(f"{cluster.url}/v1/completions", json=body))
                await cluster.until(
                    lambda status: any(w.running_seqs for w in status.workers if w.worker.worker_id == "d0"),
                    30,
                    "d0 runs",
                )
                code, output = await drain_here(drain_socket, "--wait", "--limit-s", "60")
                answer = await request
            assert (code, output.splitlines()) == (0, ["d0 drains", "d0 has ended"])
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 100
            await cluster.until(lambda _: cluster.children["d0"].exit_code is not None, 60, "d0 has ended")
            assert cluster.children.pop("d0").exit_code == 0
            code, output = await drain_here(drain_socket, "--wait")
            assert code == 1
            assert output.startswith(f"baton: no worker listens at {drain_socket}")
