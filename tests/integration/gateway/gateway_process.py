"""Runs a gateway in its own process, with stub workers in another one."""

import asyncio
import json
import re
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.core.client_api import ChoiceDelta
from baton.fleet.processes.supervisor import Child, ChildSpec, baton_command
from baton.rpc.channel import channel_options
from baton.rpc.inference_rpc import InferenceClient
from tests.free_port import free_port
from tests.integration.gateway.http_gateway import request_bytes
from tests.unit.gateway.fakes import token_at

VALID_PROMPT = [5, 6, 7]
EXPECTED_TOKENS = [token_at(VALID_PROMPT, 0, index) for index in range(8)]
TIMES = {"heartbeat_s": 0.5, "detection_s": 10.0, "scheduler_wait_s": 20.0, "drain_s": 5.0}
"""Long enough that no process counts as lost on a busy machine. No process dies in these tests."""


class GatewayProcess:
    """A gateway process: its ports, its health, and one valid request through each port."""

    def __init__(self, child: Child, url: str, grpc_port: int, directory: Path, ca: Path | None) -> None:
        self.url = url
        self.http_port = int(url.rsplit(":", 1)[1])
        self.grpc_port = grpc_port
        trusted = ssl.create_default_context(cafile=ca)
        self.http = httpx.AsyncClient(base_url=url, timeout=20, verify=trusted)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", channel_options(30.0, 2**30))
        self._request_lock = asyncio.Lock()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._child = child
        self._directory = directory
        self._process = psutil.Process(child.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    @property
    def log(self) -> str:
        return (self._directory / "logs" / "gateway.log").read_text()

    @property
    def output(self) -> str:
        return (self._directory / "gateway.out").read_text()

    async def check(self) -> None:
        """Check that the process lives and answers a valid HTTP request correctly."""
        assert self._child.exit_code is None, self.output
        async with self._request_lock:
            answer = await self._send_valid_request()
        (choice,) = json.loads(answer)["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (EXPECTED_TOKENS, "length")

    async def _send_valid_request(self) -> bytes:
        """Send the valid request over a connection that stays open between checks."""
        if self._connection is None:
            self._connection = await asyncio.open_connection("127.0.0.1", self.http_port)
        reader, writer = self._connection
        writer.write(request_bytes("/v1/completions", json.dumps(valid_body()).encode()))
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
        assert head.startswith(b"HTTP/1.1 200 "), body
        return body

    async def check_grpc(self) -> None:
        """Check the same over gRPC."""
        generation = await InferenceClient(self.channel, "gateway").generate(
            valid_body(return_token_ids=None), timeout_s=20
        )
        choices: list[ChoiceDelta] = []
        while True:
            chunk = await generation.receive()
            choices += chunk.choices
            if chunk.is_last:
                break
        await generation.aclose()
        assert [token for choice in choices for token in choice.token_ids] == EXPECTED_TOKENS

    async def requests(self) -> Counter[tuple[str, str]]:
        """Return the number of ended requests by endpoint and status."""
        text = (await self.http.get("/metrics")).text
        counts: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "baton_requests_total":
                    counts[sample.labels["endpoint"], sample.labels["code"]] += int(sample.value)
        return counts

    async def aclose(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
        await self.http.aclose()
        await self.channel.close()


def valid_body(**more: Any) -> dict[str, Any]:
    body = {"prompt": VALID_PROMPT, "max_tokens": len(EXPECTED_TOKENS), "return_token_ids": True} | more
    return {name: value for name, value in body.items() if value is not None}


@asynccontextmanager
async def gateway_process(
    *,
    stub: str = "tests.integration.gateway.stub_cluster",
    command: Callable[[Path], list[str]] = lambda config: baton_command("gateway", config),
    ca: Path | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayProcess]:
    """Start a gateway and wait until it is ready. It must exit with 0 after SIGTERM.

    stub: module that serves the stub workers.
    command: returns the command line of the gateway for its configuration file.
    ca: file of the authority of its certificate, if it has one. Only `http` of the result then works.
    """
    with tempfile.TemporaryDirectory(prefix="baton-t-", dir="/tmp", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        cluster = _child("stub", [sys.executable, "-m", stub], directory)
        process: GatewayProcess | None = None
        gateway: Child | None = None
        try:
            config = {
                "http_port": 0,
                "grpc_port": free_port("127.0.0.1"),
                "schedulers": [await cluster.start()],
                "log_dir": str(directory / "logs"),
                **TIMES,
                **settings,
            }
            (directory / "gateway.yaml").write_text(yaml.safe_dump(config))
            gateway = _child("gateway", command(directory / "gateway.yaml"), directory)
            process = GatewayProcess(gateway, await gateway.start(), config["grpc_port"], directory, ca)
            async with asyncio.timeout(60):
                while (await process.http.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield process
        finally:
            if process is not None:
                await process.aclose()
            if gateway is not None:
                await gateway.stop(grace_s=60)
            await cluster.stop(grace_s=10)
        assert gateway.exit_code == 0, (directory / "gateway.out").read_text()


def _child(name: str, argv: list[str], directory: Path) -> Child:
    return Child(ChildSpec(name=name, argv=argv, output=directory / f"{name}.out"))
