"""Finds the gateway that a command means: the one it was given, or the newest cluster of this user."""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.cli.admin.gateway_connection import SYSTEM, GatewayAddress
from baton.core.errors import BatonError
from baton.runtime.config.gateway_settings import FrontDoorSettings
from baton.runtime.network.addresses import join_address
from baton.runtime.network.tls_files import machine_authorities
from baton.runtime.process.run_file import RunningCluster, is_same_address

DEFAULT_GATEWAY = f"127.0.0.1:{FrontDoorSettings.grpc_port}"
MAX_ANSWER_BYTES = 64 * 1024
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayChoice:
    """The options by which a user names a gateway. All are empty if none was given.

    address: HOST:PORT of its gRPC port. url: its HTTP URL.
    api_key, ca, name: as in `GatewayAddress`.
    """

    address: str = ""
    url: str = ""
    api_key: str = ""
    ca: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The gateway to call, and a note for the user if the choice was not unique."""

    gateway: GatewayAddress
    note: str = ""


def locate_gateway(choice: GatewayChoice, running: Sequence[RunningCluster], *, must_be_unique: bool) -> Located:
    """Return the gateway that the options name, else the newest running cluster's, else the default one.

    running: the clusters of this user on this machine, newest first.
    must_be_unique: raise BatonError if nothing was named and several clusters run, because the command
        changes the cluster. Also raised if an HTTP URL does not lead to a gateway.
    """
    known = named_cluster(choice, running)
    if choice.url:
        return Located(gateway=_gateway_of(known, choice) if known else _ask_for_gateway(choice))
    if choice.address:
        trusted = _gateway_of(known, choice) if known else _as_given(choice)
        return Located(gateway=replace(trusted, address=choice.address))
    if not running:
        return Located(gateway=replace(_as_given(choice), address=DEFAULT_GATEWAY))
    if len(running) == 1:
        return Located(gateway=_gateway_of(running[0], choice))
    if must_be_unique:
        raise BatonError(f"{_several(running)}; choose one with --gateway\n{describe_clusters(running)}")
    return Located(gateway=_gateway_of(running[0], choice), note=newest_note(running))


def named_cluster(choice: GatewayChoice, running: Sequence[RunningCluster]) -> RunningCluster | None:
    """Return the running cluster of this user that the options name, or None."""
    if choice.url:
        return next((cluster for cluster in running if is_same_address(cluster.url, choice.url)), None)
    return next((cluster for cluster in running if is_same_address(cluster.gateway, choice.address)), None)


def newest_note(running: Sequence[RunningCluster]) -> str:
    """Return the note of a command that takes the newest of several clusters."""
    note = f"{_several(running)}; this is the newest, {running[0].gateway}. Choose with --gateway"
    return f"{note}\n{describe_clusters(running)}"


def _several(running: Sequence[RunningCluster]) -> str:
    return f"{len(running)} clusters of this user run on this machine"


def describe_clusters(running: Sequence[RunningCluster], *, now_s: float | None = None) -> str:
    """Return one line per cluster: its addresses, model, name and age."""
    now_s = time.time() if now_s is None else now_s
    return "\n".join(
        f"  --gateway {cluster.gateway}  {cluster.url}  model {cluster.model}  cluster {cluster.cluster}  "
        f"up {_age(now_s - cluster.started_s)}  pid {cluster.pid}"
        for cluster in running
    )


def _as_given(choice: GatewayChoice) -> GatewayAddress:
    return GatewayAddress(choice.address, choice.api_key, choice.ca, choice.name)


def _gateway_of(cluster: RunningCluster, choice: GatewayChoice) -> GatewayAddress:
    return GatewayAddress(cluster.gateway, choice.api_key, choice.ca or cluster.ca, choice.name or cluster.name)


def _ask_for_gateway(choice: GatewayChoice) -> GatewayAddress:
    """Ask a gateway's `/ready` for its gRPC port. Raises BatonError."""
    url = choice.url if "://" in choice.url else f"http://{choice.url}"
    headers = {"authorization": f"Bearer {choice.api_key}"} if choice.api_key else {}
    port: Any = None
    try:
        parts = urlsplit(url)
        request = urllib.request.Request(f"{url.rstrip('/')}/ready", headers=headers)
        port = json.loads(_body(request, choice)).get("grpc_port")
    except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, http.client.BadStatusLine):
            reason = "it does not speak HTTP/1.1. Is this the gRPC port?"
        raise BatonError(f"no gateway answers at {url}: {reason}; correct --url, or use --gateway HOST:PORT") from error
    if not isinstance(port, int) or not port or not parts.hostname:
        key = "; if API keys are on, that needs an admin's --api-key" if not choice.api_key else ""
        raise BatonError(f"{url} does not tell its gRPC port{key}; use --gateway HOST:PORT")
    ca = choice.ca or (SYSTEM if parts.scheme == "https" else "")
    return GatewayAddress(join_address(parts.hostname, port), choice.api_key, ca, choice.name)


def _body(request: urllib.request.Request, choice: GatewayChoice) -> bytes:
    """Return the body of an answer, also of 503: a gateway that is not ready still tells its port."""
    context = None
    if request.type == "https":
        ca = Path(choice.ca) if choice.ca and choice.ca != SYSTEM else machine_authorities()
        context = ssl.create_default_context(cafile=str(ca))
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S, context=context) as answer:
            return bytes(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return error.read(MAX_ANSWER_BYTES)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
