"""Login and logout of the live view in headless Chromium, which sends headers that only browsers send."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
import yaml

from baton.gateway.auth.api_keys import KeyRing, key_digest
from baton.gateway.input.client_call import Identity
from tests.browser import BROWSER, chromium
from tests.certificates import Authority
from tests.free_port import free_port
from tests.integration.gateway.gateway_process import gateway_process
from tests.unit.gateway.live_rig import live_rig

pytestmark = pytest.mark.integration

KEYS = {key_digest("admin-key"): Identity(name="operator", tenant="ops", is_admin=True)}


@asynccontextmanager
async def served_view() -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with live_rig(("h0", "hybrid"), keys=KeyRing(KEYS)) as rig:
            server = uvicorn.Server(
                uvicorn.Config(rig.app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
            )
            serving = asyncio.create_task(server.serve([listener]))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            await serving


@pytest.mark.skipif(BROWSER is None, reason="browser: no Chromium on the PATH")
async def test_operator_logs_in_and_out(tmp_path: Path) -> None:
    async with served_view() as url, chromium(tmp_path) as browser:
        page = await browser.new_page()
        await page.open(url)
        assert await page.run("location.pathname") == "/login"
        state = "location.pathname + document.readyState + (document.querySelector('.problem')?.textContent ?? '')"
        for key, shown in (("wrong", "/logincompleteThis key is unknown."), ("admin-key", "/complete")):
            await page.run(f"document.getElementById('key').value = '{key}'")
            await page.run("setTimeout(() => document.forms[0].submit())")
            await page.until_equal(state, shown)
        await page.until("document.querySelectorAll('#workers tr').length === 1")
        await page.run("setTimeout(() => document.getElementById('logout').submit())")
        await page.until_equal("location.pathname", "/login")


async def test_admin_port_with_tls_serves_view_and_metrics_over_https_only(tmp_path: Path) -> None:
    authority = Authority.new(tmp_path / "ca")
    pair = authority.pair("front", "127.0.0.1")
    keys = tmp_path / "keys.yaml"
    entry = {"name": "operator", "tenant": "ops", "sha256": key_digest("admin-key").hex(), "admin": True}
    keys.write_text(yaml.safe_dump({"salt": "ab" * 16, "keys": [entry]}))
    tls = {"front_tls_cert": str(pair.certificate), "front_tls_key": str(pair.key), "admin_tls": True}
    port = free_port("127.0.0.1")
    async with gateway_process(admin_port=port, api_keys=str(keys), ca=authority.file, **tls):
        trusted = ssl.create_default_context(cafile=str(authority.file))
        origin = f"https://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=origin, verify=trusted, timeout=20) as client:
            assert (await client.get("/health")).status_code == 200
            login = await client.post("/login", data={"key": "admin-key"}, headers={"origin": origin})
            assert login.status_code == 303, login.text
            assert "; secure" in login.headers["set-cookie"].lower()
            assert "<html" in (await client.get("/")).text
            metrics = await client.get("/metrics/cluster", headers={"authorization": "Bearer admin-key"})
            assert "baton_open_requests" in metrics.text
        async with httpx.AsyncClient(timeout=20) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(f"http://127.0.0.1:{port}/health")
