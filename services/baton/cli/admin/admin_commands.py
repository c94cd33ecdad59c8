"""Implements `baton status`, `explain`, `drain` and `cache`, which call `baton.v1.Admin` at a gateway."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from baton.cli.admin.cache_files import export_to_file, import_from_file, prompt_body
from baton.cli.admin.drain_workers import drain_at_gateway, drain_at_socket
from baton.cli.admin.gateway_connection import (
    AdminContext,
    Gateway,
    GatewayAddress,
    ReconnectingGateway,
    unreachable,
)
from baton.cli.admin.gateway_options import gateway_options
from baton.cli.admin.locate_gateway import GatewayChoice, locate_gateway
from baton.core.client_api import ClusterStatus
from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_terms import TERMS
from baton.core.errors import BatonError, StreamBroken
from baton.core.plain_json import to_plain

DRAIN_LIMIT_S = 300.0
NOT_GONE_EXIT_CODE = 3
"""Exit code of `baton drain --wait` if workers are still there after --limit-s."""
LAST = "last"


@click.command()
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON object instead of tables; with --watch one per line."
)
@gateway_options
def status(watch: bool, as_json: bool, choice: GatewayChoice, context: AdminContext) -> None:
    """Show the cluster's workers, their load, KV blocks, links and leases.

    Workers that need attention come first. Host and epoch are shown only where they tell workers apart. With
    --watch into a file or a pipe, a status is printed whenever it changes.
    """
    gateway = _locate(choice, context)
    if not watch:
        found = _call(gateway, context, lambda client: client.status())
        if as_json:
            click.echo(json.dumps(to_plain(found), indent=2))
        else:
            from baton.cli.admin.status_view import render_status
            from baton.cli.formatting import console

            console().print(render_status(found))
        return
    from baton.cli.admin.status_watch import watch_status

    with suppress(KeyboardInterrupt):
        asyncio.run(watch_status(gateway, context, as_json=as_json))


class _ExplainCommand(click.Command):
    """Command whose help ends with the meaning of each column."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Columns of the candidates (seconds are predicted; a dash means: not for this side)"):
            formatter.write_dl([(term.label, term.meaning) for term in TERMS.values()])


@click.command(cls=_ExplainCommand)
@click.argument("request_id", metavar="REQUEST_ID|last")
@click.option("-v", "--verbose", is_flag=True, help="Describe the policy, and show all terms of the candidates.")
@gateway_options
def explain(request_id: str, verbose: bool, choice: GatewayChoice, context: AdminContext) -> None:
    """Explain the placement of a request and compare predictions with the outcome.

    REQUEST_ID is the x-request-id header of the response, or its id (such as chatcmpl-...); `last` is the
    request that was placed last. The first line says how it went. TTFT is counted from the question to the
    scheduler. What is neither the scheduler's queue, the worker's queue nor prefill is time between gateway
    and worker.
    """
    gateway = _locate(choice, context)
    records = _call(gateway, context, lambda client: client.explain(None if request_id == LAST else request_id))
    if not records:
        raise BatonError(
            "no request has been placed yet"
            if request_id == LAST
            else f"no decision is stored for request {request_id}; the id is `x-request-id` or the response's id "
            "(`chatcmpl-...`), and decisions are kept for an hour at most"
        )
    from baton.cli.admin.explain_view import policy_rules, render_decisions
    from baton.cli.formatting import console

    console().print(render_decisions(records, policy_rules() if verbose else {}, is_verbose=verbose))


@click.command()
@click.argument("worker", required=False)
@click.option("--here", is_flag=True, help="Drain all workers of this machine (or pod) instead of one by name.")
@click.option(
    "--drain-socket",
    type=click.Path(path_type=Path),
    envvar="BATON_DRAIN_SOCKET",
    help="With --here, drain the worker that listens at this Unix socket, without a gateway. Default: none. "
    "[BATON_DRAIN_SOCKET]",
)
@click.option("--wait", is_flag=True, help="Return when the workers have ended, instead of when the drain has begun.")
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0, min_open=True),
    default=DRAIN_LIMIT_S,
    help=f"With --wait, maximum time to wait (seconds); then the remaining workers are listed and the exit code is "
    f"{NOT_GONE_EXIT_CODE}. "
    f"Default: {DRAIN_LIMIT_S:g}.",
)
@gateway_options
def drain(
    worker: str | None,
    here: bool,
    drain_socket: Path | None,
    wait: bool,
    limit_s: float,
    choice: GatewayChoice,
    context: AdminContext,
) -> None:
    """Drain a worker: it finishes its requests, accepts no new ones and exits.

    WORKER is its name in `baton status`. It exits at the latest after its --drain-s. A fleet on an existing
    Ray cluster then starts a replacement. After --here, which means that the machine is about to shut down,
    the replacement runs on another node.
    """
    if here == (worker is not None):
        raise click.UsageError("give either the name of a worker or --here")
    if not here and click.get_current_context().get_parameter_source("drain_socket") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--drain-socket needs --here")
    wait_s = limit_s if wait else None
    if here and drain_socket is not None:
        remaining = drain_at_socket(drain_socket, wait_s)
    else:
        gateway = _locate(choice, context, must_be_unique=True)
        remaining = _call(gateway, context, lambda client: drain_at_gateway(client, context, worker, wait_s))
    if remaining:
        click.echo(f"baton: still running after {limit_s:g} s: {', '.join(remaining)}", err=True)
        sys.exit(NOT_GONE_EXIT_CODE)


@click.group()
def cache() -> None:
    """Show and manage the cached KV of the workers."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of tables.")
@gateway_options
def stats(as_json: bool, choice: GatewayChoice, context: AdminContext) -> None:
    """Show what the caches hold and what was reused from them, and what an infinite cache would have reused.

    Reused tokens are those of the requests that completed since the start of the scheduler, reloads those
    since the start of each worker. The last line compares what was reused with the ceiling: the share of the
    same prompt tokens that an infinite cache would have reused. If caches are well below it, larger tiers
    can help. It is exact up to 65,536 different blocks, and beyond that an estimate from a sample of them.
    """
    from baton.cli.admin.cache_view import cache_json, render_cache
    from baton.cli.formatting import console

    async def both(client: Gateway) -> tuple[ClusterStatus, CacheStats]:
        return await client.status(), await client.cache_stats()

    status, cache_stats = _call(_locate(choice, context), context, both)
    if as_json:
        click.echo(json.dumps(cache_json(status, cache_stats), indent=2))
    else:
        console().print(render_cache(status, cache_stats))


@cache.command()
@click.option("--tenant", required=True, help="Tenant of the API keys; `default` if there are none.")
@gateway_options
def clear(tenant: str, choice: GatewayChoice, context: AdminContext) -> None:
    """Erase the cached KV of a tenant on all workers and their disks.

    Returns when the command was sent. Each worker logs `tenant_erased` at the end, or `tenant_not_erased` if
    its disk fails. KV that running requests compute is cached again.
    """
    gateway = _locate(choice, context, must_be_unique=True)
    worker_ids = _call(gateway, context, lambda client: client.clear_tenant(tenant))
    click.echo(f"{len(worker_ids)} workers erase the KV of tenant {tenant}: {', '.join(worker_ids) or 'none'}")


_file = click.Path(path_type=Path, exists=True, dir_okay=False)


@cache.command("export")
@click.option("--model", help="Served name of the model. Default: that of the cluster.")
@click.option("--prompt", help="Prompt as text, as for /v1/completions.")
@click.option("--prompt-file", type=_file, help="File with the prompt as text.")
@click.option(
    "--messages-file",
    type=_file,
    help="JSON file with a list of chat messages, or with the body of a chat request, of which `messages` and `tools` "
    "count.",
)
@click.option("--tenant", default="default", help="Tenant whose KV it is. Default: default, the one without API keys.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write, or to replace."
)
@gateway_options
def export_command(
    model: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    messages_file: Path | None,
    tenant: str,
    out: Path,
    choice: GatewayChoice,
    context: AdminContext,
) -> None:
    """Write the KV of the longest cached prefix of a prompt to a file.

    The prefix consists of full blocks, which the worker with the most of them reads from its device, host
    memory and disk. Give exactly one of --prompt, --prompt-file and --messages-file. The file has mode 0600:
    it tells what the prompt was to those who can compute KV.
    """
    if sum(each is not None for each in (prompt, prompt_file, messages_file)) != 1:
        raise click.UsageError("give exactly one of --prompt, --prompt-file and --messages-file")
    body = prompt_body(model, prompt, prompt_file, messages_file)
    gateway = _locate(choice, context, must_be_unique=True)
    found = _call(gateway, context, lambda client: export_to_file(client, tenant, body, out))
    click.echo(
        f"exported {found.num_tokens} of {found.num_prompt_tokens} prompt tokens from {found.worker_id} to {out} "
        f"({found.num_bytes} bytes)"
    )


@cache.command("import")
@click.argument("file", type=_file)
@click.option("--worker", default="", help="Worker to load it into. Default: the prefill worker with most free blocks.")
@click.option(
    "--tenant", default="default", help="Tenant that it was exported for. Default: default, the one without API keys."
)
@gateway_options
def import_command(file: Path, worker: str, tenant: str, choice: GatewayChoice, context: AdminContext) -> None:
    """Load a file of `baton cache export` into the cache of a worker.

    Import only files that you trust: their KV is used for each prompt with the same tokens, and nothing shows
    from which tokens it was computed. If too few blocks are free, the beginning is imported.
    """
    gateway = _locate(choice, context, must_be_unique=True)
    found = _call(gateway, context, lambda client: import_from_file(client, tenant, worker, file))
    click.echo(
        f"{found.num_tokens} of {found.num_file_tokens} tokens of {file} are cached at {found.worker_id}; "
        f"{found.num_cached_before} were before"
    )
    if found.num_tokens < found.num_file_tokens:
        click.echo(
            "baton: too few blocks were free for the rest; raise --kv-memory, or name another --worker", err=True
        )


COMMANDS = (status, explain, drain, cache)


def _locate(choice: GatewayChoice, context: AdminContext, *, must_be_unique: bool = False) -> GatewayAddress:
    """Return the gateway to call. Prints a note if others could be meant. Raises BatonError."""
    located = locate_gateway(choice, context.running_clusters(), must_be_unique=must_be_unique)
    if located.note:
        click.echo(f"baton: {located.note}", err=True)
    return located.gateway


def _call(gateway: GatewayAddress, context: AdminContext, call: Callable[[Gateway], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of a call to the gateway. Raises BatonError with the remedy if it does not answer."""

    async def called() -> Any:
        async with ReconnectingGateway(gateway, context) as client:
            return await call(client)

    try:
        return asyncio.run(called())
    except StreamBroken as broken:
        raise unreachable(broken, context.running_clusters()) from broken
