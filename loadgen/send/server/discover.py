"""Reads a server's models, kind and version before a run. Only the connection itself is required to work."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.loadgen_errors import LoadgenError, Unreachable, UntrustedCertificate
from loadgen.send.grpc.grpc_channel import address_of, open_channel, unreachable
from loadgen.send.http.http_client import split_url, tls_context

SET_KEY = "set --api-key, or BATON_API_KEY for a `baton up` of yours on this machine, or OPENAI_API_KEY"
TIMEOUT_S = 10.0
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Self-reported facts about a server.

    - `models`: model ids, the served one first
    - `kind`: the owner of the first model, which identifies the software
    - `max_model_len`: of the first model, or None
    """

    models: Sequence[str] = ()
    kind: str = ""
    max_model_len: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def discover_http(url: str, headers: Mapping[str, str], *, is_insecure: bool = False) -> Server:
    """Read `/v1/models` and the version.

    Raises Unreachable if no server answers, NotTrusted for its certificate, LoadgenError if an API key is
    missing.
    """
    status, body = _get(url, "/v1/models", headers, is_insecure)
    if status in (401, 403):
        raise LoadgenError(f"{url} rejected the API key (status {status}); {SET_KEY}")
    listed = _objects(body) if status == 200 else []
    if not listed:
        return Server(facts={"models": f"status {status}, unknown format" if status == 200 else f"status {status}"})
    first = listed[0]
    kind = str(first.get("owned_by") or "")
    length = first.get("max_model_len") or (first.get("meta") or {}).get("n_ctx_train")
    facts: dict[str, Any] = {"kind": kind, "models": listed[:16]}
    if kind == "baton":
        facts["version"] = _baton_version(url, headers, is_insecure)
    elif kind == "vllm":
        facts["version"] = _field(url, "/version", "version", headers, is_insecure)
    return Server(
        models=[str(model["id"]) for model in listed],
        kind=kind,
        max_model_len=length if isinstance(length, int) else None,
        facts={key: value for key, value in facts.items() if value is not None},
    )


def ready_status(url: str, path: str, headers: Mapping[str, str], *, is_insecure: bool = False) -> int:
    """Return the HTTP status of a path such as `/ready`. Raises Unreachable or NotTrusted."""
    return _get(url, path, headers, is_insecure)[0]


def discover_grpc(target: str, headers: Mapping[str, str], *, is_insecure: bool = False) -> Server:
    """Read the models over Baton's gRPC API. Raises Unreachable or LoadgenError."""
    from baton.v1 import inference_pb2, inference_pb2_grpc

    pb: Any = inference_pb2
    stub = inference_pb2_grpc.InferenceStub
    reply = _call(target, headers, lambda channel: stub(channel).ListModels, pb.ListModelsRequest(), is_insecure)
    models = [model.id for model in reply.models]
    length = reply.models[0].max_model_len if reply.models and reply.models[0].HasField("max_model_len") else None
    return Server(models=models, kind="baton", max_model_len=length, facts={"kind": "baton", "models": models})


def fetch_cluster_facts(
    target: str, headers: Mapping[str, str], model: str, *, is_insecure: bool = False
) -> dict[str, Any]:
    """Read a Baton cluster's ready workers for `model` from the `Admin` service of a gateway.

    Returns the version, the number of workers, their number by role and their total KV cache size in tokens.
    Raises Unreachable or LoadgenError.
    """
    from baton.v1 import admin_pb2, admin_pb2_grpc

    pb: Any = admin_pb2
    reply = _call(
        target, headers, lambda channel: admin_pb2_grpc.AdminStub(channel).Status, pb.StatusRequest(), is_insecure
    )
    if reply.model != model:
        raise LoadgenError(f"the cluster at {target} serves {reply.model}, not {model}; correct --gateway or --model")
    workers = [
        worker for worker in reply.workers if worker.state == pb.WORKER_STATE_READY and _serves(worker.model, model)
    ]
    roles = Counter(pb.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower() for worker in workers)
    facts = {
        "version": reply.version,
        "workers": len(workers),
        "roles": dict(sorted(roles.items())),
        "kv_tokens": sum(worker.blocks.total * worker.block_size_tokens for worker in workers),
        "block_size_tokens": workers[0].block_size_tokens if workers else None,
    }
    return {name: fact for name, fact in facts.items() if fact}


def fetch_http_url(target: str, headers: Mapping[str, str], *, is_insecure: bool = False) -> str:
    """Ask a Baton gateway at its gRPC address for the URL of its OpenAI API.

    Raises Unreachable or LoadgenError.
    """
    from baton.v1 import admin_pb2, admin_pb2_grpc

    pb: Any = admin_pb2
    reply = _call(
        target, headers, lambda channel: admin_pb2_grpc.AdminStub(channel).Status, pb.StatusRequest(), is_insecure
    )
    port = reply.gateway.address.rpartition(":")[2]
    if not port.isdecimal():
        raise LoadgenError(f"the gateway at {target} does not tell its HTTP port; name its URL with --url")
    address, is_tls = address_of(target)
    return f"{'https' if is_tls else 'http'}://{address.rpartition(':')[0]}:{port}"


def _serves(reported: str, model: str) -> bool:
    """True if a worker's model is `model`. Workers may append a remark: `demo (emulated)`."""
    return reported == model or reported.startswith(f"{model} (")


def _call(
    target: str,
    headers: Mapping[str, str],
    method: Callable[[Any], Callable[..., Any]],
    message: Any,
    is_insecure: bool,
) -> Any:
    """Return the reply of one blocking gRPC call. Raises Unreachable or LoadgenError."""
    import grpc

    metadata = tuple((name.lower(), value) for name, value in headers.items())
    with open_channel(grpc, target, is_insecure=is_insecure) as channel:
        try:
            return method(channel)(message, timeout=TIMEOUT_S, metadata=metadata, wait_for_ready=False)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAUTHENTICATED or code is grpc.StatusCode.PERMISSION_DENIED:
                raise LoadgenError(f"{target} rejected the API key; {SET_KEY}") from error
            raise unreachable(target, error.details() or code.name) from error


def _objects(body: bytes) -> list[dict[str, Any]]:
    try:
        data = json.loads(body)
        return [model for model in data["data"] if isinstance(model, dict) and model.get("id")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def _baton_version(url: str, headers: Mapping[str, str], is_insecure: bool) -> str | None:
    try:
        status, body = _get(url, "/metrics", headers, is_insecure)
    except LoadgenError:
        return None
    found = re.search(rb'^baton_build_info\{[^}]*version="([^"]*)"', body, re.MULTILINE) if status == 200 else None
    return found[1].decode(errors="replace") if found else None


def _field(url: str, path: str, name: str, headers: Mapping[str, str], is_insecure: bool) -> str | None:
    try:
        status, body = _get(url, path, headers, is_insecure)
        value = json.loads(body).get(name) if status == 200 else None
    except (LoadgenError, ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def _get(url: str, path: str, headers: Mapping[str, str], is_insecure: bool) -> tuple[int, bytes]:
    """Return (status, body) of a GET request. Raises Unreachable or NotTrusted."""
    parts = split_url(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=tls_context(is_insecure))
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path + path, headers={"User-Agent": "loadgen", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BYTES)
    except ssl.SSLCertVerificationError as error:
        raise UntrustedCertificate(
            f"the certificate of {url} is not trusted ({error.verify_message}); name a file of its authorities in "
            "SSL_CERT_FILE, or accept "
            "any certificate with --insecure"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        why = (
            error.reason
            if isinstance(error, ssl.SSLError)
            else getattr(error, "strerror", None) or str(error) or type(error).__name__
        )
        raise Unreachable(
            f"no server answers at {url}: {why}; start the server or correct its address (--url)"
        ) from error
    finally:
        connection.close()
