"""`baton drain --here` as a pod's preStop has it: by the worker's own socket, with no gateway to ask and no
key to show."""

import asyncio
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.cluster import process_cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def drain_here(drain_socket: Path, *flags: str) -> tuple[int, str]:
    """Exit code and output of the command, in the environment that it has in a pod: without a word of a
    gateway."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.cli", "drain", "--here", *flags,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "BATON_DRAIN_SOCKET": str(drain_socket)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_a_worker_that_is_asked_finishes_its_answer_and_leaves() -> None:
    settings = {"device": "emulated", "emulated_costs": "step=20ms", "transfer": "local"}
    with tempfile.TemporaryDirectory() as directory:  # a path short enough for a socket
        drain_socket = Path(directory) / "drain.sock"
        async with process_cluster(prefill=1, decode=0, wait=False, **settings) as cluster:
            await cluster.start_worker("d0", drain_socket=str(drain_socket))
            await cluster.wait_ready()
            body = {"model": "demo", "prompt": "def ", "max_tokens": 100, "ignore_eos": True}
            async with httpx.AsyncClient(timeout=60.0) as client:
                asking = asyncio.create_task(client.post(f"{cluster.url}/v1/completions", json=body))
                await cluster.until(
                    lambda status: any(w.running_seqs for w in status.workers if w.worker.worker_id == "d0"),
                    30,
                    "d0 runs",
                )
                code, said = await drain_here(drain_socket, "--wait", "--limit-s", "60")
                answer = await asking
            assert (code, said.splitlines()) == (0, ["d0 drains", "d0 has ended"])
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 100
            await cluster.until(lambda _: cluster.children["d0"].exit_code is not None, 10, "d0 has ended")
            assert cluster.children.pop("d0").exit_code == 0
            code, said = await drain_here(drain_socket, "--wait")
            assert code == 1
            assert said.startswith(f"baton: no worker listens at {drain_socket}")
