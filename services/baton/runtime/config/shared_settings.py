"""Settings that several services have in common: process, addresses, tracing, store and served model."""

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from baton.core.errors import ConfigError
from baton.runtime.config.byte_sizes import MIB
from baton.runtime.config.config_base import Config, config, setting

_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,63}")


@config
class ProcessSettings(Config):
    """Settings of every process."""

    log_dir: Path | None = setting(None, help="directory for log files, one per process; unset logs to standard error")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="minimum level of logged events")
    drain_s: float = setting(
        60.0, help="time to finish running work after SIGTERM; what is left then is cancelled", unit="seconds", above=0
    )


@config
class MemorySettings(Config):
    """Memory budget of a gateway, scheduler or worker."""

    memory_budget: int = setting(
        1024 * MIB,
        help="memory that requests may hold in one gateway, scheduler or worker; a request that does not fit is "
        "refused",
        unit="bytes",
        minimum=64 * MIB,
    )


@config
class MetricSettings(Config):
    """Names of the metrics of gateways and workers."""

    vllm_metric_names: bool = setting(
        False,
        help="repeat metrics under the names of vLLM, such as vllm:num_requests_waiting: a gateway its own and the "
        "sums over all workers, a worker its own",
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
        "demo",
        help="model to serve: demo, a directory in Hugging Face format, a GGUF file, or a Hugging Face hub id "
        "(owner/name:Q4_K_M for a GGUF file of one)",
    )
    served_model_name: str | None = setting(
        None, help="model name that clients use in requests; unset uses the value of --model"
    )

    @property
    def model_name(self) -> str:
        """Name of the model in requests and placements."""
        return self.served_model_name or self.model


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
