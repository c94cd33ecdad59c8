"""`baton status`, `explain`, `drain` and `cache stats` as processes, against a cluster of processes."""

import asyncio
import json
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.client_api import ClusterStatus
from tests.cluster import DEMO_BLOCK_BYTES, ProcessCluster, process_cluster
from tests.cluster_security import ADMIN
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def baton(cluster: ProcessCluster, *args: str, user: str = ADMIN) -> tuple[int, str, str]:
    """Run a command, with the API key of `user` if the cluster has keys.

    Returns (exit code, standard output, standard error).
    """
    secured = cluster.secured
    access = [] if secured is None else ["--api-key", secured.keys[user], "--gateway-ca", str(secured.ours.file)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", *args, "--gateway", cluster.grpc_address, *access),
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(60):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def exit_code(cluster: ProcessCluster, name: str) -> int | None:
    """Wait until the process ends by itself, and return its exit code."""
    async with asyncio.timeout(60):
        while cluster.children[name].exit_code is None:  # noqa: ASYNC110 - the supervisor has no event for it
            await asyncio.sleep(0.05)
    return cluster.children[name].exit_code


async def test_status_explain_and_drain_agree_with_the_cluster() -> None:
    settings = {"device": "emulated", "emulated_costs": "step=1ms", "kv_memory": 128 * 2**20, **LONG_TIMES}
    async with process_cluster(prefill=0, decode=0, hybrid=1, **settings) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            answer = await client.post(
                "/v1/completions", json={"model": "demo", "prompt": "import os", "max_tokens": 4, "ignore_eos": True}
            )
            decisions = await client.get(f"/debug/decisions/{answer.headers['x-request-id']}")
        assert answer.status_code == 200, answer.text
        (decision,) = decisions.json()["decisions"]
        assert (decision["attempt"], decision["placement"]["decode"]["worker_id"]) == (0, "h0")

        code, out, _ = await baton(cluster, "status", "--json")
        status = json.loads(out)
        (worker,) = status["workers"]
        assert (code, worker["worker"]["worker_id"], worker["role"], worker["state"]) == (0, "h0", "hybrid", "ready")
        pids = {"h0": worker["pid"], "gateway": status["gateway"]["pid"], "scheduler": status["scheduler"]["pid"]}
        assert pids == {name: cluster.pid(name) for name in pids}
        assert {each["host"] for each in (worker, status["gateway"], status["scheduler"])} == {socket.gethostname()}
        table = (await baton(cluster, "status"))[1]
        assert all(str(pid) in table for pid in pids.values())

        by_id = await baton(cluster, "explain", answer.headers["x-request-id"])
        assert by_id == await baton(cluster, "explain", "last")
        assert by_id[0] == 0
        assert "attempt 1: prefill and decode h0, without KV transfer" in by_id[1]
        assert f"h0 (pid {cluster.pid('h0')}): " in by_id[1]
        assert "4 tokens; ended: " in by_id[1]

        assert (await baton(cluster, "explain", "00" * 16))[0] == 1
        code, out, _ = await baton(cluster, "drain", "h0", "--wait")
        assert code == 0
        assert out.splitlines()[-1] == "h0 has ended"
        assert await exit_code(cluster, "h0") == 0
        code, _, errors = await baton(cluster, "drain", "h0")
        assert (code, errors) == (1, "baton: no worker 'h0'; the cluster has none\n")


async def test_cache_stats_compare_reused_tokens_with_an_infinite_cache() -> None:
    """A prompt of 100 tokens that is sent three times has six full blocks of 16 to reuse.

    Between its second and its third use other prompts evict it from the device, which has 32 blocks.
    """
    emulated = {"device": "emulated", "emulated_costs": "step=1ms"}
    memory = {"kv_memory": 32 * DEMO_BLOCK_BYTES, "max_model_len": 400, "kv_eviction": "lru"}
    settings = {**emulated, **memory, **LONG_TIMES}
    async with process_cluster(prefill=0, decode=0, hybrid=1, **settings) as cluster:
        others = [[number] * 380 for number in (200, 300)]
        prompts = [[100] * 100, [100] * 100, *others, [100] * 100]
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            for prompt in prompts:
                answer = await client.post(
                    "/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
                )
                assert answer.status_code == 200, answer.text
        async with asyncio.timeout(60):
            while (found := await cache_stats(cluster))["total"]["num_requests"] < len(prompts):  # noqa: ASYNC110 - polls a process
                await asyncio.sleep(0.1)
        (worker,) = found["workers"]
        assert (worker["worker_id"], worker["use"]) == ("h0", found["total"])
        assert worker["tiers"][0]["total_slots"] == 32
        assert found["total"]["prompt_tokens"] == 1060
        assert found["total"]["tokens"] == {"device": 96, "host": 0, "disk": 0, "computed": 964}
        assert (found["ceiling"]["cached_tokens"], found["ceiling"]["is_exact"]) == (192, True)
        code, out, _ = await baton(cluster, "cache", "stats")
        assert (code, out.splitlines()[-1]) == (
            0,
            "reused 9.1% of the prompt tokens; an infinite cache would have reused 18.1%",
        )


async def test_exported_prefix_is_reused_after_a_clear_and_an_import(tmp_path: Path) -> None:
    """A real model computes its prompt, and then again from imported KV, which must give the same tokens."""
    prompt = "import os\nimport sys\n\n\ndef main(arguments):\n    " * 8
    path = tmp_path / "prefix.kv"
    async with process_cluster(prefill=0, decode=0, hybrid=1, **LONG_TIMES) as cluster:
        before = await complete(cluster, prompt)
        code, out, errors = await baton(cluster, "cache", "export", "--prompt", prompt, "--out", str(path))
        assert code == 0, errors
        num_tokens = before["usage"]["prompt_tokens"] // 16 * 16
        assert out.startswith(f"exported {num_tokens} of {before['usage']['prompt_tokens']} prompt tokens from h0 to")
        assert path.stat().st_size > num_tokens // 16 * DEMO_BLOCK_BYTES
        assert (await baton(cluster, "cache", "clear", "--tenant", "default"))[0] == 0
        async with asyncio.timeout(60):
            while (await baton(cluster, "cache", "export", "--prompt", prompt, "--out", f"{path}.2"))[0] == 0:  # noqa: ASYNC110 - polls a process
                await asyncio.sleep(0.1)

        code, out, errors = await baton(cluster, "cache", "import", str(path))
        assert (code, out) == (0, f"{num_tokens} of {num_tokens} tokens of {path} are cached at h0; 0 were before\n"), (
            errors
        )
        after = await complete(cluster, prompt)
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == min(
            num_tokens, num_tokens - 16 * (num_tokens == before["usage"]["prompt_tokens"])
        )

        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        code, _, errors = await baton(cluster, "cache", "import", str(path))
        assert code == 1
        assert "the file is damaged: the checksum of KV block" in errors


@pytest.mark.long
async def test_tenants_export_from_disks_with_tls_and_keys(tmp_path: Path) -> None:
    """The devices are so small that other prompts evict the exported one. A disk still has it."""
    prompt, path = "def f(x):\n    return x + 1\n\n\n" * 16 + "import os", tmp_path / "prefix.kv"
    first_path = tmp_path / "first.kv"
    settings = {"kv_memory": 128 * DEMO_BLOCK_BYTES, "max_model_len": 1024, "disk_kv": str(tmp_path / "kv")}
    async with process_cluster(
        prefill=1, decode=1, tenants=("alice", "eve"), disk_kv_size=64 * 2**20, **settings, **LONG_TIMES
    ) as cluster:
        before = await complete(cluster, prompt, user="alice")
        await complete(cluster, prompt, user="alice")
        num_tokens = before["usage"]["prompt_tokens"] // 16 * 16
        assert num_tokens < before["usage"]["prompt_tokens"], "the last full block is used twice, too"
        export = ("cache", "export", "--prompt", prompt, "--out")
        code, _, errors = await baton(cluster, *export, str(path), "--tenant", "alice", user="alice")
        assert code == 1, "it is no key of an admin"
        assert "admin" in errors
        assert (await baton(cluster, *export, str(path), "--tenant", "eve"))[0] == 1, "she has no such prefix"
        code, _, errors = await baton(cluster, *export, str(first_path), "--tenant", "alice")
        assert code == 0, errors

        def is_on_disk(status: ClusterStatus) -> bool:
            held = [tier.held for worker in status.workers for tier in worker.tiers if tier.tier == "disk"]
            return max(held) >= num_tokens // 16

        await cluster.until(is_on_disk, 60.0, "the prompt is on a disk")
        for number in range(12):
            await complete(cluster, f"# {number}\n" + prompt[: -8 * number or None], user="eve")
        code, out, errors = await baton(cluster, *export, str(path), "--tenant", "alice")
        assert code == 0, errors
        assert out.startswith(f"exported {num_tokens} of {before['usage']['prompt_tokens']} prompt tokens from ")
        assert path.read_bytes() == first_path.read_bytes()

        assert (await baton(cluster, "cache", "clear", "--tenant", "alice"))[0] == 0
        load = ("cache", "import", str(path), "--tenant")
        assert (await baton(cluster, *load, "alice", user="alice"))[0] == 1, "it is no key of an admin"
        code, out, errors = await baton(cluster, *load, "alice", "--worker", "p0")
        assert code == 0, errors
        assert out.startswith(f"{num_tokens} of {num_tokens} tokens")
        assert (await baton(cluster, *load, "eve"))[0] == 1, "it is not hers"
        after = await complete(cluster, prompt, user="alice")
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_tokens - 16


async def complete(cluster: ProcessCluster, prompt: str, *, user: str = ADMIN) -> Any:
    secured = cluster.secured
    headers = {} if secured is None else {"authorization": secured.bearer(user)}
    verify = True if secured is None else secured.trust
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=headers, verify=verify) as client:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def cache_stats(cluster: ProcessCluster) -> Any:
    code, out, errors = await baton(cluster, "cache", "stats", "--json")
    assert code == 0, errors
    return json.loads(out)
