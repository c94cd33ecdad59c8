"""Traces the calls that place requests, as children of the request's span."""

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.interfaces import Duplex, SchedulerService, Source
from baton.core.request import RequestActuals
from baton.runtime.observability.tracing import Attributes, Tracing, reason_of


class TracedScheduler(SchedulerService):
    """Wraps a scheduler and records one span per `place` call.

    The gateway of a request that waits at the scheduler repeats the call, so such a request has several
    spans.
    """

    def __init__(self, inner: SchedulerService, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        span = self._tracing.start("placement", query.trace_context)
        try:
            answer = await self._inner.place(query)
        except BaseException as error:
            span.end(_query_attributes(query), problem=reason_of(error).value)
            raise
        if span.is_recorded:
            span.end(
                {**_query_attributes(query), **_answer_attributes(answer)},
                problem=answer.reason.value if isinstance(answer, Rejection) else "",
            )
        return answer

    async def finished(self, *actuals: RequestActuals) -> None:
        await self._inner.finished(*actuals)

    async def watch(self) -> Source[ClusterUpdate]:
        return await self._inner.watch()

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return await self._inner.explain(request_id)

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return await self._inner.drain(worker_id, node_shutting_down=node_shutting_down)

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        return await self._inner.clear_tenant(tenant_salt)

    async def cache_stats(self) -> CacheStats:
        return await self._inner.cache_stats()

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        await self._inner.report(stream)


def _query_attributes(query: PlacementQuery) -> Attributes:
    return {
        "baton.request_id": query.request_id.hex(),
        "baton.attempt": query.attempt,
        "baton.prompt_tokens": query.num_prompt_tokens,
    }


def _answer_attributes(answer: Placement | Rejection | StillWaiting) -> Attributes:
    match answer:
        case Placement():
            return {
                "baton.outcome": "placed",
                "baton.policy": answer.policy,
                "baton.decision_id": answer.decision_id,
                "baton.prefill": answer.prefill.worker_id if answer.prefill else None,
                "baton.decode": answer.decode.worker_id if answer.decode else None,
                "baton.prefix_source": answer.prefix_source.worker.worker_id if answer.prefix_source else None,
                "baton.waiting_s": answer.waiting_s,
                "baton.predicted_queue_s": answer.queue_s,
                "baton.predicted_prefix_pull_s": answer.prefix_pull_s,
                "baton.predicted_prefill_s": answer.prefill_s,
                "baton.predicted_transfer_s": answer.transfer_s,
                "baton.predicted_ttft_s": answer.ttft_s,
                "baton.predicted_tpot_s": answer.tpot_s,
            }
        case Rejection():
            return {
                "baton.outcome": "rejected",
                "baton.reason": answer.reason.value,
                "baton.term": answer.term or None,
                "baton.predicted_s": answer.predicted_s,
                "baton.limit_s": answer.limit_s,
                "baton.retry_after_s": answer.retry_after_s,
            }
        case StillWaiting():
            return {"baton.outcome": "waiting", "baton.num_waiting": answer.num_waiting}
