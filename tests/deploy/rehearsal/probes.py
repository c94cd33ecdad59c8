"""Runs probes as a kubelet does."""

import http.client
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Run = Callable[[Sequence[str], float], int]
"""Runs a command in the container with a timeout in seconds, and returns its exit code."""

PERIOD_S, TIMEOUT_S, FAILURES = 10.0, 1.0, 3
"""Kubernetes' defaults of probe settings."""


def why_failing(probe: Mapping[str, Any], address: str, run: Run) -> str:
    """Run a probe once.

    Return the failure, or an empty string. Raises ValueError for an unknown kind of probe.
    """
    timeout_s = float(probe.get("timeoutSeconds", TIMEOUT_S))
    try:
        if "httpGet" in probe:
            return _http(probe["httpGet"], address, timeout_s)
        if "tcpSocket" in probe:
            socket.create_connection((address, probe["tcpSocket"]["port"]), timeout_s).close()
            return ""
        if "grpc" in probe:
            return _grpc(probe["grpc"], address, timeout_s)
        if "exec" in probe:
            code = run(probe["exec"]["command"], timeout_s)
            return f"exit code {code}" if code else ""
    except (OSError, http.client.HTTPException, grpc.RpcError) as error:
        return repr(error)
    raise ValueError(f"a probe of no known kind: {dict(probe)}")


def _http(get: Mapping[str, Any], address: str, timeout_s: float) -> str:
    if unknown := get.keys() - {"path", "port"}:
        raise ValueError(f"httpGet with {', '.join(sorted(unknown))} cannot be rehearsed")
    connection = http.client.HTTPConnection(address, get["port"], timeout=timeout_s)
    try:
        connection.request("GET", get["path"])
        answer = connection.getresponse()
        said = answer.read(200).decode(errors="replace")
    finally:
        connection.close()
    return "" if 200 <= answer.status < 400 else f"status {answer.status}: {said}"


def _grpc(service: Mapping[str, Any], address: str, timeout_s: float) -> str:
    with grpc.insecure_channel(f"{address}:{service['port']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service.get("service", "")), timeout=timeout_s)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else f"status {answer.status}"
