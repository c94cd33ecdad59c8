"""The live view in headless Chromium, on a cluster of emulated workers. Skipped without Chromium.

The figures are compared with `baton status` through a kill, a restart and a drain.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.client_api import ClusterStatus
from tests.browser import BROWSER, Page, chromium
from tests.cluster import ProcessCluster, process_cluster
from tests.scale import sized
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MARKUP = "<img src=x onerror=document.title='owned'>&lt;b&gt;"
FIGURES = """[...document.querySelectorAll("#workers tr")].map((row) => Object.fromEntries(
  [...row.querySelectorAll("td")].map((cell) => [cell.dataset.name, cell.textContent])))"""
NAMES = ("id", "role", "state", "pid", "epoch", "running", "waiting", "leases", "total", "free", "cached", "used")
AGREE_S = 2.0
"""Time within which the page must show what `baton status` shows."""
NUM_VIEWERS = 100
MAX_CORE_SHARE = 0.03
MEASURED_S = sized(2.0, 4.0)
MAX_TRIALS = 5
MOVING = "document.querySelectorAll('#topology .wire.moving').length > 0"


def figures_of(status: ClusterStatus) -> list[dict[str, str]]:
    return [
        {
            "id": worker.worker.worker_id,
            "role": worker.role.value,
            "state": worker.state.value,
            "pid": str(worker.pid),
            "epoch": f"{worker.worker.worker_epoch:016x}"[:8],
            "running": f"{worker.running_seqs:,}",
            "waiting": f"{worker.waiting_seqs:,}",
            "leases": f"{worker.open_leases:,}",
            "total": f"{worker.blocks.total:,}",
            "free": f"{worker.blocks.free:,}",
            "cached": f"{worker.blocks.cached:,}",
            "used": f"{worker.blocks.used:,}",
        }
        for worker in status.workers
    ]


async def check_figures(cluster: ProcessCluster, page: Page, limit_s: float = 60.0) -> None:
    """Wait until the page shows the status of at most `AGREE_S` ago."""
    recent: list[tuple[float, list[dict[str, str]]]] = []
    end_s = time.monotonic() + limit_s
    shown: Any = None
    while time.monotonic() < end_s:
        recent.append((time.monotonic(), figures_of(await cluster.status())))
        shown = [{name: row[name] for name in NAMES} for row in await page.run(FIGURES)]
        if any(shown == figures for at_s, figures in recent if at_s >= time.monotonic() - AGREE_S):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the page shows {shown}; the status is {recent[-1][1]}")


async def admin_url(cluster: ProcessCluster, name: str = "gateway") -> str:
    entries = await asyncio.to_thread(cluster.log_entries, name)
    return f"http://{next(entry['address'] for entry in entries if entry['event'] == 'admin_started')}"


async def complete(cluster: ProcessCluster, max_tokens: int = 16) -> str:
    """Return the id of a request."""
    body = {"model": MARKUP, "prompt": [7, 8, 9] * 40, "max_tokens": max_tokens, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{cluster.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-request-id"]


async def up(url: str) -> dict[str, float]:
    """Return which processes answered, by id."""
    async with httpx.AsyncClient(timeout=30) as client:
        text = (await client.get(f"{url}/metrics/cluster")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {s.labels["process"] for s in families["baton_kv_blocks"].samples} <= {"p0", "d0", "d1"}
    return {sample.labels["process"]: sample.value for sample in families["baton_process_up"].samples}


async def until_up(url: str, **expected: float) -> None:
    """Wait until the page shows these workers as up (1) or down (0). A page is kept for a second."""
    async with asyncio.timeout(60):
        while True:
            if {name: value for name, value in (await up(url)).items() if name[0] in "pd"} == expected:
                return
            await asyncio.sleep(0.1)


async def until_moving(cluster: ProcessCluster, page: Page) -> asyncio.Future[list[str]]:
    """Send requests until the page shows a transfer, as it does for one update. Return the last ones."""
    for _ in range(MAX_TRIALS):
        running = asyncio.gather(*(complete(cluster, 150) for _ in range(4)))
        while not running.done():
            if await page.run(MOVING):
                return running
            await asyncio.sleep(0.05)
        await running
    raise AssertionError("the page shows no transfer")


@pytest.mark.skipif(BROWSER is None, reason="browser: no Chromium on the PATH")
async def test_live_view_follows_a_kill_a_restart_and_a_drain(tmp_path: Path) -> None:
    settings = {"device": "emulated", "admin_port": 0, "served_model_name": MARKUP, "slo": "ttft=10s,tpot=1s"}
    settings["policy"] = "round_robin"  # always places prefill and decode apart, however slow the link seems
    settings |= {**LONG_TIMES, "heartbeat_s": 1.0}
    async with process_cluster(prefill=1, decode=2, **settings) as cluster, chromium(tmp_path) as browser:
        url, page = await admin_url(cluster), await browser.new_page()
        await page.open(url)
        await page.until("document.querySelectorAll('#workers tr').length === 3")
        request_id = await complete(cluster)
        await check_figures(cluster, page)
        await until_up(url, p0=1.0, d0=1.0, d1=1.0)

        # what clients choose stays text
        await page.until(f"document.getElementById('model').textContent.includes({json.dumps(MARKUP)})")
        assert await page.run("document.querySelectorAll('img').length") == 0

        # a request's waterfall and decision, by keyboard
        button = f"document.querySelector('[data-request=\"{request_id}\"] button')"
        await page.until(f"{button} !== null")
        await page.run(f"{button}.focus()")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#waterfall .bar').length >= 4")
        await page.until("document.getElementById('decisions').textContent.includes('candidate')")
        await page.press("Escape")
        await page.until("document.getElementById('detail-title').textContent.startsWith('Last decision')")

        running = await until_moving(cluster, page)
        await cluster.kill("d0")
        await page.until("document.getElementById('events').textContent.includes('d0 is lost')")
        await check_figures(cluster, page)
        await until_up(url, p0=1.0, d0=0.0, d1=1.0)
        await running
        await cluster.start_again("d0")
        await cluster.until_workers("p0", "d0", "d1")
        await check_figures(cluster, page)
        cluster.signal("d1", 15)
        await cluster.until_ended("d1")
        await page.until("document.getElementById('events').textContent.includes('d1 ')")
        await check_figures(cluster, page)
        assert await page.run("document.title") != "owned"
        assert page.problems == []
        await page.run("document.querySelector('.chart > .uplot').style.width = '3000px'")  # drawn for a wider window
        for width in (1280, 390):
            await page.resize(width)
            assert await page.run("document.documentElement.scrollWidth") <= width
        await page.open(f"{url}/health")  # which ends its stream
        await check_cost(cluster, url)


async def check_cost(cluster: ProcessCluster, url: str) -> None:
    """Check the share of a core that viewers cost: the lowest of some, as other load makes code slower."""
    shares: list[float] = []
    while not shares or min(shares) > MAX_CORE_SHARE:
        assert len(shares) < MAX_TRIALS, f"shares of a core: {shares}"
        shares.append(await core_share(cluster, url))


async def core_share(cluster: ProcessCluster, url: str) -> float:
    """Measure what viewers cost the gateway's process, against the same time without any."""
    process = psutil.Process(cluster.pid("gateway"))

    async def used_s(seconds: float) -> float:
        before = process.cpu_times()
        await asyncio.sleep(seconds)
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system

    async def watch(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", f"{url}/live/events") as answer:
            async for _ in answer.aiter_raw():
                pass

    limits = httpx.Limits(max_connections=NUM_VIEWERS)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        idle_s = await used_s(MEASURED_S)
        viewers = [asyncio.create_task(watch(client)) for _ in range(NUM_VIEWERS)]
        await asyncio.sleep(2.0)
        watched_s = await used_s(MEASURED_S)
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
    return (watched_s - idle_s) / MEASURED_S
