"""What this gateway knows of the cluster, from a scheduler's Watch stream. The last word stays while no
scheduler answers."""

from collections import Counter
from collections.abc import Callable

from baton.core.client_api import ProcessInfo
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.gateway.input.validation import ModelFacts


class ClusterView:
    """The workers that serve one model."""

    def __init__(self, *, model: str, tokenizer_fingerprint: str, model_max_len: int | None) -> None:
        """`model_max_len`: the model's own, used until a worker has said what it allows."""
        self._model = model
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._model_max_len = model_max_len
        self._listeners: list[Callable[[], None]] = []
        self.scheduler: ProcessInfo | None = None
        """The one that tells us; None while none does."""
        self.reports: tuple[WorkerReport, ...] = ()
        self.layout: KvLayout | None = None
        self.facts = ModelFacts(max_model_len=model_max_len, max_num_seqs=None)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each update, and when the scheduler is lost."""
        self._listeners.append(listener)

    def take(self, update: ClusterUpdate, address: str = "") -> None:
        """`address`: of the scheduler that says so."""
        self.scheduler = ProcessInfo(process_id=update.scheduler_id, pid=update.pid, host=update.host, address=address)
        self.reports = update.reports
        ours = [report for report in update.reports if report.model == self._model]
        if ours:
            self.facts = ModelFacts(
                max_model_len=min(report.max_model_len for report in ours),
                max_num_seqs=max(report.max_num_seqs for report in ours),
            )
            self.layout = Counter(report.layout for report in ours).most_common(1)[0][0]
        self._changed()

    def lose_scheduler(self) -> None:
        """Nobody tells us what changes any more."""
        self.scheduler = None
        self._changed()

    @property
    def max_model_len(self) -> int | None:
        return self.facts.max_model_len

    @property
    def problem(self) -> str:
        """Why no request could be served now; empty when one can: both roles are there, and a pair of them is
        warm."""
        if self.scheduler is None:
            return "no scheduler answers"
        ready = [report for report in self.reports if report.model == self._model and report.state is WorkerState.READY]
        if not ready:
            return f"no ready worker serves {self._model}"
        ours = [report for report in ready if report.layout.tokenizer_fingerprint == self._tokenizer_fingerprint]
        if not ours:
            return "every worker has another tokenizer than this gateway; give both the same --model"
        if any(report.role.can_prefill and report.role.can_decode for report in ours):
            return ""
        for role, able in (
            ("prefill", [r.role.can_prefill for r in ours]),
            ("decode", [r.role.can_decode for r in ours]),
        ):
            if not any(able):
                return f"no {role} worker is ready"
        return "" if _has_warm_pair(ours) else "no prefill and decode worker are connected to each other yet"

    def layout_of(self, worker: WorkerRef | None) -> KvLayout | None:
        """None where no scheduler has told of that life (any more)."""
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
        """Which pairs are connected, how, and how fast, for people."""
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


def _has_warm_pair(reports: list[WorkerReport]) -> bool:
    lives = {(r.worker.worker_id, r.worker.worker_epoch) for r in reports if r.role.can_prefill}
    return any(
        not link.broken and (link.peer.worker_id, link.peer.worker_epoch) in lives
        for report in reports
        if report.role.can_decode
        for link in report.links
    )
