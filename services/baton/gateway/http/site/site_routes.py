"""Answers requests about the gateway itself: its models, state, metrics and decisions."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import baton
from baton.core.client_api import AdminApi
from baton.core.errors import Refused
from baton.core.plain_json import to_plain
from baton.gateway.gateway_service import GatewayService
from baton.gateway.http.asgi_io import caller_of, respond, respond_json
from baton.gateway.http.http_exchange import Access, HttpExchange, Route, Routes
from baton.gateway.http.site.docs_page import CONTENT_SECURITY_POLICY, docs_page
from baton.gateway.http.site.openapi import openapi_document
from baton.runtime.observability.metrics import CONTENT_TYPE

DECISIONS = "/debug/decisions/"
MODELS = "/v1/models/"


class SiteRoutes:
    """Serves the routes beside inference."""

    def __init__(
        self,
        service: GatewayService,
        admin: AdminApi,
        *,
        metrics: Callable[[], bytes],
        created: int,
        grpc_port: int,
        all_routes: Callable[[], Routes],
    ) -> None:
        """Create the routes. The arguments are those of `HttpApp`.

        all_routes: returns the routes of the application, which the documentation lists.
        """
        self._service = service
        self._admin = admin
        self._metrics = metrics
        self._created = created
        self._grpc_port = grpc_port
        self._all_routes = all_routes
        self._document = b""
        self._page = b""

    @property
    def routes(self) -> Routes:
        """All routes by path."""
        return {
            "/v1/models": Route(("GET",), Access.KEY, self._models),
            MODELS: Route(("GET",), Access.KEY, self._model),
            "/tokenizer_info": Route(("GET",), Access.KEY, self._tokenizer_info),
            "/version": Route(("GET",), Access.KEY, self._version),
            "/load": Route(("GET",), Access.ADMIN, self._load),
            "/openapi.json": Route(("GET",), Access.OPEN, self._openapi),
            "/docs": Route(("GET",), Access.OPEN, self._docs),
            "/health": Route(("GET",), Access.OPEN, self._health),
            "/ping": Route(("GET", "POST"), Access.OPEN, self._health),
            "/ready": Route(("GET",), Access.OPEN, self._ready),
            "/metrics": Route(("GET",), Access.ADMIN, self._metrics_text),
            DECISIONS: Route(("GET",), Access.ADMIN, self._decisions),
        }

    async def _models(self, exchange: HttpExchange) -> None:
        """List the models of the cluster."""
        model = self._model_object()
        ends = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        await respond_json(exchange.send, 200, {"object": "list", "data": [model], **ends})

    async def _model(self, exchange: HttpExchange) -> None:
        """Describe one model."""
        self._service.validator.check_model(exchange.scope["path"][len(MODELS) :])
        await respond_json(exchange.send, 200, self._model_object())

    def _model_object(self) -> dict[str, Any]:
        """Return the model in OpenAI's form, with the fields of Anthropic's."""
        (model,) = self._service.models
        return {
            "id": model.model_id,
            "object": "model",
            "type": "model",
            "created": self._created,
            "created_at": datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "display_name": model.model_id,
            "lifecycle": "active",
            "owned_by": "baton",
            "max_model_len": model.max_model_len,
        }

    async def _tokenizer_info(self, exchange: HttpExchange) -> None:
        """Describe the tokenizer: special tokens, chat template and limits."""
        await respond(exchange.send, 200, self._service.tokenizer.info)

    async def _version(self, exchange: HttpExchange) -> None:
        """Return the version of Baton."""
        await respond_json(exchange.send, 200, {"version": baton.__version__})

    async def _load(self, exchange: HttpExchange) -> None:
        """Return the number of open requests of this gateway."""
        await respond_json(exchange.send, 200, {"server_load": self._service.num_open})

    async def _openapi(self, exchange: HttpExchange) -> None:
        """Describe the API as an OpenAPI document."""
        await self._make_documentation()
        await respond(exchange.send, 200, self._document)

    async def _docs(self, exchange: HttpExchange) -> None:
        """Show the API's endpoints and fields as an HTML page."""
        await self._make_documentation()
        headers = [
            (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        await respond(exchange.send, 200, self._page, content_type=b"text/html; charset=utf-8", headers=headers)

    async def _make_documentation(self) -> None:
        """Make the document and the page when they are first needed, in a thread."""
        if not self._page:
            self._document, self._page = await asyncio.to_thread(_documentation, self._all_routes())

    async def _health(self, exchange: HttpExchange) -> None:
        """Report whether the gateway process is alive."""
        is_alive = self._service.health.is_alive
        await respond_json(exchange.send, 200 if is_alive else 503, {"status": "ok" if is_alive else "failed"})

    async def _ready(self, exchange: HttpExchange) -> None:
        """Report whether the cluster can serve: every role has a ready worker."""
        reasons = self._service.health.reasons
        response: dict[str, object] = {"status": "waiting" if reasons else "ready", "reasons": reasons}
        if self._is_admin(exchange):
            response |= {"links": self._service.view.links, "grpc_port": self._grpc_port}
        await respond_json(exchange.send, 503 if reasons else 200, response)

    def _is_admin(self, exchange: HttpExchange) -> bool:
        try:
            return self._service.keys.identify(caller_of(exchange.scope).authorization).is_admin
        except Refused:
            return False

    async def _metrics_text(self, exchange: HttpExchange) -> None:
        """Return the metrics in Prometheus text format."""
        await respond(exchange.send, 200, self._metrics(), content_type=CONTENT_TYPE.encode())

    async def _decisions(self, exchange: HttpExchange) -> None:
        """Return the decision records of a request."""
        name = exchange.scope["path"][len(DECISIONS) :]
        records = await self._admin.explain(None if name == "last" else name, caller_of(exchange.scope))
        await respond_json(exchange.send, 200, {"decisions": [to_plain(record) for record in records]})


def _documentation(routes: Routes) -> tuple[bytes, bytes]:
    """Return the OpenAPI document and the page that shows it."""
    document = openapi_document(routes)
    return json.dumps(document, separators=(",", ":")).encode(), docs_page(document)
