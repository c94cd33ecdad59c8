"""A gateway with API keys over real HTTP and gRPC ports: access per route, limits, and cheap rejections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from baton.core.client_api import ProcessInfo
from baton.core.errors import Code, Reason, Refused
from baton.gateway.auth.api_keys import KeyRing, key_digest, parse_keys
from baton.gateway.grpc.inference_service import AdminService, InferenceService
from baton.gateway.input.client_call import Identity
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from baton.rpc.grpc_server import GrpcServer
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests import grpc_methods
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes
from tests.unit.gateway.fakes import LONG_LIMITS, cluster, until

PD = (("p0", "prefill"), ("d0", "decode"))
ALICE, ADMIN, EVE = "key-of-alice", "key-of-an-admin", "key-of-eve"
OPEN_ROUTES = ("/health", "/ready", "/ping", "/openapi.json", "/docs")
KEY_ROUTES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/demo"),
)
KEY_ROUTES += (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/version"))
ADMIN_ROUTES = (("GET", "/metrics"), ("GET", "/load"), ("GET", "/debug/decisions/last"))


class TimelessKeyRing(KeyRing):
    """Keys whose request rates see no time pass, however long a test takes."""

    def admit(self, identity: Identity, now_s: float) -> None:
        super().admit(identity, 0.0)

    def charge(self, identity: Identity, num_requests: int, now_s: float) -> None:
        super().charge(identity, num_requests, 0.0)


def key_ring(**limits: int) -> KeyRing:
    entries = [
        {"name": "alice", "tenant": "search", "sha256": key_digest(ALICE).hex(), **limits},
        {"name": "admin", "tenant": "operators", "sha256": key_digest(ADMIN).hex(), "admin": True},
        {"name": "eve", "tenant": "ads", "sha256": key_digest(EVE).hex()},
    ]
    return TimelessKeyRing(parse_keys({"salt": "ab" * 16, "keys": entries}))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD, keys=key_ring()) as g:
        yield g


@pytest.mark.parametrize(("method", "path"), [*KEY_ROUTES, *ADMIN_ROUTES])
async def test_missing_or_wrong_key_is_rejected_before_the_body_is_read(
    gateway: HttpGateway, method: str, path: str
) -> None:
    for headers in ({}, bearer("wrong"), {"authorization": "Basic eDp5"}):
        answer = await gateway.client.request(
            method, path, headers=headers, content=b"{no json" if method == "POST" else None
        )
        assert answer.status_code == 401, answer.text
        assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == (
            "authentication_error",
            "invalid_api_key",
        )
        assert answer.headers["www-authenticate"] == "Bearer"
    assert not gateway.cluster.scheduler.queries


@pytest.mark.fault("F-45")
async def test_every_route_except_the_probes_requires_a_key(gateway: HttpGateway) -> None:
    """The routes come from the application's table, so that new routes are checked too."""
    for headers in ({}, bearer("wrong")):
        is_open = set()
        for path, route in gateway.app.routes.items():
            answer = await gateway.client.request(
                route.methods[0], f"{path}x" if path.endswith("/") else path, headers=headers
            )
            if answer.status_code != 401:
                is_open.add(path)
        assert is_open == set(OPEN_ROUTES)
    assert not gateway.cluster.scheduler.queries


@pytest.mark.parametrize("path", OPEN_ROUTES)
async def test_probes_and_documentation_need_no_key(gateway: HttpGateway, path: str) -> None:
    assert (await gateway.client.get(path)).status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_admin_routes_require_an_admin_key(gateway: HttpGateway, method: str, path: str) -> None:
    refused = await gateway.client.request(method, path, headers=bearer(ALICE))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert (await gateway.client.request(method, path, headers=bearer(ADMIN))).status_code in (200, 404)


async def test_openai_client_is_served_only_with_a_valid_key(gateway: HttpGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=ALICE, max_retries=0) as client:
        answer = await client.completions.create(model="demo", prompt="hello", max_tokens=4)
        assert answer.usage is not None
        assert [model.id async for model in await client.models.list()] == ["demo"]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="demo", prompt="hello")


async def test_tenant_and_salt_come_from_the_key_not_from_the_body(gateway: HttpGateway) -> None:
    scheduler = gateway.cluster.scheduler
    for key in (ALICE, EVE, ALICE):
        assert (
            await gateway.client.post(
                "/v1/completions", json={"prompt": "x" * 64, "max_tokens": 2}, headers=bearer(key)
            )
        ).is_success
    tenants = [query.tenant for query in scheduler.queries]
    assert tenants == ["search", "ads", "search"]
    first, other, again = (query.block_hashes for query in scheduler.queries)
    assert first == again
    assert first
    assert not set(first) & set(other), "the same prompt shares no block hash between tenants"
    forged = await gateway.client.post("/v1/completions", json={"prompt": "x", "tenant": "ads"}, headers=bearer(ALICE))
    assert forged.status_code == 400


async def test_key_over_its_limits_is_rejected_while_other_keys_are_served() -> None:
    async with http_gateway(*PD, keys=key_ring(max_open_requests=1, requests_per_minute=30)) as gateway:
        for worker in gateway.cluster.scheduler.workers:
            worker.step_s = 0.3
        body = {"prompt": "hello", "max_tokens": 4}
        running = asyncio.create_task(gateway.client.post("/v1/completions", json=body, headers=bearer(ALICE)))
        await until(lambda: bool(gateway.cluster.scheduler.queries))
        num_queries = len(gateway.cluster.scheduler.queries)
        refused = await gateway.client.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_quota")
        assert int(refused.headers["retry-after"]) >= 1
        assert len(gateway.cluster.scheduler.queries) == num_queries, "the scheduler was not asked"
        other = asyncio.create_task(gateway.client.post("/v1/completions", json=body, headers=bearer(EVE)))
        await until(lambda: gateway.cluster.gateway.num_open == 2)
        assert (await running).is_success
        assert (await other).is_success
        answers = [
            (await gateway.client.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))).status_code
            for _ in range(5)
        ]
        assert answers == [200, 200, 429, 429, 429], "30 requests per minute allow a burst of three"


async def test_request_with_an_incomplete_body_counts_as_open() -> None:
    """A key with a limit of one open request cannot fill the gateway with incomplete requests."""
    async with http_gateway(*PD, keys=key_ring(max_open_requests=1)) as gateway:
        head = request_bytes("/v1/completions", b"x" * 100, f"authorization: Bearer {ALICE}")[:-100]
        waiting = await gateway.connect()
        await waiting.send(head)
        await until(lambda: bool(gateway.cluster.gateway._num_incoming))
        for path in ("/v1/completions", "/tokenize"):
            refused = await gateway.client.post(path, json={"prompt": "x"}, headers=bearer(ALICE))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_quota")
        assert (await gateway.client.post("/tokenize", json={"prompt": "x"}, headers=bearer(EVE))).is_success
        await waiting.close()
        await until(lambda: not gateway.cluster.gateway._num_incoming)
        assert (await gateway.client.post("/tokenize", json={"prompt": "x"}, headers=bearer(ALICE))).is_success


async def test_disconnect_releases_the_open_request() -> None:
    async with http_gateway(*PD, keys=key_ring(max_open_requests=1)) as gateway:
        for worker in gateway.cluster.scheduler.workers:
            worker.step_s = 0.3
        body = {"prompt": "hello", "max_tokens": 50}
        running = asyncio.create_task(gateway.client.post("/v1/completions", json=body, headers=bearer(ALICE)))
        await until(lambda: bool(gateway.cluster.gateway.num_open))
        running.cancel()
        await until(lambda: not gateway.cluster.gateway.num_open)
        assert not gateway.cluster.gateway.keys._num_open


async def test_several_prompts_in_one_call_count_as_several_requests() -> None:
    async with http_gateway(*PD, keys=key_ring(requests_per_minute=30)) as gateway:
        body = {"prompt": ["a"] * 20, "max_tokens": 1}
        assert (await gateway.client.post("/v1/completions", json=body, headers=bearer(ALICE))).is_success
        refused = await gateway.client.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 30


async def test_priority_below_the_limit_of_the_key_is_rejected(gateway: HttpGateway) -> None:
    for priority, status in ((-1, 400), (0, 200), (7, 200)):
        body = {"prompt": "hello", "max_tokens": 1, "priority": priority}
        answer = await gateway.client.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert answer.status_code == status, answer.text


async def test_only_admin_keys_see_links_in_readiness(gateway: HttpGateway) -> None:
    for headers, has_links in (({}, False), (bearer(ALICE), False), (bearer(ADMIN), True)):
        answer = (await gateway.client.get("/ready", headers=headers)).json()
        assert ("links" in answer) == ("grpc_port" in answer) == has_links


@asynccontextmanager
async def grpc_gateway() -> AsyncIterator[str]:
    async with cluster(*PD, keys=key_ring(), **LONG_LIMITS) as c:
        server = GrpcServer(heartbeat_s=60.0, max_message_bytes=2**20)
        server.add_inference(InferenceService(c.gateway))
        server.add_admin(AdminService(c.gateway, ProcessInfo(process_id="gateway-0")))
        server.follow(c.gateway.health)
        port = await server.start("127.0.0.1", 0, flag="--grpc-port")
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(1.0)


@pytest.mark.fault("F-45")
async def test_every_grpc_method_requires_a_key() -> None:
    """The gRPC health service needs no key, because probes use it."""
    public = [method for method in grpc_methods.all_methods() if method.service.startswith("baton.v1.")]
    assert len(public) >= 7
    async with grpc_gateway() as address, open_channel(address, channel_options(60.0)) as channel:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", f"Basic {ALICE}"),)):
            for method in public:
                call = channel.unary_stream(method.path)(
                    method.message().SerializeToString(), metadata=metadata, timeout=20
                )
                assert (await call.code()).name == "UNAUTHENTICATED", method.path
                assert "key" in await call.details()


async def test_grpc_methods_accept_keys_and_require_an_admin_key_for_admin() -> None:
    async with grpc_gateway() as address:
        channel = open_channel(address, channel_options(60.0))
        stub = inference_pb2_grpc.InferenceStub(channel)
        for metadata, expected in (((), "UNAUTHENTICATED"), ((("authorization", f"Bearer {ALICE}"),), "OK")):
            call = stub.Generate(
                inference_pb2.GenerateRequest(model="demo", prompt="hello", max_tokens=3), metadata=metadata, timeout=10
            )
            try:
                async for _ in call:
                    pass
            except Exception:
                assert expected != "OK", await call.details()
            assert (await call.code()).name == expected
        for call in (
            stub.Tokenize(inference_pb2.TokenizeRequest(prompt="x"), timeout=10),
            stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]), timeout=10),
            stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10),
        ):
            assert (await call.code()).name == "UNAUTHENTICATED"
        for key, code in (("", Code.UNAUTHENTICATED), (ALICE, Code.PERMISSION_DENIED)):
            asking = AdminClient(channel, address, authorization=f"Bearer {key}" if key else "")
            for question in (asking.status(), asking.explain(), asking.drain("p0")):
                with pytest.raises(Refused) as refused:
                    await question
                assert refused.value.failure.code is code
                assert refused.value.failure.reason in (Reason.INVALID_API_KEY, Reason.FORBIDDEN)
        assert (await AdminClient(channel, address, authorization=f"Bearer {ADMIN}").status()).model == "demo"
        await channel.close(None)
