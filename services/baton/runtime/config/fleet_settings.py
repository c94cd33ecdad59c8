"""Settings of the fleet: how many workers run, and on which Ray cluster."""

from typing import Literal

from baton.core.errors import ConfigError
from baton.runtime.config.config_base import Config, config, setting

RayPlacement = Literal["auto", "role", "spread"]


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
    ray_memory_limit: float | None = setting(
        None,
        help="share of this machine's memory, used by any process, above which the private Ray ends a worker; unset "
        "turns Ray's memory monitor off, so that other users' processes do not end workers",
        above=0,
        maximum=1,
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
        if self.ray_address is not None and self.ray_memory_limit is not None:
            raise ConfigError(
                "ray_memory_limit applies to the private Ray; on an existing cluster set RAY_memory_usage_threshold "
                "for `ray start`"
            )
        if self.ray_address is not None and "://" in self.ray_address:
            raise ConfigError(
                f"ray_address: {self.ray_address} is a Ray Client address, and Ray Client ends the workers when its "
                f"connection breaks; "
                "start a node here (`ray start --address HEAD:PORT --num-cpus 0`) and set HEAD:PORT"
            )
