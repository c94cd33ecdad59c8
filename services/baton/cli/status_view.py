"""What `baton status` shows: a cluster's status as tables."""

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
    """Processes, workers, their blocks and their links; the last two only where there are any."""
    parts: list[RenderableType] = [_headline(status), "", _processes(status)]
    if status.workers:
        parts += ["", _workers(status.workers), "", _blocks(status.workers)]
    else:
        parts += ["", Text("no workers; requests wait, then get 503", style="yellow")]
    if any(worker.links for worker in status.workers):
        parts += ["", _links(status.workers)]
    return Group(*parts)


def _headline(status: ClusterStatus) -> Text:
    requests = f"{status.open_requests} open request{'' if status.open_requests == 1 else 's'}"
    return Text.assemble((status.model, "bold"), f"  baton {status.version}  {requests}")


def _processes(status: ClusterStatus) -> Table:
    made = table("process", "id", ">pid", "host", "address")
    made.add_row("gateway", *_process(status.gateway))
    if status.scheduler is None:
        made.add_row("scheduler", Text("none answers; workers as last known", style="bold red"))
    else:
        made.add_row("scheduler", *_process(status.scheduler))
    return made


def _process(process: ProcessInfo) -> tuple[str, str, str, str]:
    return process.process_id, str(process.pid or ""), process.host, process.address


def _workers(workers: tuple[WorkerStatus, ...]) -> Table:
    made = table(
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
        made.add_row(
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
    return made


def _blocks(workers: tuple[WorkerStatus, ...]) -> Table:
    made = table(
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
        made.add_row(
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
    return made


def _links(workers: tuple[WorkerStatus, ...]) -> Table:
    made = table("link", "over", ">speed", ">in flight", "state")
    for worker in workers:
        for link in worker.links:
            made.add_row(
                f"{worker.worker.worker_id} reads {link.peer.worker_id}",
                link.transport or "unknown",
                speed(link.bytes_per_s) if link.bytes_per_s else "unmeasured",
                size(link.inflight_bytes),
                Text("broken", style="bold red") if link.broken else Text("ok", style="green"),
            )
    return made
