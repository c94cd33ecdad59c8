"""A gateway with stub workers, and its admin port's application without a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from baton.core.client_api import ProcessInfo
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.grpc.inference_service import AdminService
from baton.gateway.live.activity import Activity
from baton.gateway.live.cluster_metrics import ClusterMetrics, KnownTargets, MetricsTarget
from baton.gateway.live.live_app import LiveApp
from baton.gateway.live.live_source import LiveSource
from baton.gateway.live.view_auth import AllowedHosts
from baton.runtime.observability.admin_http import probe_routes
from baton.runtime.observability.metrics import expose
from tests.unit.gateway.fakes import LONG_LIMITS, Cluster, cluster

HOST = "127.0.0.1:8002"


@dataclass(slots=True)
class Answer:
    """A response. `headers` has the last value of each name."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class LiveRig:
    cluster: Cluster
    activity: Activity
    view: LiveSource
    app: LiveApp

    async def get(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        """Send one request. An underscore in a header's name stands for a dash."""
        answer = Answer()
        path, _, query = path.partition("?")
        sent = {"host": HOST} | {name.replace("_", "-"): value for name, value in headers.items()}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 5),
            "root_path": "",
        }

        parts = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()  # the client stays connected
            return parts.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message["body"]

        await self.app(scope, receive, send)
        return answer

    async def snapshot(self) -> dict[str, Any]:
        """Return the first snapshot of a new viewer."""
        feed = self.view.feed.watch()
        try:
            events = (await anext(feed)).decode().split("\n\n")
        finally:
            await feed.aclose()
        found: dict[str, Any] = json.loads(events[1].removeprefix("event: snapshot\ndata: "))
        return found


@asynccontextmanager
async def live_rig(*workers: tuple[str, str], keys: KeyRing | None = None, **changes: Any) -> AsyncIterator[LiveRig]:
    activity = Activity(asyncio.get_running_loop().time)
    async with cluster(*workers, keys=keys, observer=activity, **LONG_LIMITS | changes) as running:
        gateway = running.gateway
        activity.follow(gateway.view)
        running.scheduler.publish()
        process = ProcessInfo(process_id="gateway-0", pid=1, host="here", address="127.0.0.1:8000")
        view = LiveSource(gateway, AdminService(gateway, process).cluster_status, activity)
        metrics = ClusterMetrics(
            KnownTargets(None, asyncio.get_running_loop().time),
            MetricsTarget("gateway", "gateway-0", HOST),
            lambda: expose(running.registry).decode(),
        )
        app = LiveApp(
            view,
            metrics,
            Starlette(routes=probe_routes(gateway.health, running.registry)),
            keys=gateway.keys,
            hosts=AllowedHosts("127.0.0.1"),
            port=8002,
            is_tls=False,
        )
        yield LiveRig(cluster=running, activity=activity, view=view, app=app)
        await view.feed.aclose()
        await metrics.aclose()
