"""The gateway's view of the cluster, as received from a scheduler's Watch stream.

While no scheduler answers, the last known state of the workers stays in use.
"""

from collections import Counter
from collections.abc import Callable, Set
from hashlib import blake2b

from baton.core.client_api import ProcessInfo
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.gateway.input.validation import ModelLimits

FINGERPRINT_BYTES = 5


class ClusterView:
    """Workers of the cluster, and the limits and KV layout of those that serve this gateway's model."""

    def __init__(self, *, model: str, tokenizer_fingerprint: str, model_max_len: int | None) -> None:
        """Create an empty view. `model_max_len` is the model's own limit, used until a worker reports its
        limit."""
        self._model = model
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._listeners: list[Callable[[], None]] = []
        self.scheduler: ProcessInfo | None = None
        """The scheduler whose stream is watched; None if none answers."""
        self.reports: tuple[WorkerReport, ...] = ()
        self._layouts: list[KvLayout] = []
        self._fingerprint = ""
        self.layout: KvLayout | None = None
        """The most common KV layout among the model's workers; None until one has reported."""
        self.model_limits = ModelLimits(max_model_len=model_max_len, max_num_seqs=None)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Register a function to call after each update, and when the scheduler is lost."""
        self._listeners.append(listener)

    def update(self, update: ClusterUpdate, address: str = "") -> None:
        """Apply an update from the scheduler at `address`."""
        self.scheduler = ProcessInfo(process_id=update.scheduler_id, pid=update.pid, host=update.host, address=address)
        self.reports = update.reports
        reports = [report for report in update.reports if report.model == self._model]
        if reports:
            layouts = [report.layout for report in reports]
            if layouts != self._layouts:  # mostly equal, and hashing them takes longer
                self._layouts = layouts
                self.layout = Counter(layouts).most_common(1)[0][0]
                self._fingerprint = _fingerprint({layout.model_fingerprint for layout in layouts})
            self.model_limits = ModelLimits(
                max_model_len=min(report.max_model_len for report in reports),
                max_num_seqs=max(report.max_num_seqs for report in reports),
                fingerprint=self._fingerprint,
            )
        self._changed()

    def scheduler_lost(self) -> None:
        """Record that no scheduler sends updates any more."""
        self.scheduler = None
        self._changed()

    @property
    def max_model_len(self) -> int | None:
        """Longest context that every worker of the model accepts; None if unknown."""
        return self.model_limits.max_model_len

    @property
    def problem(self) -> str:
        """Reason why no request can be served now; empty if one can.

        A request needs a ready hybrid worker, or a ready prefill and decode worker with a working link.
        """
        if self.scheduler is None:
            return "no scheduler answers"
        ready = [report for report in self.reports if report.model == self._model and report.state is WorkerState.READY]
        if not ready:
            return f"no ready worker serves {self._model}"
        usable = [report for report in ready if report.layout.tokenizer_fingerprint == self._tokenizer_fingerprint]
        if not usable:
            return "every worker has another tokenizer than this gateway; start both with the same --model"
        if any(report.role.can_prefill and report.role.can_decode for report in usable):
            return ""
        for role, able in (
            ("prefill", [r.role.can_prefill for r in usable]),
            ("decode", [r.role.can_decode for r in usable]),
        ):
            if not any(able):
                return f"no {role} worker is ready"
        return "" if _has_connected_pair(usable) else "no prefill and decode worker are connected to each other yet"

    def layout_of(self, worker: WorkerRef | None) -> KvLayout | None:
        """Return the KV layout of this incarnation; None if the scheduler does not list it."""
        return next(
            (
                report.layout
                for report in self.reports
                if worker is not None and report.worker.is_same_incarnation(worker)
            ),
            None,
        )

    @property
    def links(self) -> str:
        """Working links as text for operators: prefill worker, decode worker, transport and bandwidth."""
        return ", ".join(
            f"{link.peer.worker_id} -> {report.worker.worker_id} {link.transport} {link.bytes_per_s / 1e9:.2f} GB/s"
            for report in self.reports
            if report.role.can_decode
            for link in report.links
            if not link.broken
        )

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


def _fingerprint(model_fingerprints: Set[str]) -> str:
    """Return a short name of the weights that the workers have, in the form of OpenAI's."""
    digest = blake2b("\n".join(sorted(model_fingerprints)).encode(), digest_size=FINGERPRINT_BYTES)
    return f"fp_{digest.hexdigest()}"


def _has_connected_pair(reports: list[WorkerReport]) -> bool:
    """True if a decode worker has a working link to a prefill worker."""
    prefill_workers = {r.worker.incarnation for r in reports if r.role.can_prefill}
    return any(
        not link.broken and link.peer.incarnation in prefill_workers
        for report in reports
        if report.role.can_decode
        for link in report.links
    )
