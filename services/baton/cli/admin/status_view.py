"""Renders the output of `baton status` as tables that fit 80 columns, what needs attention first."""

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.formatting import seconds, size, speed, table
from baton.core.client_api import ClusterStatus, ProcessInfo, WorkerStatus
from baton.core.cluster.worker_report import LinkReport, WorkerState

STATE_STYLES = {
    WorkerState.STARTING: "cyan",
    WorkerState.READY: "green",
    WorkerState.DRAINING: "yellow",
    WorkerState.UNHEALTHY: "bold red",
}
MAX_TROUBLES = 3


class Trouble(IntEnum):
    """Degree of attention that a worker needs. Workers are listed in descending order."""

    NONE = 0
    SOME = 1
    MUCH = 2


TROUBLE_STYLES = {Trouble.NONE: "", Trouble.SOME: "yellow", Trouble.MUCH: "bold red"}


def render_status(status: ClusterStatus, *, max_links: int | None = None, at: str = "") -> RenderableType:
    """Render workers, KV blocks, links and processes; tables without rows are omitted.

    max_links: number of links to show, those with problems first; None for all.
    at: time of the answer, shown in the headline.
    """
    workers = sorted(status.workers, key=lambda worker: (-trouble_of(worker)[0], worker.worker.worker_id))
    parts: list[RenderableType] = [_headline(status, at), *_troubles(status, workers), ""]
    if workers:
        parts += [_workers(status, workers), "", _blocks(workers)]
        if any(worker.tiers for worker in workers):
            parts += ["", _tiers(workers)]
    else:
        parts.append(Text("no workers; new requests wait and then get 503", style="yellow"))
    links = [(worker, link) for worker in workers for link in worker.links]
    if links:
        parts += ["", *_links(links, max_links)]
    return Group(*parts, "", _processes(status, shows_hosts=_num_hosts(status) > 1))


def trouble_of(worker: WorkerStatus) -> tuple[Trouble, str]:
    """Return how much attention a worker needs, and why in a few words."""
    broken = [link.peer.worker_id for link in worker.links if link.broken]
    if worker.state is WorkerState.UNHEALTHY:
        return Trouble.MUCH, "is unhealthy"
    if broken:
        return Trouble.MUCH, f"does not read KV from {', '.join(broken)}"
    if worker.state is not WorkerState.READY:
        return Trouble.SOME, f"is {worker.state.value}"
    if worker.blocks.quarantined:
        return Trouble.SOME, f"has {worker.blocks.quarantined:,} blocks in quarantine"
    if worker.waiting_seqs and not worker.blocks.free and not worker.blocks.cached:
        return Trouble.SOME, "has no free KV blocks"
    if worker.waiting_seqs > max(1, worker.running_seqs):
        return Trouble.SOME, f"has {worker.waiting_seqs} waiting sequences"
    return Trouble.NONE, ""


def _headline(status: ClusterStatus, at: str) -> Text:
    requests = f"{status.open_requests} open request{'' if status.open_requests == 1 else 's'}"
    model = _common_model(status) or status.model
    return Text.assemble((model, "bold"), f"  baton {status.version}  {requests}", f"  {at}" if at else "")


def _troubles(status: ClusterStatus, workers: Sequence[WorkerStatus]) -> list[Text]:
    """One line per worker that needs attention, at most `MAX_TROUBLES`, after one for a missing scheduler."""
    lines = []
    if status.scheduler is None:
        lines.append(Text("scheduler not reachable; workers are shown as last reported", style="bold red"))
    found = [(worker, *trouble_of(worker)) for worker in workers]
    shown = [(worker, level, why) for worker, level, why in found if level is not Trouble.NONE]
    lines += [
        Text(f"{worker.worker.worker_id} {why}", style=TROUBLE_STYLES[level])
        for worker, level, why in shown[:MAX_TROUBLES]
    ]
    if len(shown) > MAX_TROUBLES:
        lines.append(Text(f"and {len(shown) - MAX_TROUBLES} more, see below", style="yellow"))
    return lines


def _common_model(status: ClusterStatus) -> str | None:
    """Return what all workers serve, such as `demo (emulated)`, or None if they differ."""
    models = {worker.model for worker in status.workers} or {status.model}
    return min(models) if len(models) == 1 else None


def _workers(status: ClusterStatus, workers: Sequence[WorkerStatus]) -> Table:
    """Table of workers. Host, epoch and model are shown only where they tell workers apart."""
    ids = Counter(worker.worker.worker_id for worker in workers)
    shows_host = _num_hosts(status) > 1
    shows_epoch = max(ids.values()) > 1
    shows_model = _common_model(status) is None
    more = [("host", shows_host), ("epoch", shows_epoch), ("model", shows_model)]
    result = table(
        "worker",
        ">running",
        ">waiting",
        "role",
        "state",
        ">to prefill",
        ">leases",
        ">pid",
        *(name for name, is_shown in more if is_shown),
    )
    for worker in workers:
        level, _ = trouble_of(worker)
        facts = {"host": worker.host, "epoch": f"{worker.worker.worker_epoch:016x}"[:8], "model": worker.model}
        result.add_row(
            Text(worker.worker.worker_id, style=TROUBLE_STYLES[level]),
            str(worker.running_seqs),
            Text(str(worker.waiting_seqs), style="yellow" if worker.waiting_seqs > max(1, worker.running_seqs) else ""),
            worker.role.value,
            Text(worker.state.value, style=STATE_STYLES[worker.state]),
            f"{worker.waiting_prefill_tokens:,}",
            str(worker.open_leases),
            str(worker.pid or ""),
            *(facts[name] for name, is_shown in more if is_shown),
        )
    return result


def _blocks(workers: Sequence[WorkerStatus]) -> Table:
    """Table of KV blocks by state. `held` is the part of `used` that other workers still read."""
    tokens = {worker.block_size_tokens for worker in workers}
    memory = {worker.blocks.total * worker.block_bytes for worker in workers}
    of = f" of {min(tokens)} tokens" if len(tokens) == 1 else ""
    dtypes = {worker.kv_dtype for worker in workers} - {""}  # workers of earlier releases do not name theirs
    dtype = f" in {' and '.join(sorted(dtypes))}" if dtypes else ""
    each = f", {size(min(memory))} per worker" if len(memory) == 1 else ""
    more = [*(["tokens"] if not of else []), *(["memory"] if not each else [])]
    names = ("used", "held", "cached", "free", "receiving", "quarantined", "total", *more)
    result = table("worker", *(f">{name}" for name in names), title=f"KV blocks{of}{dtype}{each}")
    for worker in workers:
        blocks = worker.blocks
        values = {
            "used": blocks.used,
            "held": blocks.held_for_others,
            "cached": blocks.cached,
            "free": blocks.free,
            "receiving": blocks.receiving,
            "quarantined": blocks.quarantined,
            "total": blocks.total,
            "tokens": worker.block_size_tokens,
        }
        result.add_row(
            worker.worker.worker_id,
            *(
                size(blocks.total * worker.block_bytes)
                if name == "memory"
                else Text(f"{values[name]:,}", style="red" if name == "quarantined" and blocks.quarantined else "")
                for name in names
            ),
        )
    return result


def _tiers(workers: Sequence[WorkerStatus]) -> Table:
    """Table of the slower tiers: blocks with content, size, and speed and fixed time of reloads."""
    columns = ("worker", "tier", ">held", ">total", ">memory", ">reload speed", ">fixed time")
    result = table(*columns, title="KV blocks in slower tiers")
    for worker in workers:
        for tier in worker.tiers:
            result.add_row(
                worker.worker.worker_id,
                tier.tier,
                f"{tier.held:,}",
                f"{tier.total:,}",
                size(tier.total * worker.block_bytes),
                speed(tier.load_bytes_per_s) if tier.load_bytes_per_s else "unmeasured",
                seconds(tier.load_overhead_s),
            )
    return result


def _links(links: Sequence[tuple[WorkerStatus, LinkReport]], max_links: int | None) -> list[RenderableType]:
    """Table of links, broken ones first, and a line that counts the links that are left out."""
    order = sorted(links, key=lambda pair: (not pair[1].broken, -pair[1].inflight_bytes, pair[0].worker.worker_id))
    shown = order if max_links is None else order[: max(1, max_links)]
    result = table("link", "over", ">speed", ">in flight", "state")
    for worker, link in shown:
        result.add_row(
            f"{worker.worker.worker_id} reads {link.peer.worker_id}",
            _transport(link),
            speed(link.bytes_per_s) if link.bytes_per_s else "unmeasured",
            size(link.inflight_bytes),
            Text(link.problem or "broken", style="bold red") if link.broken else Text("ok", style="green"),
        )
    if len(shown) == len(order):
        return [result]
    rest = order[len(shown) :]
    num_broken = sum(link.broken for _, link in rest)
    return [result, Text(f"and {len(rest)} more links, {num_broken} broken", style="red" if num_broken else "")]


def _transport(link: LinkReport) -> str:
    """Return the transport of a link, with what is known of other transfer backends of the pair."""
    transport = link.transport or "unknown"
    return f"{transport} (auto: {link.choice})" if link.choice else transport


def _processes(status: ClusterStatus, *, shows_hosts: bool) -> Table:
    hosts = ["host"] if shows_hosts else []
    result = table("process", "id", ">pid", *hosts, "address")
    result.add_row("gateway", *_process(status.gateway, shows_hosts))
    if status.scheduler is None:
        result.add_row("scheduler", Text("not reachable", style="bold red"))
    else:
        result.add_row("scheduler", *_process(status.scheduler, shows_hosts))
    return result


def _process(process: ProcessInfo, shows_host: bool) -> tuple[str, ...]:
    host = (process.host,) if shows_host else ()
    return process.process_id, str(process.pid or ""), *host, process.address


def _num_hosts(status: ClusterStatus) -> int:
    processes = [status.gateway, *([status.scheduler] if status.scheduler is not None else [])]
    return len({process.host for process in processes} | {worker.host for worker in status.workers})
