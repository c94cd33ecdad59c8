"""Builders of test inputs. Every argument has a valid default."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from baton.core.client_api import ClusterStatus, ProcessInfo, WorkerStatus
from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.cluster.worker_report import BlockCounts, LinkReport, WorkerReport, WorkerRole, WorkerState
from baton.core.errors import Code, Failure, Reason
from baton.core.ids import DecisionId, JobId, WorkerRef
from baton.core.kv.block_hash import chain, token_ids
from baton.core.kv.kv_layout import KvComponent, KvLayout, LayerGroup, layer_groups
from baton.core.messages.jobs import PrefillJob
from baton.core.request import Sampling, TokenDelta
from baton.engine.state.sequence import SequenceRequest
from baton.runtime.process.byte_budget import Account, ByteBudget


def with_limits(budget: ByteBudget, limits: Mapping[Account, int] | None) -> ByteBudget:
    """A new budget like this one, with other limits for some accounts."""
    return ByteBudget({**budget.limits, **(limits or {})}, budget.service)


def layout(**changes: Any) -> KvLayout:
    """A layout with two layers, two KV heads of size 8, and blocks of 4 tokens."""
    fields: dict[str, Any] = {
        "model_fingerprint": "model-a",
        "tokenizer_fingerprint": "tokenizer-a",
        "block_size_tokens": 4,
        "groups": (
            LayerGroup(
                layer_begin=0,
                num_layers=2,
                components=tuple(
                    KvComponent(name=name, num_kv_heads=2, head_dim=8, dtype="float32") for name in ("k", "v")
                ),
            ),
        ),
    }
    return KvLayout(**(fields | changes))


def windowed_layout(windows: Sequence[int], **changes: Any) -> KvLayout:
    """The layout of `layout` with one layer for each of `windows`."""
    components = layout().groups[0].components
    return layout(groups=layer_groups([(components, window) for window in windows]), **changes)


def worker_ref(worker_id: str = "w0", epoch: int = 1) -> WorkerRef:
    return WorkerRef(worker_id=worker_id, worker_epoch=epoch, address=f"{worker_id}:1")


def blocks(total: int = 100, cached: int = 0, used: int = 0, **more: int) -> BlockCounts:
    """Block counts. The rest of `total` is free."""
    free = total - cached - used - more.get("receiving", 0) - more.get("quarantined", 0)
    return BlockCounts(
        **({"total": total, "free": free, "cached": cached, "used": used, "receiving": 0, "quarantined": 0} | more)
    )


def worker_report(
    worker_id: str = "w0", role: str = "hybrid", *, epoch: int = 1, report_seq: int = 1, **changes: Any
) -> WorkerReport:
    fields: dict[str, Any] = {
        "worker": worker_ref(worker_id, epoch),
        "report_seq": report_seq,
        "role": WorkerRole(role),
        "state": WorkerState.READY,
        "model": "demo",
        "layout": layout(),
        "blocks": blocks(),
        "max_model_len": 1024,
        "max_num_seqs": 8,
    }
    return WorkerReport(**(fields | changes))


def link(peer: str, *, epoch: int = 1, broken: bool = False) -> LinkReport:
    return LinkReport(peer=worker_ref(peer, epoch), bytes_per_s=1e9, broken=broken, transport="shared-memory")


def cluster(*reports: WorkerReport) -> ClusterSnapshot:
    return ClusterSnapshot(
        workers=tuple(WorkerView(report=r) for r in sorted(reports, key=lambda r: r.worker.worker_id))
    )


def query(**changes: Any) -> PlacementQuery:
    fields: dict[str, Any] = {
        "request_id": b"request-0",
        "attempt": 0,
        "model": "demo",
        "num_prompt_tokens": 40,
        "max_tokens": 16,
    }
    return PlacementQuery(**(fields | changes))


def rng(seed: int = 0) -> Random:
    return Random(seed)


BLOCK_SIZE_TOKENS = 4
ROOT = b"root".ljust(16, b"\0")


def hashes_of(tokens: Sequence[int], block_size_tokens: int = BLOCK_SIZE_TOKENS) -> tuple[bytes, ...]:
    """Return the chained hashes of the full blocks of `tokens`, starting at `ROOT`."""
    return tuple(chain(ROOT, token_ids(tokens), block_size_tokens))


def sequence_request(
    seq_id: int = 1, tokens: Sequence[int] = (5, 6, 7), *, max_tokens: int = 8, sampling: Any = None, **changes: Any
) -> SequenceRequest:
    """A sequence request. `sampling`: dict of sampling parameters other than max_tokens."""
    block_size_tokens = changes.pop("block_size_tokens", BLOCK_SIZE_TOKENS)
    fields: dict[str, Any] = {
        "seq_id": seq_id,
        "token_ids": token_ids(tokens),
        "num_prompt_tokens": len(tokens),
        "sampling": Sampling(max_tokens=max_tokens, **(sampling or {})),
        "root_hash": ROOT,
        "block_hashes": hashes_of(tokens, block_size_tokens),
    }
    return SequenceRequest(**(fields | changes))


def job_id(request: int = 0, attempt: int = 0) -> JobId:
    return JobId(request_id=b"request-%d" % request, attempt=attempt)


def prefill_job(tokens: Sequence[int] = (5, 6, 7), **changes: Any) -> PrefillJob:
    fields: dict[str, Any] = {
        "job": job_id(),
        "token_ids": token_ids(tokens),
        "num_prompt_tokens": len(tokens),
        "sampling": Sampling(max_tokens=8),
        "sample_indices": (0,),
        "deadline_s": 60.0,
    }
    return PrefillJob(**(fields | changes))


def token_delta(
    *tokens: int, job: JobId | None = None, sample_index: int = 0, output_index: int = 0, **more: Any
) -> TokenDelta:
    return TokenDelta(
        job=job or job_id(), sample_index=sample_index, output_index=output_index, token_ids=tokens, **more
    )


def failure(
    reason: Reason = Reason.QUEUE_FULL, code: Code = Code.RESOURCE_EXHAUSTED, message: str = "try later", **more: Any
) -> Failure:
    return Failure(code=code, reason=reason, message=message, **more)


def cluster_status(*reports: WorkerReport, **changes: Any) -> ClusterStatus:
    """The status that gateway `g0` reports, with scheduler `s0`."""
    fields: dict[str, Any] = {
        "version": "1.2.3",
        "model": "demo",
        "gateway": ProcessInfo(process_id="g0", pid=11, host="here", address="127.0.0.1:8001"),
        "scheduler": ProcessInfo(process_id="s0", pid=12, host="here", address="127.0.0.1:9000"),
        "workers": tuple(WorkerStatus.of(report) for report in reports),
    }
    return ClusterStatus(**(fields | changes))


def placement(prefill: str | None = "w0", decode: str | None = "w1", **changes: Any) -> Placement:
    fields: dict[str, Any] = {
        "decision_id": DecisionId("d0"),
        "scheduler_id": "s0",
        "policy": "least_loaded",
        "prefill": worker_ref(prefill) if prefill is not None else None,
        "decode": worker_ref(decode) if decode is not None else None,
    }
    return Placement(**(fields | changes))


def decision_record(attempt: int = 0, **changes: Any) -> DecisionRecord:
    """A decision record of an unfinished request, placed on w0 and w1."""
    fields: dict[str, Any] = {
        "decision_id": DecisionId("d0"),
        "scheduler_id": "s0",
        "policy": "least_loaded",
        "request_id": b"request-0",
        "attempt": attempt,
        "query": query(attempt=attempt),
        "placement": placement(),
        "rejection": None,
    }
    return DecisionRecord(**(fields | changes))
