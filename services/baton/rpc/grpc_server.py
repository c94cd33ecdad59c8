"""gRPC server for the services of one process, with health checks and, for client APIs, reflection."""

from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.client_api import AdminApi, InferenceApi
from baton.core.errors import ConfigError
from baton.core.interfaces import SchedulerService, WorkerService
from baton.rpc import admin_rpc, health_service, inference_rpc, peer_rpc, scheduler_rpc, worker_rpc
from baton.rpc.aio_server import aio_server
from baton.rpc.channel import HANDSHAKE_S, MAX_MESSAGE_BYTES, server_options
from baton.rpc.client_writer import READ_S, ClientWriter
from baton.rpc.gates.gated_calls import GatedCalls
from baton.rpc.gates.keyless_gate import KeylessGate
from baton.rpc.gates.receive_gate import ReceiveGate
from baton.rpc.grpc_network import DEFAULT_LIMITS
from baton.rpc.grpc_status import RefuseMalformedMessages
from baton.rpc.grpc_tls import Tls
from baton.rpc.streams.stream_limits import StreamLimits
from baton.runtime.network.addresses import choose_port, join_address
from baton.runtime.network.client_connections import ClientConnections
from baton.runtime.observability.health import Health
from baton.v1 import admin_pb2_grpc
from baton.wire.v1 import peer_pb2_grpc, scheduler_pb2_grpc, worker_pb2_grpc


class GrpcServer:
    """gRPC server; create it on its event loop, add services, then `start`.

    Health checks are answered for each service by its full name, and for "", which means all services. They
    report SERVING from the start, unless `follow` is used.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float,
        limits: StreamLimits = DEFAULT_LIMITS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
        handshake_s: float = HANDSHAKE_S,
        read_s: float = READ_S,
        gates: tuple[ReceiveGate, KeylessGate] | None = None,
        max_streams: int | None = None,
        max_connections: int | None = None,
        idle_s: float | None = None,
    ) -> None:
        """Create the server.

        heartbeat_s: keepalive interval. A client that answers no ping within it and half a second loses its
        calls.
        tls: without it the server uses plain text.
        handshake_s: timeout of TLS handshakes.
        read_s: time in which a client must read a short response, or else its connection ends.
        gates: calls of client APIs and reflection pass the first one before their messages are read, health
        checks the second one. Until then they may send only little.
        max_streams: largest number of calls at a time on one connection; a client queues more.
        max_connections, idle_s: see `channel.server_options`.
        """
        name_checks = () if tls is None else tls.interceptors()
        self._public: list[str] = []
        self._connections = ClientConnections()
        self._writer = ClientWriter(self._connections, read_s=read_s)
        gated = () if gates is None else (GatedCalls(*gates, self._needs_key, health_service.SERVICE, self._writer),)
        self._server = aio_server(
            (*gated, *name_checks, RefuseMalformedMessages()),
            server_options(
                heartbeat_s,
                max_message_bytes,
                handshake_s,
                max_streams,
                has_small_windows=gates is not None,
                max_connections=max_connections,
                idle_s=idle_s,
            ),
        )
        self._limits = limits
        self._tls = tls
        self._health_servicer = health_service.HealthServicer(self._writer)
        health_pb2_grpc.add_HealthServicer_to_server(self._health_servicer, self._server)

    def add_worker(self, service: WorkerService) -> None:
        """Serve the Worker and Peer services."""
        worker_pb2_grpc.add_WorkerServicer_to_server(worker_rpc.WorkerServicer(service, self._limits), self._server)
        peer_pb2_grpc.add_PeerServicer_to_server(peer_rpc.PeerServicer(service, self._limits), self._server)
        self._health_servicer.add_service(worker_rpc.SERVICE)
        self._health_servicer.add_service(peer_rpc.SERVICE)

    def add_scheduler(self, service: SchedulerService) -> None:
        """Serve the Scheduler service."""
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(
            scheduler_rpc.SchedulerServicer(service, self._limits), self._server
        )
        self._health_servicer.add_service(scheduler_rpc.SERVICE)

    def add_inference(self, api: InferenceApi) -> None:
        """Serve `baton.v1.Inference` for clients."""
        inference_rpc.InferenceServicer(api, self._writer).add_to(self._server)
        self._health_servicer.add_service(inference_rpc.SERVICE)
        self._public.append(inference_rpc.SERVICE)

    def add_admin(self, api: AdminApi) -> None:
        """Serve `baton.v1.Admin` for operators."""
        admin_pb2_grpc.add_AdminServicer_to_server(admin_rpc.AdminServicer(api, self._writer), self._server)
        self._health_servicer.add_service(admin_rpc.SERVICE)
        self._public.append(admin_rpc.SERVICE)

    def follow(self, health: Health) -> None:
        """Report `health.is_ready` in health checks."""
        self._health_servicer.set(is_serving=health.is_ready)
        health.on_change(lambda _: self._health_servicer.set(is_serving=health.is_ready))

    async def start(self, host: str, port: int, *, flag: str = "--rpc-port") -> int:
        """Start serving and return the port (0 selects a free one).

        Raises ConfigError, naming port and `flag`, if the port is in use, or if certificates cannot be used.
        """
        if port:
            choose_port(host, port, flag=flag)
        try:
            address = join_address(host, port)
            add = self._server.add_insecure_port
            bound = (
                add(address)
                if self._tls is None
                else self._server.add_secure_port(address, self._tls.server_credentials())
            )
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {join_address(host, port)} ({flag}): {error}") from error
        if self._public:
            names = [*self._public, reflection.SERVICE_NAME, health_service.SERVICE]
            reflection.enable_server_reflection(names, self._server)
        self._connections.accepted_on(bound)
        await self._server.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls, and cancel running ones after `grace_s`.

        Streams end only when their service ends them or they are cancelled.
        """
        self._health_servicer.stop()
        await self._server.stop(grace_s)

    def _needs_key(self, service: str) -> bool:
        """True for the client APIs and reflection, which describes them."""
        return service in self._public or service == reflection.SERVICE_NAME
