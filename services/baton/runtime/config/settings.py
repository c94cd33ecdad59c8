"""The settings of each service. A field stands here once, in the group of those who read it, and a service
has only what it reads.

Every field is a flag, a `BATON_` variable and a key of the config file; see `config.py`. Durations are
seconds. The defaults are for production; tests run with those of `tests/times.py`, about a tenth.
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
    """Read by every process."""

    log_dir: Path | None = setting(
        None, help="directory of the log files, one a process; without it logs go to standard error"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="least level that is logged")
    drain_s: float = setting(
        60.0, help="time to finish running work after SIGTERM before it is cut off", unit="seconds", above=0
    )


@config
class AdminSettings(Config):
    """Read by every service."""

    host: str = setting("127.0.0.1", help="address to listen on")
    admin_port: int | None = setting(
        None,
        help="port of this service's own metrics, health and ready; 0 picks a free one, without it there is none",
        minimum=0,
        maximum=65535,
    )


@config
class ListenSettings(AdminSettings):
    """Read by every service that others reach over the network."""

    advertise_host: str | None = setting(
        None, help="address that others reach this process at; without it, --host or this machine's address"
    )


@config
class TracingSettings(Config):
    """Read by every service that does a part of a request."""

    otlp_endpoint: str | None = setting(
        None,
        help="OpenTelemetry collector (OTLP over gRPC) that gets traces, such as http://127.0.0.1:4317; without it there are none",
    )
    trace_sample: float = setting(
        1.0,
        help="part of requests that are traced, from 0 to 1; who comes with a traceparent has decided already",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)


@config
class RpcSettings(Config):
    """Read by services that are called by other services only."""

    rpc_port: int = setting(0, help="port that other services call; 0 picks a free one", minimum=0, maximum=65535)


@config
class FrontDoorSettings(Config):
    """Read by who opens or announces the ports that clients use."""

    http_port: int = setting(8000, help="port of the OpenAI API; 0 picks a free one", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, help="port of the gRPC API; 0 picks a free one", minimum=0, maximum=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_port and self.http_port == self.grpc_port:
            raise ConfigError(
                f"http_port and grpc_port are both {self.http_port}; choose two ports, or 0 for a free one"
            )


@config
class HeartbeatSettings(Config):
    """Read by both ends of every standing stream."""

    heartbeat_s: float = setting(
        2.0, help="interval of heartbeats, reports and lease renewals", unit="seconds", above=0
    )
    detection_s: float = setting(
        5.0, help="silence after which the other side counts as lost, at least two heartbeats", unit="seconds", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.detection_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"detection_s ({self.detection_s:g}) must be at least two heartbeat_s ({self.heartbeat_s:g})"
            )


@config
class StoreSettings(Config):
    """Read by who keeps membership, block events or decisions."""

    redis_url: str | None = setting(
        None, help="Redis to share state through; without it, `baton up` starts a private one", secret=True
    )
    cluster: str = setting(
        "default", help="name of the cluster; those of other names share neither Redis keys nor Ray actors with it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _CLUSTER.fullmatch(self.cluster):
            raise ConfigError(
                f"cluster: expected up to 63 letters, digits, dots, dashes and underscores, got {self.cluster!r}"
            )


@config
class SchedulerClientSettings(Config):
    """Read by who asks schedulers or reports to them."""

    schedulers: tuple[str, ...] = setting(
        (), help="schedulers to talk to, HOST:PORT,…; without them, those that Redis lists"
    )


@config
class ModelSettings(Config):
    """Read by who tokenizes or computes."""

    model: str = setting("demo", help="demo, a Hugging Face directory, or a hub id")
    served_model_name: str | None = setting(
        None, help="name that requests use for the model; without it, --model as given"
    )

    @property
    def model_name(self) -> str:
        """What clients and placements call the model."""
        return self.served_model_name or self.model


@config
class SloSettings(Config):
    """Read by the gateway, which passes it on with each request that asks for nothing else."""

    slo: str = setting(
        "", help="SLO of requests that ask for none, such as ttft=500ms,tpot=50ms; without it they are promised nothing"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_slo(self.slo)

    @property
    def default_slo(self) -> Slo:
        return parse_slo(self.slo)


@config
class RequestSettings(Config):
    """Read by the gateway: what it accepts from clients, and how long it keeps trying."""

    request_timeout_s: float = setting(600.0, help="deadline of a request that sets none", unit="seconds", above=0)
    receive_deadline_s: float = setting(
        30.0, help="time for a request's head and body to arrive", unit="seconds", above=0
    )
    max_body_bytes: int = setting(
        8 * MIB, help="largest request body; larger ones get 413 before they are parsed", unit="bytes", minimum=1024
    )
    api_keys: Path | None = setting(
        None, help="file of API keys, see `baton key`; without it everybody may do everything"
    )
    max_open_requests: int = setting(1024, help="requests open in one gateway at a time; more get 429", minimum=1)
    max_attempts: int = setting(
        8, help="times that a request is placed before its last failure is its answer", minimum=1
    )
    scheduler_wait_s: float = setting(
        20.0, help="time that new requests wait for a scheduler before 503", unit="seconds", above=0
    )
    stream_buffer_bytes: int = setting(
        256 * 1024,
        help="unread answer of one stream; the request of a client that reads slower is cancelled",
        unit="bytes",
        minimum=4096,
    )


@config
class PolicySettings(Config):
    """Read by the scheduler."""

    policy: Literal["kv_centric", "prefix_aware", "least_loaded", "round_robin", "random"] = setting(
        "kv_centric", help="who decides where a request runs"
    )
    admission: Literal["off", "early", "predictive"] = setting(
        "off",
        help="whether requests predicted to miss their SLO are refused: by the load of now, or of when their prompt is computed",
    )

    max_worker_queue_s: float = setting(
        1.0,
        help="while every worker's predicted queue is longer, new requests wait at the scheduler",
        unit="seconds",
        above=0,
    )
    max_waiting: int = setting(
        1024, help="requests that wait at the scheduler; more are refused; 0: nobody waits there", minimum=0
    )


@config
class QueueSettings(Config):
    """Read by workers, which let jobs wait, and by the scheduler, which gives no worker more."""

    max_queue: int = setting(256, help="jobs that wait for their first step in one worker; more are refused", minimum=1)


@config
class FleetSettings(Config):
    """Read by the fleet: which workers exist."""

    prefill: int = setting(1, help="prefill workers", minimum=0)
    decode: int = setting(1, help="decode workers", minimum=0)
    hybrid: int = setting(0, help="workers that prefill and decode", minimum=0)
    worker_start_s: float = setting(
        900.0,
        help="time of a worker that has a node to load its model and prove it; then `baton fleet` on a joined Ray starts it anew, "
        "`baton up` gives up",
        unit="seconds",
        above=0,
    )
    ray_address: str | None = setting(
        None,
        help="Ray cluster to place workers on, HOST:PORT of its head, or auto; without it, a Ray of our own on this machine",
    )
    ray_placement: RayPlacement = setting(
        "auto",
        help="nodes of a Ray cluster that get a worker: role is those that offer baton_prefill, baton_decode or baton_hybrid, whichever it "
        "is; spread is any with a CPU, in turn; auto is role where any node offers that",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.prefill or self.hybrid) or not (self.decode or self.hybrid):
            raise ConfigError(
                f"prefill {self.prefill}, decode {self.decode}, hybrid {self.hybrid}: nobody could "
                f"{'decode' if self.prefill or self.hybrid else 'prefill'}; give both roles a worker, or --hybrid 1"
            )
        if self.ray_address is not None and "://" in self.ray_address:
            raise ConfigError(
                f"ray_address: {self.ray_address} is an address of Ray Client, whose driver ends when its connection does; start a node "
                "here (`ray start --address HEAD:PORT --num-cpus 0`) and give HEAD:PORT"
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
    """`baton gateway`."""


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
    """`baton scheduler`."""


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
    """`baton worker`."""

    role: Literal["prefill", "decode", "hybrid"] = setting("hybrid", help="what the scheduler gives this worker to do")
    worker_id: str | None = setting(None, help="name of this worker, the same over restarts; without it, one is drawn")
    workers_on_host: int = setting(1, help="workers of this machine, between which its free memory is split", minimum=1)
    workers_on_gpu: int = setting(
        1, help="workers that share its GPU, between which the free memory of that is split", minimum=1
    )
    drain_socket: Path | None = setting(
        None,
        help="file at which `baton drain --here` reaches this worker: whoever may open it needs no gateway and no key; without it, none",
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
    """`baton fleet`: how many workers, and the settings that each of them gets. `host` and `admin_port` are
    the fleet's own."""

    follow_places: bool = setting(
        False,
        help="with --ray-address: as many workers of a role as nodes offer places for (baton_prefill, baton_decode, baton_hybrid), and no "
        "fewer than --prefill, --decode and --hybrid",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow_places and (self.ray_address is None or self.ray_placement == "spread"):
            raise ConfigError(
                "follow_places: nodes of a Ray cluster offer places by role; give ray_address, and ray_placement auto or role"
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
    """`baton up`: every service of one machine; each gets its own settings with `derive`."""

    host: str = setting(
        "127.0.0.1",
        help="address that clients reach; the services call each other on the loopback, or with --ray-address at their nodes' addresses",
    )
    advertise_host: str | None = setting(
        None, help="with --ray-address, address at which workers reach this machine; without it, what Ray knows it by"
    )
    log_dir: Path | None = setting(
        Path("~/.cache/baton/logs"), help="directory of the logs; each run makes one of its own in it"
    )
    first_prompt: str | None = setting(
        None, help="prompt to send, and to show the answer of, once the cluster is ready"
    )
    once: bool = setting(False, help="stop after the answer to --first-prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.once and self.first_prompt is None:
            raise ConfigError("once needs first_prompt: the prompt after whose answer to stop")


SERVICES: Mapping[str, type[Config]] = {
    "up": ClusterConfig,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "fleet": FleetConfig,
}
"""By the command that starts it."""

ALL_NAMES: frozenset[str] = frozenset(item.name for cls in SERVICES.values() for item in settings_of(cls))


def load_settings(
    cls: type[C], *, flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> Loaded[C]:
    """`config.load` for a service of Baton: a key or variable of another service may stand in what a whole
    cluster shares."""
    return load(cls, flags=flags, environ=environ, file=file, also_known=ALL_NAMES)


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=50ms`, or one of them. Raises ConfigError."""
    try:
        terms = parse_durations(text, ("ttft", "tpot"))
    except ValueError as error:
        raise ConfigError(f"slo: {error}") from error
    if not all(terms.values()):
        raise ConfigError(f"slo: expected durations above 0, got {text!r}")
    return Slo(ttft_s=terms.get("ttft"), tpot_s=terms.get("tpot"))


def check_endpoint(url: str) -> None:
    """`http://HOST:PORT`, or `https://` with TLS. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        is_endpoint = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port is not None
            and parts.path in ("", "/")
        )
    except ValueError:  # a port that is none
        is_endpoint = False
    if not is_endpoint:
        raise ConfigError(
            f"otlp_endpoint: expected http://HOST:PORT or https://HOST:PORT (OTLP over gRPC, mostly port 4317), got {url!r}"
        )
