"""Options that say whom a run is sent to, and how; and what they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from loadgen.commands.option_types import ApiKey, Bodies, Headers, Seconds, SloOf
from loadgen.loadgen_errors import LoadgenError
from loadgen.machine import usable_cores
from loadgen.plan.plan import Plan
from loadgen.plan.schedule import peak_rates
from loadgen.send.dialects import DIALECTS, dialect_of
from loadgen.send.run.priority import Priority
from loadgen.send.selftest import calibration
from loadgen.send.server.discover import Server, ask_admin, ask_grpc, ask_http
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget

F = TypeVar("F", bound=Callable[..., Any])

HTTP_URL = "http://127.0.0.1:8000"
GRPC_URL = "127.0.0.1:8001"


def target_options(function: F) -> F:
    """The server, and what is asked of it."""
    return _all(
        function,
        click.option(
            "--url",
            "urls",
            multiple=True,
            metavar="URL",
            help=f"The server; several take turns.  [default: {HTTP_URL}, gRPC {GRPC_URL}]",
        ),
        click.option(
            "--protocol",
            type=click.Choice(["http", "grpc"]),
            default="http",
            show_default=True,
            help="grpc: Baton's own.",
        ),
        click.option(
            "--api",
            type=click.Choice(["completions", "chat"]),
            default="completions",
            show_default=True,
            help="Over HTTP.",
        ),
        click.option(
            "--prompts",
            type=click.Choice(["ids", "text"]),
            help="What prompts are sent as.  [default: ids, for a chat text]",
        ),
        click.option(
            "--dialect", type=click.Choice([*DIALECTS]), help="The server's kind.  [default: as /v1/models says]"
        ),
        click.option("--model", help="The model's name.  [default: the first of /v1/models]"),
        click.option(
            "--api-key",
            type=ApiKey(),
            envvar="OPENAI_API_KEY",
            help="Sent as a bearer token; also the variable OPENAI_API_KEY.",
        ),
        click.option(
            "--header",
            "headers",
            multiple=True,
            type=Headers(),
            metavar="NAME:VALUE",
            help="One more header. Repeatable.",
        ),
        click.option(
            "--body",
            "bodies",
            multiple=True,
            type=Bodies(),
            metavar="FIELD=JSON",
            help="One more field of each body. Repeatable.",
        ),
        click.option(
            "--admin",
            metavar="HOST:PORT",
            help=f"Baton's gRPC address, to ask for its workers and their KV memory.  [default: --url of gRPC; without --url {GRPC_URL}]",
        ),
        click.option("--insecure", is_flag=True, help="Take any TLS certificate, over HTTP."),
        click.option(
            "--slo",
            "slos",
            multiple=True,
            type=SloOf(),
            metavar="[CLASS:]SLO",
            help="ttft=500ms,tpot=50ms,e2e=10s; instead of the plan's.",
        ),
        click.option(
            "--timeout",
            type=Seconds(),
            default="600s",
            show_default=True,
            help="The client's patience for one request.",
        ),
    )


def sending_options(function: F) -> F:
    """How it is sent."""
    return _all(
        function,
        click.option("--label", default="", help="What reports call this run."),
        click.option(
            "--workers", type=click.IntRange(1), help="How many workers or GPUs the server has, for goodput per worker."
        ),
        click.option(
            "--kv-tokens",
            type=click.IntRange(1),
            help="How many tokens all its KV memory holds, for the best prefix hit ratio it allows.",
        ),
        click.option(
            "--processes",
            default="1",
            show_default=True,
            metavar="N|auto",
            help="That send. One does some hundred requests a second.",
        ),
        click.option(
            "--priority",
            type=click.Choice([p.value for p in Priority]),
            default="high",
            show_default=True,
            help="Of the processes that send.",
        ),
        click.option(
            "--warmup",
            default=1,
            show_default=True,
            type=click.IntRange(0),
            help="Requests before, which share no token with the plan.",
        ),
    )


def target_of(given: Mapping[str, Any]) -> tuple[Target, Server]:
    """Asks the server what it is."""
    is_grpc = given["protocol"] == "grpc"
    urls = given["urls"] or (GRPC_URL if is_grpc else HTTP_URL,)
    headers = dict(given["headers"])
    if given["api_key"]:
        headers["Authorization"] = f"Bearer {given['api_key']}"
    if is_grpc:
        if given["api"] == "chat" or given["dialect"]:
            raise click.UsageError("--protocol grpc has one API and one dialect, Baton's")
        server = ask_grpc(urls[0], headers, is_insecure=given["insecure"])
    else:
        server = ask_http(urls[0], headers, is_insecure=given["insecure"])
    model = given["model"] or next(iter(server.models), "")
    if not model:
        raise LoadgenError(
            f"{urls[0]} does not say which models it serves ({server.facts.get('models')}): give one with --model"
        )
    dialect = (
        DIALECTS["baton"] if is_grpc else DIALECTS[given["dialect"]] if given["dialect"] else dialect_of(server.kind)
    )
    server = replace(server, facts={**server.facts, **_cluster_facts(given, server, model, headers)})
    is_text = given["api"] == "chat" or not dialect.token_prompts
    if given["prompts"] == "ids" and is_text:
        raise click.UsageError("--prompts ids: neither a chat nor a server that takes text only can be sent token ids")
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


def _cluster_facts(given: Mapping[str, Any], server: Server, model: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Of a Baton whose gRPC address is known. Raises LoadgenError where the user has named an address that
    does not tell."""
    if given["admin"]:
        return ask_admin(given["admin"], headers, model, is_insecure=given["insecure"])
    known = GRPC_URL if not given["urls"] else given["urls"][0] if given["protocol"] == "grpc" else ""
    if server.kind != "baton" or not known:
        return {}
    try:
        return ask_admin(known, headers, model)
    except LoadgenError as error:  # nobody has asked for it: another cluster's, or the key is not an admin's
        return {"cluster": f"not told: {error}"}


def processes_of(text: str, plan: Plan, priority: Priority) -> int:
    if text == "auto":
        return min(usable_cores(), calibration.processes_for(*peak_rates(plan.requests), calibration.load(priority)))
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise click.BadParameter("must be a number from 1 to 256, or auto", param_hint="--processes")
    return int(text)


def rates_warning(plan: Plan, processes: int, priority: Priority) -> str:
    """Where the plan asks for more than so many processes are known to send in time; else empty."""
    return calibration.warning(*peak_rates(plan.requests), processes, calibration.load(priority))


def flags_of(given: Mapping[str, Any], target: Target, slos: Mapping[str, SloTarget]) -> dict[str, Any]:
    """The effective arguments, as they may be shown: names of headers, not their values."""
    kept = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if name not in ("api_key", "headers", "bodies", "slos", "urls", "checks", "quiet")
        and value is not None
        and value != ""
    }
    return {
        **kept,
        "urls": list(target.urls),
        "model": target.model,
        "prompts": target.prompts,
        "dialect": target.dialect,
        "headers": sorted(target.headers),
        "body": dict(target.more),
        "slo": {name: str(slo) for name, slo in slos.items()},
    }


def server_facts(given: Mapping[str, Any], server: Server) -> dict[str, Any]:
    """For the result: what the server says of itself, and what the user says of it."""
    facts = dict(server.facts)
    for name in ("workers", "kv_tokens"):
        if given[name]:
            facts[name] = given[name]
    if server.max_model_len is not None:
        facts["max_model_len"] = server.max_model_len
    return facts


def _all(function: F, *options: Callable[[F], F]) -> F:
    """The options in the order of `--help`."""
    for option in reversed(options):
        function = option(function)
    return function
