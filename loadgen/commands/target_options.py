"""Options for the target server and for sending, and their conversion to a `Target`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.runtime.process.run_file import RunningCluster, is_same_address, run_directories, running_clusters
from loadgen.commands.option_types import ApiKey, Bodies, Headers, Seconds, SloOf
from loadgen.loadgen_errors import LoadgenError
from loadgen.machine import usable_cores
from loadgen.plan.plan import Plan
from loadgen.plan.schedule import peak_rates
from loadgen.send.dialects import DIALECTS, dialect_of
from loadgen.send.run.priority import Priority
from loadgen.send.selftest import calibration
from loadgen.send.server.discover import Server, discover_grpc, discover_http, fetch_cluster_facts, fetch_http_url
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget

F = TypeVar("F", bound=Callable[..., Any])

HTTP_URL = "http://127.0.0.1:8000"
GRPC_URL = "127.0.0.1:8001"
SYSTEM_AUTHORITIES = "system"
"""Value of `RunningCluster.ca` for a certificate that this machine trusts anyway."""


def target_options(function: F) -> F:
    """Add the options for the server and its API."""
    return _server_options(_request_options(function))


def _server_options(function: F) -> F:
    """Add the options for the server and the form of requests."""
    return _all(
        function,
        click.option(
            "--url",
            "urls",
            multiple=True,
            metavar="URL",
            help="Server address. Repeatable: requests alternate between the servers.  [default: the newest `baton "
            f"up` of this user on this machine, else {HTTP_URL}, gRPC {GRPC_URL}]",
        ),
        click.option(
            "--protocol",
            type=click.Choice(["http", "grpc"]),
            default="http",
            show_default=True,
            help="grpc is Baton's own protocol.",
        ),
        click.option(
            "--api",
            type=click.Choice(["completions", "chat"]),
            default="completions",
            show_default=True,
            help="HTTP API to use.",
        ),
        click.option(
            "--prompts",
            type=click.Choice(["ids", "text"]),
            help="Form of the prompts.  [default: ids, for a chat text]",
        ),
        click.option(
            "--dialect",
            type=click.Choice([*DIALECTS]),
            help="Kind of server, for API extensions.  [default: detected from /v1/models]",
        ),
        click.option("--model", help="Model name.  [default: the first of /v1/models]"),
    )


def _request_options(function: F) -> F:
    """Add the options for authentication, additional fields, SLO and timeout."""
    return _all(
        function,
        click.option(
            "--api-key",
            type=ApiKey(),
            help="API key, sent as a bearer token; or set BATON_API_KEY, which only a `baton up` of this user on this "
            "machine gets, or OPENAI_API_KEY.",
        ),
        click.option(
            "--header",
            "headers",
            multiple=True,
            type=Headers(),
            metavar="NAME:VALUE",
            help="Additional HTTP header. Repeatable.",
        ),
        click.option(
            "--body",
            "bodies",
            multiple=True,
            type=Bodies(),
            metavar="FIELD=JSON",
            help="Additional field of each request body. Repeatable.",
        ),
        click.option(
            "--gateway",
            "--admin",
            "gateway",
            metavar="HOST:PORT",
            help="gRPC address of a Baton gateway, to read its number of workers and KV cache size. Without --url, "
            "requests go to this gateway, too.  [default: that of the same `baton up` as --url, if it runs here]",
        ),
        click.option("--insecure", is_flag=True, help="Accept any TLS certificate (HTTP only)."),
        click.option(
            "--slo",
            "slos",
            multiple=True,
            type=SloOf(),
            metavar="[CLASS:]SLO",
            help="SLO instead of the plan's, such as ttft=500ms,tpot=50ms,e2e=10s. Repeatable.",
        ),
        click.option(
            "--timeout",
            type=Seconds(),
            default="600s",
            show_default=True,
            help="Client timeout of one request.",
        ),
    )


def sending_options(function: F) -> F:
    """Add the options for how requests are sent."""
    return _all(
        function,
        click.option("--label", default="", help="Name of this run in reports."),
        click.option(
            "--workers", type=click.IntRange(1), help="Number of workers or GPUs of the server, for goodput per worker."
        ),
        click.option(
            "--kv-tokens",
            type=click.IntRange(1),
            help="KV cache size of the whole server in tokens, for the best possible prefix hit ratio.",
        ),
        click.option(
            "--processes",
            default="1",
            show_default=True,
            metavar="N|auto",
            help="Sending processes. One handles a few hundred requests/s.",
        ),
        click.option(
            "--priority",
            type=click.Choice([p.value for p in Priority]),
            default="high",
            show_default=True,
            help="Scheduling priority of the sending processes. high: short time slices, and nice -10 where allowed; "
            "realtime needs root or CAP_SYS_NICE. The summary shows what was used.",
        ),
        click.option(
            "--warmup",
            default=1,
            show_default=True,
            type=click.IntRange(0),
            help="Warm-up requests before the run; they share no prefix with the plan.",
        ),
    )


def target_of(given: Mapping[str, Any]) -> tuple[Target, Server]:
    """Return the target and what its server reports about itself. Contacts the server.

    Raises LoadgenError if the server cannot be used and click.UsageError for contradicting options.
    """
    is_grpc = given["protocol"] == "grpc"
    cluster = _cluster_of(given)
    headers = headers_of(given, cluster)
    if cluster is not None and cluster.ca not in ("", SYSTEM_AUTHORITIES):
        os.environ.setdefault("SSL_CERT_FILE", cluster.ca)  # also for the sending processes
    urls = given["urls"] or (_url_of(given, cluster, headers),)
    if is_grpc and cluster is not None:
        urls = tuple(_gateway_of(cluster) if is_same_address(url, cluster.url) else url for url in urls)
    if is_grpc:
        if given["api"] == "chat" or given["dialect"]:
            raise click.UsageError("--protocol grpc cannot be combined with --api chat or --dialect")
        server = discover_grpc(urls[0], headers, is_insecure=given["insecure"])
    else:
        server = discover_http(urls[0], headers, is_insecure=given["insecure"])
    model = given["model"] or next(iter(server.models), "")
    if not model:
        raise LoadgenError(f"{urls[0]} does not list its models ({server.facts.get('models')}); name one with --model")
    dialect = (
        DIALECTS["baton"] if is_grpc else DIALECTS[given["dialect"]] if given["dialect"] else dialect_of(server.kind)
    )
    server = replace(server, facts={**server.facts, **_cluster_facts(given, cluster, server, model, headers)})
    is_text = given["api"] == "chat" or not dialect.token_prompts
    if given["prompts"] == "ids" and is_text:
        raise click.UsageError("--prompts ids cannot be used with --api chat or with a server that accepts text only")
    return Target(
        urls=tuple(urls),
        model=model,
        protocol=given["protocol"],
        api=given["api"],
        tokenizer=str(given["tokenizer"].resolve()) if given["tokenizer"] else None,
        prompts=given["prompts"] or ("text" if is_text else "ids"),
        dialect=dialect.name,
        headers=headers,
        more=dict(given["bodies"]),
        timeout_s=given["timeout"],
        is_insecure=given["insecure"],
    ), server


def headers_of(given: Mapping[str, Any], cluster: RunningCluster | None = None) -> dict[str, str]:
    """Return the headers of all requests. The key in BATON_API_KEY is sent to `cluster` only.

    Raises click.BadParameter for a key that no header can hold.
    """
    headers = dict(given["headers"])
    variables = ("BATON_API_KEY", "OPENAI_API_KEY") if cluster is not None else ("OPENAI_API_KEY",)
    from_environment = next((key for name in variables if (key := os.environ.get(name))), None)
    api_key = given["api_key"] or (from_environment and ApiKey().convert(from_environment, None, None))
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _cluster_of(given: Mapping[str, Any]) -> RunningCluster | None:
    """Return the cluster of this user that all given addresses name, or without an address the newest."""
    named = [*given["urls"], *([given["gateway"]] if given["gateway"] else [])]
    if not named:
        return _newest_cluster()
    return next(
        (
            cluster
            for cluster in running_clusters(run_directories(os.environ))
            if all(is_same_address(each, cluster.url) or is_same_address(each, cluster.gateway) for each in named)
        ),
        None,
    )


@cache
def _newest_cluster() -> RunningCluster | None:
    """Return the newest cluster of this user, and say so if several run.

    It is chosen once per process: a search over rates must not move to a cluster that starts meanwhile.
    """
    running = running_clusters(run_directories(os.environ))
    if len(running) > 1:
        others = ", ".join(f"{cluster.url} ({cluster.model})" for cluster in running[1:])
        click.echo(
            f"loadgen: {len(running)} clusters of this user run on this machine; the newest is used: {running[0].url} "
            f"({running[0].model}). Choose with --url; others: {others}",
            err=True,
        )
    return running[0] if running else None


def _gateway_of(cluster: RunningCluster) -> str:
    """Return a cluster's gRPC address, with `https://` if it uses TLS."""
    return f"https://{cluster.gateway}" if cluster.url.startswith("https://") else cluster.gateway


def _url_of(given: Mapping[str, Any], cluster: RunningCluster | None, headers: Mapping[str, str]) -> str:
    """Return the server's address if --url was not given. Raises LoadgenError."""
    if given["protocol"] == "grpc":
        return given["gateway"] or (_gateway_of(cluster) if cluster is not None else GRPC_URL)
    if cluster is not None:
        return cluster.url
    if given["gateway"]:
        return fetch_http_url(given["gateway"], headers, is_insecure=given["insecure"])
    return HTTP_URL


def _cluster_facts(
    given: Mapping[str, Any],
    cluster: RunningCluster | None,
    server: Server,
    model: str,
    headers: Mapping[str, str],
) -> dict[str, Any]:
    """Return the number of workers and the KV cache size of a Baton cluster, if its gRPC address is known.

    Raises LoadgenError only if the user named the address with --gateway.
    """
    if given["gateway"]:
        return fetch_cluster_facts(given["gateway"], headers, model, is_insecure=given["insecure"])
    known = given["urls"][0] if given["urls"] and given["protocol"] == "grpc" else ""
    if cluster is not None:
        known = known or _gateway_of(cluster)
    elif not given["urls"]:
        known = GRPC_URL
    if server.kind != "baton" or not known:
        return {}
    try:
        return fetch_cluster_facts(known, headers, model)
    except LoadgenError as error:  # the address was only assumed: another cluster, or a key without admin rights
        return {"cluster": f"unknown: {error}"}


def processes_of(text: str, plan: Plan, priority: Priority) -> int:
    """Return the number of sending processes for the text of --processes. Raises click.BadParameter."""
    if text == "auto":
        return min(usable_cores(), calibration.processes_for(*peak_rates(plan.requests), calibration.load(priority)))
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise click.BadParameter("must be a number from 1 to 256, or auto", param_hint="--processes")
    return int(text)


def rates_warning(plan: Plan, processes: int, priority: Priority) -> str:
    """Return a warning if the plan needs more than `processes` can send in time, else an empty text."""
    return calibration.warning(*peak_rates(plan.requests), processes, calibration.load(priority))


def flags_of(given: Mapping[str, Any], target: Target, slos: Mapping[str, SloTarget]) -> dict[str, Any]:
    """Return the effective arguments without secrets: headers by name only."""
    shown = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if name not in ("api_key", "headers", "bodies", "slos", "urls", "checks", "quiet")
        and value is not None
        and value != ""
    }
    return {
        **shown,
        "urls": list(target.urls),
        "model": target.model,
        "prompts": target.prompts,
        "dialect": target.dialect,
        "headers": sorted(target.headers),
        "body": dict(target.more),
        "slo": {name: str(slo) for name, slo in slos.items()},
    }


def server_facts(given: Mapping[str, Any], server: Server) -> dict[str, Any]:
    """Return the facts about the server for the result, with the user's --workers and --kv-tokens applied."""
    facts = dict(server.facts)
    for name in ("workers", "kv_tokens"):
        if given[name]:
            facts[name] = given[name]
    if server.max_model_len is not None:
        facts["max_model_len"] = server.max_model_len
    return facts


def _all(function: F, *options: Callable[[F], F]) -> F:
    """Apply the options so that `--help` lists them in the given order."""
    for option in reversed(options):
        function = option(function)
    return function
