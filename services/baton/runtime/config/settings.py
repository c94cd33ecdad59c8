"""The settings of each service, declared in groups that services combine.

Every field is a flag, a `BATON_` variable and a key of the config file (see `config_base.py`). A service has
only the groups that it reads. Durations are in seconds. Defaults are for production; tests use the values of
`tests/times.py`, which are about ten times shorter.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from baton.core.errors import ConfigError
from baton.core.request import Slo
from baton.runtime.config.config_base import Config, Loaded, config, load, setting, settings_of
from baton.runtime.config.durations import parse_durations
from baton.runtime.config.tls_settings import FrontTlsSettings, TlsSettings
from baton.runtime.config.worker_settings import MIB, ComputeSettings, TransferSettings

C = TypeVar("C", bound=Config)

_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,63}")

RayPlacement = Literal["auto", "role", "spread"]


@config
class ProcessSettings(Config):
    """Settings of every process."""

    log_dir: Path | None = setting(None, help="directory for log files, one per process; unset logs to standard error")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="minimum level of logged events")
    drain_s: float = setting(
        60.0, help="time to finish running work after SIGTERM; what is left then is cancelled", unit="seconds", above=0
    )


@config
class AdminSettings(Config):
    """Listening address and admin port of a service."""

    host: str = setting("127.0.0.1", help="address to listen on")
    admin_port: int | None = setting(
        None,
        help="port for this service's /metrics, /health and /ready; 0 picks a free one; unset opens none",
        minimum=0,
        maximum=65535,
    )


@config
class ListenSettings(AdminSettings):
    """Addresses of a service that other services connect to."""

    advertise_host: str | None = setting(
        None,
        help="address at which other processes reach this one; unset uses --host, or the machine's own address if "
        "--host means all",
    )


@config
class TracingSettings(Config):
    """Request tracing."""

    otlp_endpoint: str | None = setting(
        None,
        help="OpenTelemetry collector (OTLP over gRPC) that receives traces, such as http://127.0.0.1:4317; unset "
        "disables tracing",
    )
    trace_sample: float = setting(
        1.0,
        help="share of requests to trace, from 0 to 1; a request with a traceparent header follows the decision in it",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)


@config
class RpcSettings(Config):
    """Port of services that only other services call."""

    rpc_port: int = setting(0, help="gRPC port for other services; 0 picks a free one", minimum=0, maximum=65535)


@config
class FrontDoorSettings(Config):
    """Ports that clients use."""

    http_port: int = setting(8000, help="port of the OpenAI API; 0 picks a free one", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, help="port of the gRPC API; 0 picks a free one", minimum=0, maximum=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_port and self.http_port == self.grpc_port:
            raise ConfigError(
                f"http_port and grpc_port are both {self.http_port}; choose different ports, or 0 for a free one"
            )


@config
class HeartbeatSettings(Config):
    """Heartbeats of the streams between services."""

    heartbeat_s: float = setting(
        2.0, help="interval of heartbeats, worker reports and lease renewals", unit="seconds", above=0
    )
    detection_s: float = setting(
        5.0,
        help="time without a message after which a peer is considered lost; must be at least two heartbeats",
        unit="seconds",
        above=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.detection_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"detection_s ({self.detection_s:g}) must be at least two heartbeat_s ({self.heartbeat_s:g})"
            )


@config
class StoreSettings(Config):
    """Shared store for membership, KV block events and decisions."""

    redis_url: str | None = setting(
        None, help="Redis that stores shared state; unset makes `baton up` start a private one", secret=True
    )
    cluster: str = setting(
        "default",
        help="cluster name, which prefixes its Redis keys and Ray actors so that several clusters can share them",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _CLUSTER.fullmatch(self.cluster):
            raise ConfigError(
                f"cluster: expected up to 63 letters, digits, dots, dashes or underscores, got {self.cluster!r}"
            )


@config
class SchedulerClientSettings(Config):
    """Schedulers that a gateway or worker connects to."""

    schedulers: tuple[str, ...] = setting(
        (), help="addresses of the schedulers, HOST:PORT,…; unset finds them in Redis"
    )


@config
class ModelSettings(Config):
    """The served model."""

    model: str = setting(
        "demo", help="model to serve: demo, a directory in Hugging Face format, or a Hugging Face hub id"
    )
    served_model_name: str | None = setting(
        None, help="model name that clients use in requests; unset uses the value of --model"
    )

    @property
    def model_name(self) -> str:
        """Name of the model in requests and placements."""
        return self.served_model_name or self.model


@config
class SloSettings(Config):
    """Default SLO, which the gateway attaches to requests without their own."""

    slo: str = setting(
        "", help="default SLO for requests that set none, such as ttft=500ms,tpot=50ms; unset gives them no SLO"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_slo(self.slo)

    @property
    def default_slo(self) -> Slo:
        """The parsed value of `slo`."""
        return parse_slo(self.slo)


@config
class RequestSettings(Config):
    """Limits and retries of client requests in the gateway."""

    request_timeout_s: float = setting(600.0, help="deadline of a request that sets none", unit="seconds", above=0)
    receive_deadline_s: float = setting(
        30.0, help="maximum time to receive the head and body of a request", unit="seconds", above=0
    )
    max_body_bytes: int = setting(
        8 * MIB,
        help="maximum size of a request body; a larger one gets 413 and is not parsed",
        unit="bytes",
        minimum=1024,
    )
    api_keys: Path | None = setting(None, help="file with API keys, see `baton key`; unset disables authentication")
    max_open_requests: int = setting(1024, help="maximum number of open requests per gateway; more get 429", minimum=1)
    max_attempts: int = setting(
        8,
        help="maximum number of placements of one request; the last failure is then returned to the client",
        minimum=1,
    )
    scheduler_wait_s: float = setting(
        20.0,
        help="time that a new request waits while no scheduler is reachable; then it gets 503",
        unit="seconds",
        above=0,
    )
    stream_buffer_bytes: int = setting(
        256 * 1024,
        help="maximum output that a client has not read yet, per request; beyond it the request is cancelled",
        unit="bytes",
        minimum=4096,
    )


@config
class PolicySettings(Config):
    """Placement and admission policy of the scheduler, and its queue."""

    policy: Literal["kv_centric", "prefix_aware", "least_loaded", "round_robin", "random"] = setting(
        "kv_centric", help="scheduling policy, which selects the workers of each request"
    )
    admission: Literal["off", "early", "predictive"] = setting(
        "off",
        help="whether to refuse requests that are predicted to miss their SLO; early predicts from the present load, "
        "predictive from the "
        "load expected when the prompt is computed",
    )

    max_worker_queue_s: float = setting(
        1.0,
        help="predicted queueing time above which a worker gets no more requests; if no worker is below it, requests "
        "are queued at the "
        "scheduler",
        unit="seconds",
        above=0,
    )
    max_queued_requests: int = setting(
        1024,
        help="maximum number of requests queued at the scheduler; more are refused; 0 disables the queue",
        minimum=0,
        aliases=("max_waiting",),
    )


@config
class QueueSettings(Config):
    """Queue limit of a worker, which the worker enforces and the scheduler respects."""

    max_queued_jobs: int = setting(
        256,
        help="maximum number of jobs queued in one worker before their first step; more are refused",
        minimum=1,
        aliases=("max_queue",),
    )


@config
class FleetSettings(Config):
    """Number of workers by role, and the Ray cluster that runs them."""

    prefill: int = setting(1, help="number of prefill workers", minimum=0)
    decode: int = setting(1, help="number of decode workers", minimum=0)
    hybrid: int = setting(0, help="number of workers that both prefill and decode", minimum=0)
    worker_start_s: float = setting(
        900.0,
        help="maximum time for a placed worker to load and verify its model; then `baton fleet` on an existing Ray "
        "cluster restarts the "
        "worker, and `baton up` fails",
        unit="seconds",
        above=0,
    )
    ray_address: str | None = setting(
        None,
        help="existing Ray cluster to run workers on, HOST:PORT of its head or auto; unset starts a private Ray on "
        "this machine",
    )
    ray_placement: RayPlacement = setting(
        "auto",
        help="which Ray nodes run workers; role places each worker on a node with the custom resource baton_prefill, "
        "baton_decode or "
        "baton_hybrid; spread uses all nodes with CPUs in rotation; auto is role if any node has such a resource, "
        "else spread",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.prefill or self.hybrid) or not (self.decode or self.hybrid):
            raise ConfigError(
                f"prefill {self.prefill}, decode {self.decode}, hybrid {self.hybrid}: no worker could "
                f"{'decode' if self.prefill or self.hybrid else 'prefill'}; set both roles to at least 1, or --hybrid 1"
            )
        if self.ray_address is not None and "://" in self.ray_address:
            raise ConfigError(
                f"ray_address: {self.ray_address} is a Ray Client address, and Ray Client ends the workers when its "
                f"connection breaks; "
                "start a node here (`ray start --address HEAD:PORT --num-cpus 0`) and set HEAD:PORT"
            )


@config
class GatewayConfig(
    SloSettings,
    TlsSettings,
    FrontTlsSettings,
    RequestSettings,
    ModelSettings,
    SchedulerClientSettings,
    StoreSettings,
    HeartbeatSettings,
    FrontDoorSettings,
    TracingSettings,
    ListenSettings,
    ProcessSettings,
):
    """Settings of `baton gateway`."""


@config
class SchedulerConfig(
    PolicySettings,
    QueueSettings,
    StoreSettings,
    HeartbeatSettings,
    TlsSettings,
    RpcSettings,
    TracingSettings,
    ListenSettings,
    ProcessSettings,
):
    """Settings of `baton scheduler`."""


@config
class WorkerConfig(
    TransferSettings,
    ComputeSettings,
    QueueSettings,
    ModelSettings,
    SchedulerClientSettings,
    StoreSettings,
    HeartbeatSettings,
    TlsSettings,
    RpcSettings,
    TracingSettings,
    ListenSettings,
    ProcessSettings,
):
    """Settings of `baton worker`."""

    role: Literal["prefill", "decode", "hybrid"] = setting(
        "hybrid", help="phases that the scheduler assigns to this worker"
    )
    worker_id: str | None = setting(
        None, help="name of this worker, kept across restarts; unset generates a random one"
    )
    workers_on_host: int = setting(
        1, help="number of workers on this machine; each gets an equal share of its free memory", minimum=1
    )
    workers_on_gpu: int = setting(
        1, help="number of workers on this worker's GPU; each gets an equal share of its free memory", minimum=1
    )
    drain_socket: Path | None = setting(
        None,
        help="Unix socket at which `baton drain --here` reaches this worker without gateway or API key; file "
        "permissions control access; "
        "unset opens none",
    )


@config
class FleetConfig(
    FleetSettings,
    TlsSettings,
    TransferSettings,
    ComputeSettings,
    QueueSettings,
    ModelSettings,
    StoreSettings,
    HeartbeatSettings,
    TracingSettings,
    AdminSettings,
    ProcessSettings,
):
    """Settings of `baton fleet`: the number of workers and the settings that it passes to each of them.

    `host` and `admin_port` apply to the fleet process itself.
    """

    scale_with_nodes: bool = setting(
        False,
        help="with --ray-address, run one worker for each custom resource unit (baton_prefill, baton_decode, "
        "baton_hybrid) that the Ray "
        "nodes have; --prefill, --decode and --hybrid are then the minimum",
        aliases=("follow_places",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_with_nodes and (self.ray_address is None or self.ray_placement == "spread"):
            raise ConfigError(
                "scale_with_nodes counts the role resources of an existing Ray cluster; set ray_address, and "
                "ray_placement to auto or role"
            )


@config
class ClusterConfig(
    FleetSettings,
    TransferSettings,
    ComputeSettings,
    QueueSettings,
    PolicySettings,
    SloSettings,
    TlsSettings,
    FrontTlsSettings,
    RequestSettings,
    ModelSettings,
    StoreSettings,
    HeartbeatSettings,
    FrontDoorSettings,
    TracingSettings,
    ProcessSettings,
):
    """Settings of `baton up`, which derives the settings of every service from them."""

    host: str = setting(
        "127.0.0.1",
        help="address that clients connect to; the services themselves use the loopback, or their nodes' addresses "
        "with --ray-address",
    )
    advertise_host: str | None = setting(
        None,
        help="with --ray-address, address at which workers reach this machine; unset uses the address that Ray reports",
    )
    log_dir: Path | None = setting(
        Path("~/.cache/baton/logs"), help="directory for logs, with one subdirectory per run"
    )
    first_prompt: str | None = setting(None, help="prompt to send once the cluster is ready; the answer is printed")
    once: bool = setting(False, help="stop after printing the answer to --first-prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.once and self.first_prompt is None:
            raise ConfigError("once needs first_prompt, the prompt whose answer ends the run")


SERVICES: Mapping[str, type[Config]] = {
    "up": ClusterConfig,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "fleet": FleetConfig,
}
"""Settings class by CLI command."""

ALL_NAMES: frozenset[str] = frozenset(item.name for cls in SERVICES.values() for item in settings_of(cls))
ALL_ALIASES: frozenset[str] = frozenset(
    alias for cls in SERVICES.values() for item in settings_of(cls) for alias in item.aliases
)
"""Deprecated names that are still accepted."""


def load_settings(
    cls: type[C], *, flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> Loaded[C]:
    """Load the settings of one service; keys and variables of the other services are ignored."""
    return load(cls, flags=flags, environ=environ, file=file, also_known=ALL_NAMES | ALL_ALIASES)


def parse_slo(text: str) -> Slo:
    """Parse `ttft=500ms,tpot=50ms`, or one of the two. Raises ConfigError if it is malformed."""
    try:
        terms = parse_durations(text, ("ttft", "tpot"))
    except ValueError as error:
        raise ConfigError(f"slo: {error}") from error
    if not all(terms.values()):
        raise ConfigError(f"slo: durations must be above 0, got {text!r}")
    return Slo(ttft_s=terms.get("ttft"), tpot_s=terms.get("tpot"))


def check_endpoint(url: str) -> None:
    """Validate an OTLP endpoint, `http://HOST:PORT` or `https://HOST:PORT`. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        is_endpoint = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port is not None
            and parts.path in ("", "/")
        )
    except ValueError:  # an invalid port
        is_endpoint = False
    if not is_endpoint:
        raise ConfigError(
            f"otlp_endpoint: expected http://HOST:PORT or https://HOST:PORT (OTLP over gRPC, usually port 4317), got "
            f"{url!r}"
        )
