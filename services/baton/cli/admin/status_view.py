"""Renders the output of `baton status` as tables."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.formatting import size, speed, table
from baton.core.client_api import ClusterStatus, ProcessInfo, WorkerStatus
from baton.core.cluster.worker_report import WorkerState

STATE_STYLES = {
    WorkerState.STARTING: "cyan",
    WorkerState.READY: "green",
    WorkerState.DRAINING: "yellow",
    WorkerState.UNHEALTHY: "bold red",
}


def render_status(status: ClusterStatus) -> RenderableType:
    """Render processes, workers, KV blocks and links; tables without rows are omitted."""
    parts: list[RenderableType] = [_headline(status), "", _processes(status)]
    if status.workers:
        parts += ["", _workers(status.workers), "", _blocks(status.workers)]
    else:
        parts += ["", Text("no workers; new requests wait and then get 503", style="yellow")]
    if any(worker.links for worker in status.workers):
        parts += ["", _links(status.workers)]
    return Group(*parts)


def _headline(status: ClusterStatus) -> Text:
    requests = f"{status.open_requests} open request{'' if status.open_requests == 1 else 's'}"
    return Text.assemble((status.model, "bold"), f"  baton {status.version}  {requests}")


def _processes(status: ClusterStatus) -> Table:
    result = table("process", "id", ">pid", "host", "address")
    result.add_row("gateway", *_process(status.gateway))
    if status.scheduler is None:
        result.add_row("scheduler", Text("not reachable; workers are shown as last reported", style="bold red"))
    else:
        result.add_row("scheduler", *_process(status.scheduler))
    return result


def _process(process: ProcessInfo) -> tuple[str, str, str, str]:
    return process.process_id, str(process.pid or ""), process.host, process.address


def _workers(workers: tuple[WorkerStatus, ...]) -> Table:
    result = table(
        "worker",
        "role",
        "state",
        ">pid",
        "host",
        "epoch",
        "model",
        ">running",
        ">waiting",
        ">tokens to prefill",
        ">leases",
    )
    for worker in workers:
        result.add_row(
            worker.worker.worker_id,
            worker.role.value,
            Text(worker.state.value, style=STATE_STYLES[worker.state]),
            str(worker.pid or ""),
            worker.host,
            f"{worker.worker.worker_epoch:016x}"[:8],
            worker.model,
            str(worker.running_seqs),
            str(worker.waiting_seqs),
            f"{worker.waiting_prefill_tokens:,}",
            str(worker.open_leases),
        )
    return result


def _blocks(workers: tuple[WorkerStatus, ...]) -> Table:
    result = table(
        "blocks",
        ">total",
        ">free",
        ">cached",
        ">used",
        ">(held for others)",
        ">receiving",
        ">quarantined",
        ">of",
        ">memory",
    )
    for worker in workers:
        blocks = worker.blocks
        result.add_row(
            worker.worker.worker_id,
            *(
                f"{count:,}"
                for count in (
                    blocks.total,
                    blocks.free,
                    blocks.cached,
                    blocks.used,
                    blocks.held_for_others,
                    blocks.receiving,
                )
            ),
            Text(f"{blocks.quarantined:,}", style="red" if blocks.quarantined else ""),
            f"{worker.block_size_tokens} tokens",
            size(blocks.total * worker.block_bytes),
        )
    return result


def _links(workers: tuple[WorkerStatus, ...]) -> Table:
    result = table("link", "over", ">speed", ">in flight", "state")
    for worker in workers:
        for link in worker.links:
            result.add_row(
                f"{worker.worker.worker_id} reads {link.peer.worker_id}",
                link.transport or "unknown",
                speed(link.bytes_per_s) if link.bytes_per_s else "unmeasured",
                size(link.inflight_bytes),
                Text(link.problem or "broken", style="bold red") if link.broken else Text("ok", style="green"),
            )
    return result
