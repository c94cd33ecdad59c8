"""One-line inputs for tests: every argument has a default that makes a valid value."""

from random import Random
from typing import Any

from baton.core.cluster import (
    BlockCounts,
    ClusterSnapshot,
    LinkReport,
    PlacementQuery,
    WorkerReport,
    WorkerRole,
    WorkerState,
    WorkerView,
)
from baton.core.ids import WorkerRef
from baton.core.kv_layout import KvComponent, KvLayout, LayerGroup


def layout(**changes: Any) -> KvLayout:
    """Two layers, two KV heads of 8, blocks of 4 tokens."""
    fields: dict[str, Any] = {
        "model_fingerprint": "model-a",
        "tokenizer_fingerprint": "tokenizer-a",
        "block_size_tokens": 4,
        "groups": (
            LayerGroup(
                layer_begin=0,
                num_layers=2,
                components=tuple(KvComponent(name=name, num_kv_heads=2, head_dim=8, dtype="float32") for name in ("k", "v")),
            ),
        ),
    }
    return KvLayout(**(fields | changes))


def worker_ref(worker_id: str = "w0", epoch: int = 1) -> WorkerRef:
    return WorkerRef(worker_id=worker_id, worker_epoch=epoch, address=f"{worker_id}:1")


def blocks(total: int = 100, cached: int = 0, used: int = 0, **more: int) -> BlockCounts:
    """The rest of `total` is free."""
    free = total - cached - used - more.get("landing", 0) - more.get("quarantined", 0)
    return BlockCounts(**({"total": total, "free": free, "cached": cached, "used": used, "landing": 0, "quarantined": 0} | more))


def worker_report(worker_id: str = "w0", role: str = "hybrid", *, epoch: int = 1, report_seq: int = 1, **changes: Any) -> WorkerReport:
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
    return ClusterSnapshot(workers=tuple(WorkerView(report=r) for r in sorted(reports, key=lambda r: r.worker.worker_id)))


def query(**changes: Any) -> PlacementQuery:
    fields: dict[str, Any] = {"request_id": b"request-0", "attempt": 0, "model": "demo", "num_prompt_tokens": 40, "max_tokens": 16}
    return PlacementQuery(**(fields | changes))


def rng(seed: int = 0) -> Random:
    return Random(seed)
