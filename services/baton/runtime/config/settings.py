"""The settings of each service, combined from groups.

The groups are in the files next to this one: `shared_settings.py`, and one file for each component. Every
field is a flag, a `BATON_` variable and a key of the config file (see `config_base.py`). A service has only
the groups that it reads. Durations are in seconds. Defaults are for production; tests use the values of
`tests/times.py`, which are about ten times shorter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from baton.core.errors import ConfigError
from baton.runtime.config.config_base import Config, Loaded, config, load, setting, settings_of
from baton.runtime.config.fleet_settings import FleetSettings
from baton.runtime.config.gateway_settings import (
    ChatSettings,
    FrontDoorSettings,
    RequestSettings,
    SloSettings,
    ViewSettings,
)
from baton.runtime.config.scheduler_settings import PolicySettings
from baton.runtime.config.shared_settings import (
    AdminSettings,
    HeartbeatSettings,
    ListenSettings,
    MemorySettings,
    MetricSettings,
    ModelSettings,
    ProcessSettings,
    RpcSettings,
    SchedulerClientSettings,
    StoreSettings,
    TracingSettings,
)
from baton.runtime.config.tls_settings import FrontTlsSettings, TlsSettings
from baton.runtime.config.worker_settings import ComputeSettings, QueueSettings, TransferSettings

C = TypeVar("C", bound=Config)


@config
class GatewayConfig(
    SloSettings,
    TlsSettings,
    FrontTlsSettings,
    RequestSettings,
    ChatSettings,
    ModelSettings,
    SchedulerClientSettings,
    StoreSettings,
    HeartbeatSettings,
    FrontDoorSettings,
    ViewSettings,
    TracingSettings,
    ListenSettings,
    MetricSettings,
    MemorySettings,
    ProcessSettings,
):
    """Settings of `baton gateway`."""

    admin_tls: bool = setting(
        False, help="serve the admin port over TLS too, with the certificate of --front-tls-cert; `baton up` does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.admin_tls and self.front_tls_pair is None:
            raise ConfigError("admin_tls needs front_tls_cert and front_tls_key")


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
    MemorySettings,
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
    MetricSettings,
    MemorySettings,
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
    MetricSettings,
    MemorySettings,
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
    ChatSettings,
    ModelSettings,
    StoreSettings,
    HeartbeatSettings,
    FrontDoorSettings,
    ViewSettings,
    TracingSettings,
    MetricSettings,
    MemorySettings,
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
    admin_port: int | None = setting(
        None,
        help="port of the live view, /metrics/cluster and /debug/trace of `baton up`, where unset uses 8002 with the "
        "default --http-port, else a free one; of a single service also of its /metrics, /health and /ready, and unset "
        "opens none; 0 picks a free one",
        minimum=0,
        maximum=65535,
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
