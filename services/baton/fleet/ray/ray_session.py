"""How Ray is started on this machine, or joined; on the thread that calls it from then on."""

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from baton.fleet.ray.ray_calls import the_ray
from baton.runtime.process.process import disable_usage_reports

OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: nothing of ours goes through it."""


def start_ray(ray_dir: Path) -> str:
    """A Ray of our own, behind a token, with all its files in `ray_dir`; returns what it is, for people."""
    token = ray_dir / "token"
    ray_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    _init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(ray_dir))
    return f"local, {int(the_ray().cluster_resources().get('CPU', 0))} cores"


def join_ray(address: str, namespace: str) -> str:
    """One that others run, of which this machine is a node; returns this machine's address, as the other
    nodes know it."""
    _init(address=address, namespace=namespace)
    return str(the_ray().util.get_node_ip_address())


def _init(**options: Any) -> None:
    disable_usage_reports()
    os.environ |= {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    }  # which aborts us on SIGTERM
    ray = the_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that its signal handlers are not ours
    ray.init(log_to_driver=False, configure_logging=False, **options)
